"""Compute a run's epsilon again from its public/privacy.json, with dp_accounting and nothing of sparsedp."""

import json
import pathlib
import sys

import dp_accounting as dp
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant


def event(row):
    kind = getattr(dp.dp_event, row["type"])
    return kind(*(event(v) if isinstance(v, dict) else v for k, v in row.items() if k != "type"))


stated = json.loads(pathlib.Path(sys.argv[1]).read_text())
relation = {"add-remove": "ADD_OR_REMOVE_ONE", "replace-one": "REPLACE_ONE"}[stated["neighbouring"]["relation"]]
grid = stated["accountant"]["grid"]
accountant = PLDAccountant(dp.NeighboringRelation[relation], value_discretization_interval=grid) if grid else RdpAccountant()
for entry in stated["events"]:
    accountant.compose(event(entry["event"]), entry["count"])
found = accountant.get_epsilon(stated["delta"])
print(f"stated {stated['epsilon']:.6f}, computed {found:.6f}")
sys.exit(abs(found - stated["epsilon"]) > 1e-4)
