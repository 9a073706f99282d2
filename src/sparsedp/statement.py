"""The privacy statement of a run: what is claimed, what it rests on, and what would void it, for machines and for people.

`facts` gathers everything from the configuration, the ledger and public constants; nothing comes from a realised batch.
The JSON is enough to compute epsilon again with dp_accounting alone (examples/recompute_epsilon.py does). What people read
is `statement_page.page`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsedp import disk
from sparsedp.dp.accounting import Spent, epsilon, parts_of, rounding
from sparsedp.dp.ledger import Ledger
from sparsedp.dp.tradeoff import Profile, profile
from sparsedp.environment import source, versions
from sparsedp.errors import UsageError
from sparsedp.planning import snip_batch
from sparsedp.rundir import describe
from sparsedp.state import FRESH
from sparsedp.statement_page import page

if TYPE_CHECKING:
    from sparsedp.config import Mechanism
    from sparsedp.planning import Budget
    from sparsedp.pruning import Pruned
    from sparsedp.training import Setting

PRIVATE = "differentially private"
"""The stamp of a run whose epsilon is a guarantee."""
RATES = (0.001, 0.01, 0.1)
"""False positive rates at which the best attack's power is told."""
BOUND = (
    "model.safetensors", "average.safetensors", "mask.safetensors", "model.onnx", "model.pt2", "ledger.json", "config.json",
)  # fmt: skip
"""The files of public/ that a statement is bound to by their checksums."""


def facts(
    setting: Setting, ledger: Ledger, spent: Spent, stamp: str, pruned: Pruned | None, budget: Mapping[str, Any]
) -> dict[str, Any]:
    """The statement as plain values. Its headings follow Ponomareva et al. 2023, section 5.3."""
    run, plan = setting.run, setting.plan
    m, several = run.mechanism, setting.dataset.train.units is not None
    claimed = profile(ledger, m.neighbouring) if stamp == PRIVATE else None
    return {
        "stamp": stamp,
        "setting": "central: a trusted party holds the data and trains; the public folder of the run may be seen by anyone",
        "covered": ["the final weights", "their moving average", "every noised iterate", "the masks", "the optimiser's state"],
        "not_covered": _not_covered(setting),
        "unit": "all training rows with one unit number" if several
                else "one training record: an image with its label, in all its augmented views",
        "units": plan.num_units,
        "copies": {"words": f"how many {'units' if several else 'records'} are of one person is not checked; who has k of them is protected k "
                            "times less: k times epsilon, and a larger delta",
                   "delta_of_k": "delta (e^(k epsilon) - 1) / (e^epsilon - 1)"},
        "neighbouring": {"relation": spent.neighbouring, "words": NEIGHBOURS[spent.neighbouring]},
        "epsilon": spent.epsilon,
        "delta": spent.delta,
        "one_over_n": 1 / plan.num_units,
        "warnings": list(spent.warnings),
        "others": {"delta": m.delta, "epsilon": others(ledger, m.delta)},
        "profile": None if claimed is None else curve(claimed),
        "events": ledger.to_json(),
        "accountant": accountant_of(ledger, spent, m.delta),
        "mechanism": _mechanism(setting),
        "sampling": _sampling(plan.sampling_rate),
        "selection": _selection(setting, pruned),
        "keys": "chosen by the user: the noise can be computed again by whoever knows it" if setting.key.given
                else "256 bits from the operating system; erased when the run ended",
        "arithmetic": ARITHMETIC[m.arithmetic],
        "records_that_break": "a record whose gradient or loss is not finite, or that cannot be read, counts as zero, and is counted nowhere",
        "public_data": {"weights": Path(run.model.weights).name, "weights_sha256": digest(run.model.weights), "overlap": "not checked: the "
                        "weights' own training data are not at hand"} if run.model.weights else None,
        "preprocessing": _preprocessing(setting),
        "tuning": {"covered": False, "words": "epsilon is that of this run alone; choosing among runs on the same data costs more",
                   "runs_on_this_data": budget.get("runs"), "epsilon_of_all": budget.get("epsilon"),
                   "runs_not_private": budget.get("not_private")},
        "audit": None,
        "resumed": ledger_words(ledger),
        "software": {**versions(), "source_sha256": source()},
        "config": describe(run),
        "config_sha256": hashlib.sha256(json.dumps(describe(run), sort_keys=True).encode()).hexdigest(),
        "void_if": ["the weights are trained further on private data without adding its cost", "the mask file is used on other private "
                    "data than it was made from, or again on the same data uncounted", "the key was copied before it was erased",
                    *(["training rows of one person were given different unit numbers"] if several else []),
                    "anything in private/ is published", "a file's checksum is not the one in privacy.json"],
    }  # fmt: skip


NEIGHBOURS = {
    "add-remove": "two data sets are neighbours when one unit's data are made empty in one of them (zero-out: N is public; adding or "
    "removing the unit gives the same numbers)",
    "replace-one": "two data sets are neighbours when one unit's data are replaced by anything else",
}
ARITHMETIC = {
    "float": "sums and Gaussian noise in floating point, noise from SHAKE-256; not claimed: safety against attacks on the rounding of "
    "floating-point numbers",
    "exact": "gradients clipped and rounded to an integer grid, discrete Gaussian noise by exact integer arithmetic from SHAKE-256, "
    "charged as the continuous Gaussian of the same noise multiplier (docs/privacy.md says why)",
}


def _not_covered(setting: Setting) -> list[str]:
    evaluated = setting.dataset.evaluation is not None
    told = ["the evaluation data: accuracy and the other figures on them are published without noise"] if evaluated else []
    return [
        "the number of units N, the list of classes and the shape of the images, which are public", *told,
        "how long the training took, and its use of memory", "logs and all else in private/",
        "anything computed from the training data outside this run",
    ]  # fmt: skip


def others(ledger: Ledger, delta: float) -> dict[str, float | None]:
    """Epsilon by other accountants and under the other relation; None where that accountant does not know the events."""
    found: dict[str, float | None] = {}
    for accountant, relation in (("pld", "add-remove"), ("rdp", "add-remove"), ("pld", "replace-one")):
        try:
            answer = epsilon(ledger, delta, accountant, relation)  # type: ignore[arg-type]
            found[f"{accountant}, {relation}"] = answer.epsilon if answer.accountant == accountant else None
        except UsageError:
            found[f"{accountant}, {relation}"] = None
    return found


def rehearse(plan: Budget, m: Mechanism) -> None:
    """All that a statement asks of the accountants at the end, asked before the first event: what cannot be told is refused at no cost."""
    if not math.isinf(plan.spent.epsilon):
        curve(profile(plan.at_end, m.neighbouring))
    others(plan.at_end, m.delta)
    accountant_of(plan.at_end, plan.spent, m.delta)


def accountant_of(ledger: Ledger, spent: Spent, delta: float) -> dict[str, Any]:
    """What a program needs to compute epsilon again: `delta` is that of every part, `rounding` what the transform may take of it."""
    return {
        "name": spent.accountant, "library": "dp_accounting", "version": versions()["dp-accounting"], "method": spent.method,
        "delta": delta, "grid": spent.grid, "slack": spent.slack, "rounding": rounding(parts_of(ledger)) if spent.grid else 0.0,
        "pessimistic": True,
    }  # fmt: skip


def _mechanism(setting: Setting) -> dict[str, Any]:
    m, s, plan = setting.run.mechanism, setting.run.sparsity, setting.plan
    released = plan.snip_noise_multiplier is not None
    return {
        "clip": m.clip if m.private else None, "noise_multiplier": plan.noise_multiplier, "steps": plan.steps,
        "sampling_rate": plan.sampling_rate, "batch_size": plan.batch_size, "num_units": plan.num_units,
        "views": setting.run.data.views, "noise_on": "the selected coordinates only",
        "divisor": f"the expected batch size{' and the clipping norm' if m.private and m.unit_norm else ''}",
        "dp_snip": {"clip": s.snip_clip, "noise_multiplier": plan.snip_noise_multiplier, "batch_size": snip_batch(s, plan.num_units)}
                   if released else None,
    }  # fmt: skip


def _sampling(rate: float) -> dict[str, str]:
    if rate == 1:
        return {"done": "every unit takes part in every step", "evidence": "the sampling rate is 1"}
    return {
        "done": "Poisson: every unit joins every step by a coin of its own, drawn from the run's key; empty batches are ordinary steps; "
        "no shuffling",
        "evidence": "tests of this version over ten million coins (tests/dp/test_sampling.py): their rate, the spread of the batch "
        "sizes, independence of steps and units",
    }


WHY_FREE = {
    "random": "drawn from fresh coins, without looking at the data: no cost",
    "synflow": "computed from the weights before training, without looking at the data: no cost",
    "dp-snip": "computed from a noised release that is among the events and counted; choosing from it costs nothing more",
    "snip-not-private": "computed from the data without noise: nothing that uses it is private",
    "magnitude": "computed from weights that are released already: no cost",
}


def _selection(setting: Setting, pruned: Pruned | None) -> dict[str, Any]:
    s = setting.run.sparsity
    made = None
    if pruned is not None:
        made = {"criterion": pruned.criterion, "rate": pruned.rate, "granularity": pruned.granularity, "private": pruned.private,
                "source": "this run" if s.mask_file is None else "a file of masks; what it cost is among the events",
                "source_sha256": digest(s.mask_file), "why": WHY_FREE.get(pruned.criterion, "declared by its author to read no private data"),
                "kept": {name: int(mask.sum()) for name, mask in pruned.masks.items()},
                "of": {name: mask.numel() for name, mask in pruned.masks.items()}, "pruned_weights": s.pruned_weights}  # fmt: skip
    why = "nothing is dropped" if s.drop == "none" else f"chosen before the batch is drawn, {WHY_FREE[s.drop]}"
    return {
        "pre_pruning": made,
        "dropping": {"criterion": s.drop, "rate": s.drop_rate, "granularity": s.granularity, "why_free": why},
    }


def _preprocessing(setting: Setting) -> dict[str, Any]:
    d, constants = setting.run.data, setting.dataset.normalisation
    public = d.normalise == "default"
    return {
        "mean": list(constants.mean), "std": list(constants.std),
        "origin": "public constants, not computed from the training data" if public
                  else "numbers given by the operator, who answers for their not being computed from the training data",
        "augmentation": d.augment, "views": d.views, "pad": d.pad, "shape": list(setting.parts.shape),
    }  # fmt: skip


def curve(claimed: Profile) -> dict[str, Any]:
    """The whole claim in some numbers. All are upper bounds but for mu, which covers the profile as far as it was followed: down to
    that delta, and at smaller ones a larger mu may be needed."""
    every = max(1, len(claimed.epsilons) // 20)
    return {
        "delta_at_epsilon": [[e, d] for e, d in zip(claimed.epsilons[::every], claimed.deltas[::every], strict=True)],
        "mu_gdp": {"mu": claimed.gaussian(), "down_to_delta": claimed.deltas[-1]},
        "best_attack": [
            {"false_positive_rate": rate, "true_positive_rate_at_most": claimed.attack_power(rate)} for rate in RATES
        ],
        "right_at_even_odds_at_most": (1 + claimed.deltas[0]) / 2,
    }


def ledger_words(ledger: Ledger) -> str:
    """Whether steps were charged more than once."""
    said = [entry.what for entry in ledger.entries if entry.what.startswith(FRESH)]
    return "; ".join(said) if said else "no step was charged twice: what was interrupted, if anything, was repeated to the bit"


def digest(path: str | Path | None) -> str | None:
    """SHA-256 of a file; None where there is none."""
    if path is None or not Path(path).is_file():
        return None
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write(public: Path, stated: dict[str, Any]) -> None:
    """privacy.json and privacy.md, bound to the files that they speak of by their checksums."""
    stated = {**stated, "files": {name: digest(public / name) for name in BOUND if (public / name).exists()}}
    disk.write_json(public / "privacy.json", stated)
    disk.write_text(public / "privacy.md", page(stated))


def check(public: Path) -> None:
    """Refuse files that are not those that the statement beside them speaks of; without a statement there is nothing to check."""
    if not (public / "privacy.json").exists():
        return
    stated = disk.read_json(public / "privacy.json", "the run's privacy statement")
    bound = stated.get("files") if isinstance(stated, dict) else None
    if not isinstance(bound, dict):
        raise UsageError(f"The privacy statement in {public} names no files; restore it.")
    if not bound.keys() <= set(BOUND):
        raise UsageError(f"The privacy statement in {public} names files that no run writes; restore it.")
    for name, expected in bound.items():
        if digest(public / name) != expected:
            raise UsageError(
                f"{public / name} is not the file that privacy.json speaks of: its checksum is another, so nothing is claimed for it; "
                "restore it, or train again."
            )
