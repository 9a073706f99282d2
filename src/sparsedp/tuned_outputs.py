"""What a search publishes: the best trial's public part, with a statement of what the whole search cost.

Nothing here knows how many trials there were, which one was the best, or what any of the others scored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsedp import disk, statement
from sparsedp.dp.accounting import Spent
from sparsedp.dp.ledger import Ledger
from sparsedp.dp.tradeoff import profile
from sparsedp.outputs import PRIVATE, number, privacy_line

KEPT = "not covered: the other trials were kept, so that somebody may choose among them again"
NO_TRIAL = "no model: the number of trials was drawn as zero"
REWRITTEN = ("ledger.json", "privacy.json", "privacy.md", "summary.json", "model_card.md", "metrics.jsonl")
HIDDEN = "how many trials the search had, which of them was the best, and everything of the others"


@dataclass(frozen=True)
class Facts:
    """What may be told of a search."""

    settings: Mapping[str, Any]
    ledger: Ledger
    spent: Spent
    one: Spent
    """What one trial would have claimed by itself."""
    together: Mapping[str, Any]
    """What the data set's budget file says."""
    key_given: bool

    def tuning(self) -> dict[str, Any]:
        """The statement's word on tuning."""
        return {
            "covered": not self.settings["keep_trials"], "words": self._words(), **self.settings,
            "epsilon_of_the_search": self.spent.epsilon, "epsilon_of_one_run": self.one.epsilon,
            "runs_on_this_data": self.together.get("runs"), "epsilon_of_all": self.together.get("epsilon"),
            "runs_not_private": self.together.get("not_private"),
        }  # fmt: skip

    def _words(self) -> str:
        s = self.settings
        scored = "their accuracy on the evaluation split, which was declared public" if s["score"] == "public" else (
            f"how many of {s['held_out_units']} units that were kept from training, and are protected alike, they classified, with "
            f"Gaussian noise of deviation {s['score_noise_multiplier']:.4g} that is charged"
        )  # fmt: skip
        return (
            f"epsilon is that of a whole search: the best of a random number of runs ({s['distribution']}, mean {s['trials_mean']:g}), each "
            f"with one of {s['candidates']} candidate settings drawn at random, compared by {scored}; this run by itself would claim epsilon "
            f"{number(self.one.epsilon)}; how many runs there were is not told"
        )


def publish(public: Path, best: Path | None, facts: Facts) -> dict[str, Any]:
    """Fill the search's public folder from the best trial's. The summary comes last: a search is finished when it is there."""
    summary = _no_model(facts) if best is None else _of_best(public, best, facts)
    disk.write_json(public / "summary.json", summary)
    return summary


def _of_best(public: Path, best: Path, facts: Facts) -> dict[str, Any]:
    for path in sorted(p for p in best.rglob("*") if p.is_file()):
        name = path.relative_to(best)
        if str(name) not in REWRITTEN:
            disk.make_folder((public / name).parent)
            disk.write_bytes(public / name, path.read_bytes())
    metrics = best / "metrics.jsonl"
    if metrics.exists():
        lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        disk.write_text(public / "metrics.jsonl", "".join(f"{json.dumps(_without_epsilon(line))}\n" for line in lines))
    one = disk.read_json(best / "summary.json", "the best trial's summary")
    stamp = KEPT if one["private"] and facts.settings["keep_trials"] else one["stamp"]
    summary = {**one, **_claim(facts, stamp), "tuning": facts.tuning()}
    stated = disk.read_json(best / "privacy.json", "the best trial's statement")
    statement.write(public, restated(stated, facts, stamp))
    disk.write_text(public / "model_card.md", _card((best / "model_card.md").read_text(encoding="utf-8"), summary))
    return summary


def _without_epsilon(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics; epsilon at a step of one trial is nothing that is claimed."""
    return {name: value for name, value in line.items() if name != "epsilon"}


def _claim(facts: Facts, stamp: str) -> dict[str, Any]:
    return {"epsilon": facts.spent.epsilon, "delta": facts.spent.delta, "accountant": facts.spent.accountant,
            "private": stamp == PRIVATE, "stamp": stamp, "warnings": list(facts.spent.warnings)}  # fmt: skip


def restated(stated: Mapping[str, Any], facts: Facts, stamp: str) -> dict[str, Any]:
    """One trial's statement as that of the search which chose it."""
    spent, ledger = facts.spent, facts.ledger
    units = stated["units"] + facts.settings["held_out_units"]
    return {
        **stated,
        "stamp": stamp,
        "not_covered": [*stated["not_covered"], HIDDEN],
        "covered": [*stated["covered"], "which of the candidate settings were chosen"],
        "units": units,
        "one_over_n": 1 / units,
        "epsilon": spent.epsilon,
        "delta": spent.delta,
        "warnings": list(spent.warnings),
        "others": {"delta": spent.delta, "epsilon": statement.others(ledger, spent.delta)},
        "profile": statement.curve(profile(ledger, spent.neighbouring)) if stamp == PRIVATE else None,
        "events": ledger.to_json(),
        "accountant": statement.accountant_of(ledger, spent, spent.delta),
        "tuning": facts.tuning(),
        "void_if": [*stated["void_if"], "another trial of the search, its score, or the number of trials is published"],
    }


def _card(card: str, summary: Mapping[str, Any]) -> str:
    lines = card.splitlines(keepends=True)
    place = next(i for i, line in enumerate(lines) if line.startswith("- Privacy:"))
    lines[place] = f"{privacy_line(summary)}\n- Tuning: {summary['tuning']['words']}.\n"
    return "".join(lines)


def _no_model(facts: Facts) -> dict[str, Any]:
    """The Poisson law can say zero: that is an answer like another, costs the same, and is not drawn again."""
    stamp = NO_TRIAL if not facts.key_given else f"{NO_TRIAL}, from a key chosen by the user"
    claim = {**_claim(facts, stamp), "private": not facts.key_given, "neighbouring": facts.spent.neighbouring}
    return {**claim, "accuracy": None, "accuracy_average": None, "tuning": facts.tuning()}
