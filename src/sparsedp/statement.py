"""The privacy statement of a run: what is claimed, what it rests on, and what would void it, for machines and for people.

`facts` gathers everything from the configuration, the ledger and public constants; nothing comes from a realised batch.
The JSON is enough to compute epsilon again with dp_accounting alone (examples/recompute_epsilon.py does).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsedp import disk
from sparsedp.dp.accounting import Spent, epsilon
from sparsedp.dp.ledger import Ledger
from sparsedp.dp.tradeoff import Profile, profile
from sparsedp.environment import versions
from sparsedp.errors import UsageError
from sparsedp.rundir import describe
from sparsedp.state import FRESH

if TYPE_CHECKING:
    from sparsedp.pruning import Pruned
    from sparsedp.training import Setting

RATES = (0.001, 0.01, 0.1)
"""False positive rates at which the best attack's power is told."""


def facts(
    setting: Setting, ledger: Ledger, spent: Spent, stamp: str, pruned: Pruned | None, budget: Mapping[str, Any]
) -> dict[str, Any]:
    """The statement as plain values. Its headings follow Ponomareva et al. 2023, section 5.3."""
    run, plan = setting.run, setting.plan
    m = run.mechanism
    claimed = None if stamp != "differentially private" else profile(ledger, m.neighbouring)
    return {
        "stamp": stamp,
        "setting": "central: a trusted party holds the data and trains; the public folder of the run may be seen by anyone",
        "covered": ["the final weights", "their moving average", "every noised iterate", "the masks", "the optimiser's state"],
        "not_covered": ["the number of units N, which is public", "timing and memory use", "logs in private/", "anything computed "
                        "from the training data outside this run"],
        "unit": "all training rows with one unit number" if setting.dataset.train.units is not None
                else "one training record: an image with its label, in all its augmented views",
        "copies": "a person with several units is protected less: k units cost at most k times epsilon, with a larger delta",
        "neighbouring": {"relation": spent.neighbouring, "words": NEIGHBOURS[spent.neighbouring]},
        "epsilon": spent.epsilon,
        "delta": spent.delta,
        "one_over_n": 1 / plan.num_units,
        "warnings": list(spent.warnings),
        "others": _others(ledger, m.delta),
        "profile": None if claimed is None else _curve(claimed),
        "events": ledger.to_json(),
        "accountant": {"name": spent.accountant, "library": "dp_accounting", "version": versions()["dp-accounting"], "method": spent.method,
                       "grid": spent.grid, "slack": spent.slack, "pessimistic": True},
        "mechanism": {"clip": m.clip if m.private else None, "noise_multiplier": plan.noise_multiplier, "steps": plan.steps,
                      "sampling_rate": plan.sampling_rate, "batch_size": plan.batch_size, "num_units": plan.num_units,
                      "views": run.data.views, "noise_on": "the selected coordinates only", "divisor": "the expected batch size"},
        "sampling": "Poisson: every unit joins every step by a coin of its own, drawn from the run's key; empty batches are ordinary "
                    "steps; no shuffling",
        "selection": _selection(setting, pruned),
        "keys": "chosen by the user: the noise can be computed again by whoever knows it" if setting.key.given
                else "256 bits from the operating system; erased when the run ended",
        "arithmetic": ARITHMETIC[m.arithmetic],
        "records_that_break": "a record whose gradient or loss is not finite, or that cannot be read, counts as zero, and is counted nowhere",
        "public_data": {"weights": run.model.weights, "weights_sha256": _digest(run.model.weights), "overlap": "not checked: the "
                        "weights' own training data are not at hand"} if run.model.weights else None,
        "preprocessing": {"mean": list(setting.dataset.normalisation.mean), "std": list(setting.dataset.normalisation.std),
                          "origin": "public constants, not computed from the training data"},
        "tuning": {"covered": False, "words": "epsilon is that of this run alone; choosing among runs on the same data costs more",
                   "runs_on_this_data": budget.get("runs"), "epsilon_of_all": budget.get("epsilon")},
        "audit": None,
        "resumed": ledger_words(ledger),
        "software": versions(),
        "config": describe(run),
        "config_sha256": hashlib.sha256(json.dumps(describe(run), sort_keys=True).encode()).hexdigest(),
        "void_if": ["the weights are trained further on private data without adding its cost", "the mask file is used on other private "
                    "data than it was made from, or again on the same data uncounted", "the key was copied before it was erased",
                    "training rows of one person were given different unit numbers", "anything in private/ is published"],
    }  # fmt: skip


NEIGHBOURS = {
    "add-remove": "two data sets are neighbours when one unit's data are made empty in one of them (zero-out: N is public; adding or "
    "removing the unit gives the same numbers)",
    "replace-one": "two data sets are neighbours when one unit's data are replaced by anything else",
}
ARITHMETIC = {
    "float": "sums and Gaussian noise in floating point, noise from SHAKE-256; not claimed: safety against attacks on the rounding of "
    "floating-point numbers",
    "exact": "gradients clipped and rounded to an integer grid, discrete Gaussian noise by exact integer arithmetic from SHAKE-256",
}


def _others(ledger: Ledger, delta: float) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for accountant, relation in (("pld", "add-remove"), ("rdp", "add-remove"), ("pld", "replace-one")):
        try:
            found[f"{accountant}, {relation}"] = epsilon(ledger, delta, accountant, relation).epsilon  # type: ignore[arg-type]
        except UsageError:
            found[f"{accountant}, {relation}"] = None
    return found


def _curve(claimed: Profile) -> dict[str, Any]:
    every = max(1, len(claimed.epsilons) // 20)
    return {
        "delta_at_epsilon": [[e, d] for e, d in zip(claimed.epsilons[::every], claimed.deltas[::every], strict=True)],
        "mu_gdp_at_most": claimed.gaussian(),
        "best_attack": [
            {"false_positive_rate": rate, "true_positive_rate_at_most": claimed.attack_power(rate)} for rate in RATES
        ],
    }


def _selection(setting: Setting, pruned: Pruned | None) -> dict[str, Any]:
    s = setting.run.sparsity
    free = "chosen before the batch is drawn, from fresh coins and from weights that are released already: no cost"
    made = None
    if pruned is not None:
        made = {"criterion": pruned.criterion, "rate": pruned.rate, "granularity": pruned.granularity, "private": pruned.private,
                "kept": {name: int(mask.sum()) for name, mask in pruned.masks.items()}, "pruned_weights": s.pruned_weights}  # fmt: skip
    return {
        "pre_pruning": made,
        "dropping": {"criterion": s.drop, "rate": s.drop_rate, "granularity": s.granularity, "why_free": free},
    }


def ledger_words(ledger: Ledger) -> str:
    """Whether steps were charged more than once."""
    said = [entry.what for entry in ledger.entries if entry.what.startswith(FRESH)]
    return "; ".join(said) if said else "no step was charged twice"


def _digest(path: str | Path | None) -> str | None:
    if path is None or not Path(path).is_file():
        return None
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write(public: Path, stated: dict[str, Any]) -> None:
    """privacy.json and privacy.md, bound to the files that they speak of by their checksums."""
    names = ("model.safetensors", "average.safetensors", "mask.safetensors", "ledger.json", "config.json")
    stated = {**stated, "files": {name: _digest(public / name) for name in names if (public / name).exists()}}
    disk.write_json(public / "privacy.json", stated)
    disk.write_text(public / "privacy.md", page(stated))


def page(stated: Mapping[str, Any]) -> str:
    """One page for people who are not privacy researchers."""
    return "\n".join([*_claim(stated), *_basis(stated), *_limits(stated), ""])


def _claim(stated: Mapping[str, Any]) -> list[str]:
    if stated["stamp"] != "differentially private":
        return ["# Privacy statement", "", f"**This model is {stated['stamp']}.** Nothing below is a guarantee.", ""]
    m = stated["mechanism"]
    odds = [
        f"- An attacker who wrongly accuses {share(a['false_positive_rate'])} of the people who were not in the data finds at most "
        f"{share(a['true_positive_rate_at_most'])} of those who were."
        for a in stated["profile"]["best_attack"]
    ]
    return [
        "# Privacy statement",
        "",
        f"This model was trained with differential privacy: epsilon {stated['epsilon']:.4g} at delta {stated['delta']:g}.",
        "",
        f"**What is protected:** {stated['unit']}. There are {m['num_units']} of them. {stated['neighbouring']['words'].replace('two data sets', 'Two data sets')}.",
        "",
        *[f"**Beware:** {warning}.\n" for warning in stated["warnings"]],
        "**In words:** suppose that an attacker sees the released files, knows everything else, and asks whether one particular record was "
        "trained on. Whatever they do, these are the odds:",
        "",
        *odds,
        "",
        f"Replacing a record by another, instead of emptying it, gives epsilon {_number(stated['others']['pld, replace-one'])}; another "
        f"accountant (RDP) gives {_number(stated['others']['rdp, add-remove'])}.",
        "",
    ]


def _basis(stated: Mapping[str, Any]) -> list[str]:
    m, a = stated["mechanism"], stated["accountant"]
    events = [f"- {e['count']} x {e['what']}: {_event(e['event'])}" for e in stated["events"]]
    return [
        "## What it rests on",
        "",
        f"- Setting: {stated['setting']}.",
        f"- Released and covered: {', '.join(stated['covered'])}.",
        f"- Sampling: {stated['sampling']} (rate {m['sampling_rate']:.6g}, {m['batch_size']} expected).",
        f"- Each record's gradient, averaged over {m['views']} views, is clipped to length {m['clip']}; noise multiplier "
        f"{m['noise_multiplier']:.6g}, on {m['noise_on']}; divided by {m['divisor']}.",
        f"- Selection of coordinates: {stated['selection']['dropping']['criterion']} at rate {stated['selection']['dropping']['rate']}, "
        f"{stated['selection']['dropping']['why_free']}.",
        f"- Accountant: {a['name']} ({a['library']} {a['version']}): {a['method']}.",
        f"- Keys: {stated['keys']}.",
        f"- Arithmetic: {stated['arithmetic']}.",
        f"- Broken records: {stated['records_that_break']}.",
        f"- Public data: {stated['public_data']['weights'] if stated['public_data'] else 'none was used'}.",
        "",
        "Every access to the private data, in order:",
        "",
        *events,
        "",
    ]


def _limits(stated: Mapping[str, Any]) -> list[str]:
    tuning = stated["tuning"]
    runs = "" if tuning["runs_on_this_data"] is None else (
        f" The operator's budget file counts {tuning['runs_on_this_data']} runs on these data, together epsilon "
        f"{_number(tuning['epsilon_of_all'])}."
    )  # fmt: skip
    return [
        "## What is not covered",
        "",
        *(f"- {line}." for line in stated["not_covered"]),
        f"- Tuning: {tuning['words']}.{runs}",
        f"- Copies: {stated['copies']}.",
        f"- Audit: {'none was done' if stated['audit'] is None else stated['audit']['words']}.",
        f"- Resumption: {stated['resumed']}.",
        "",
        "The statement no longer holds if:",
        "",
        *(f"- {line}." for line in stated["void_if"]),
    ]


def share(rate: float) -> str:
    """A rate in words that need no mathematics."""
    if rate >= 0.1:
        return f"{100 * rate:.0f} in 100"
    return f"{1000 * rate:.3g} in 1000"


def _event(event: Mapping[str, Any]) -> str:
    kind = event["type"]
    if kind == "PoissonSampledDpEvent":
        return f"a Poisson sample at rate {event['sampling_probability']:.6g} of {_event(event['event'])}"
    if kind == "GaussianDpEvent":
        return f"a Gaussian release with noise multiplier {event['noise_multiplier']:.6g}"
    return {"NoOpDpEvent": "no access", "NonPrivateDpEvent": "an access without noise: no guarantee"}.get(kind, kind)


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"
