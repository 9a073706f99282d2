"""Compute a run's epsilon again from its public/privacy.json, with dp_accounting and nothing of sparsedp."""

import json
import logging
import pathlib
import sys

import dp_accounting as dp
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant


def event(row):
    if isinstance(row, dict):
        return getattr(dp.dp_event, row["type"])(**{name: event(value) for name, value in row.items() if name != "type"})
    return tuple(map(event, row)) if isinstance(row, list) else float("inf") if row == "infinity" else row


def epsilon(entries, by):
    relation = {"add-remove": "ADD_OR_REMOVE_ONE", "replace-one": "REPLACE_ONE"}[stated["neighbouring"]["relation"]]
    grid = {"value_discretization_interval": by["grid"]}
    accountant = PLDAccountant(dp.NeighboringRelation[relation], **grid) if by["grid"] else RdpAccountant()
    for entry in entries:
        accountant.compose(event(entry["event"]), entry["count"])
    return accountant.get_epsilon(by["delta"] - by["rounding"])


logging.disable(logging.WARNING)  # of the orders that RdpAccountant leaves out
stated = json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))
if stated["epsilon"] is None:
    sys.exit(f"{stated['stamp']}: there is no epsilon to compute")
parts = [stated["events"]]  # all together; the paper's rule sums what each kind of event costs by itself
if stated["accountant"]["name"] == "paper":
    parts = [[e for e in stated["events"] if e["event"] == kind["event"]] for kind in stated["events"]]
    parts = [part for place, part in enumerate(parts) if part not in parts[:place]]
found = float(sum(epsilon(part, stated["accountant"]) for part in parts))
print(f"{stated['stamp']}: stated {stated['epsilon']:.6f}, computed {found:.6f}")
sys.exit(abs(found - stated["epsilon"]) > 1e-4)
