"""Checks that need no statistics: what each kind of canary does to a release, and that the job's settings are the recipe's.

Two worlds with one key have one noise. What differs between their releases is the canary, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from sparsedp.audit.one_run import Job
from sparsedp.audit.trial import EVERYONE, Canary, Trial, parameters
from sparsedp.config import Run
from sparsedp.dp.clipping import Rows
from sparsedp.dp.ledger import Ledger
from sparsedp.dp.mechanism import Settings
from sparsedp.dp.randomness import Key
from sparsedp.dp.sampling import participants
from sparsedp.engines.made_up import made_up_rows
from sparsedp.planning import Budget

ROUNDING, GRID = 1e-4, 2e-3
"""How far a canary of length 1 may seem from it: noise and sum are rounded to float32; on the grid a unit is clipped further."""
COINS = 1_000_000


@dataclass(frozen=True)
class Check:
    """Something that must hold exactly, and what was seen."""

    what: str
    ok: bool
    seen: str


def canary_checks(run: Run, key: Key) -> Iterator[Check]:
    """The menu: every kind of parameter, a coordinate that is put aside, gradients too long and broken ones, a duplicate."""
    trial = Trial(run, EVERYONE, key)
    limit = 1 + (GRID if trial.settings.exact else ROUNDING)
    for name in parameters(trial):
        moved = effect(trial, key, Canary(parameter=name))
        yield Check(f"a canary on {name} moves the sum by C", 2 - limit <= moved <= limit, f"{moved:.6f} C")
    for push in (1e30, -1e30):
        moved = effect(trial, key, Canary(push=push))
        yield Check(f"a gradient of length {push:g} moves the sum by at most C", moved <= limit, f"{moved:.6f} C")
    for push in (math.nan, math.inf):
        moved = effect(trial, key, Canary(push=push))
        yield Check(f"a gradient that is {push} has no effect at all", moved == 0, f"{moved:.6f} C")
    moved = effect(trial, key, Canary(edge=True))
    yield Check("an infinite gradient of a finite loss has no effect at all", moved == 0, f"{moved:.6f} C")
    moved = effect(trial, key, Canary(copies=2))
    yield Check(
        "a unit that is there twice moves the sum by 2 C, and is charged as two",
        abs(moved - 2) <= 2 * (limit - 1),
        f"{moved:.6f} C",
    )
    layer = trial.settings.layers[0].name
    if layer in trial.masks(key, 0) and not bool(trial.masks(key, 0)[layer].all()):
        moved = effect(trial, key, Canary(parameter=layer.removeprefix("network."), dropped=True))
        yield Check("a canary on a coordinate that was put aside has no effect at all", moved == 0, f"{moved:.6f} C")


def effect(trial: Trial, key: Key, canary: Canary) -> float:
    """How far the canary moves the first released sum, in units of C; zero only if no bit differs."""
    releases = []
    for one in (canary, replace(canary, copies=0)):
        step, _ = next(trial.steps(key, one, lambda what, event: None))
        releases.append(step.gradient.tensors)
    squares = sum(float((releases[0][n].double() - releases[1][n].double()).pow(2).sum()) for n in releases[0])
    return math.sqrt(squares) * trial.divisor / trial.settings.clip


def setting_checks(run: Run, plan: Budget, settings: Settings, key: Key) -> Iterator[Check]:
    """The noise, rate, clip and number of steps that training would use are those that the ledger is charged for."""
    m = run.mechanism
    agree = (settings.noise_multiplier, settings.batch_size, settings.clip) == (plan.noise_multiplier, m.batch_size, m.clip)
    words = f"sigma {settings.noise_multiplier:g}, C {settings.clip:g}, q {settings.sampling_rate:g}, T {plan.steps}"
    yield Check("a step's noise, clip and batch are the configured ones", agree, words)
    before = [e for e in plan.at_end.entries if e.what != "train"]
    charged = Ledger(tuple(before)).append("train", settings.event, plan.steps)
    yield Check(
        "what the steps record is what epsilon was computed from", charged == plan.at_end, f"{len(charged.entries)} entries"
    )
    ratio = _noise_ratio(run, settings, key)
    yield Check("noise at the job's sigma is the audited noise, scaled", abs(ratio - 1) < 1e-4, f"ratio {ratio:.7f}")
    count = len(participants(key, 0, COINS, settings.sampling_rate))
    mean, spread = COINS * settings.sampling_rate, math.sqrt(COINS * settings.sampling_rate * (1 - settings.sampling_rate))
    yield Check(
        "units join at the job's rate, within 5 standard deviations", abs(count - mean) <= 5 * spread, f"{count} of {COINS}"
    )


def _noise_ratio(run: Run, settings: Settings, key: Key) -> float:
    """The same empty steps at the job's noise and at the audit's: their ratio, over what it should be."""
    if settings.exact:
        return 1.0  # discrete noise does not scale; its distribution is tested by itself
    sizes = []
    for sigma in (settings.noise_multiplier, EVERYONE.noise_multiplier):
        trial = Trial(run, EVERYONE, key, company=False)
        trial.settings = replace(trial.settings, noise_multiplier=sigma)
        step, _ = next(trial.steps(key, None, lambda what, event: None))
        sizes.append(torch.cat([t.double().reshape(-1) for t in step.gradient.tensors.values()]).norm().item() / sigma)
    return sizes[0] / sizes[1]


def clip_checks(job: Job) -> Iterator[Check]:
    """The job's own engine, on its own model: made-up units with huge losses are clipped to C, broken ones count zero."""
    model, clip, masks = job.parts.model, job.settings.clip, job.settings.pruned
    rows = made_up_rows(job.parts.source(Key(b"\0" * 32, given=True)).example(), 2)
    first = rows.counts[0]
    one = Rows(rows.inputs[:first], rows.targets[:first], rows.unit[:first], 1)

    def norm(scale: float) -> float:
        total = job.engine(model, lambda output, targets: scale * job.parts.loss(output, targets), one, masks, clip)
        return math.sqrt(sum(float(t.double().pow(2).sum()) for t in total.values())) / clip

    steep = norm(1e6)
    yield Check("the job's engine clips a steep gradient to C", steep <= 1 + 1e-6, f"{steep:.9f} C")
    broken = norm(math.nan)
    yield Check("to the job's engine a loss that is not a number counts zero", broken == 0, f"{broken:.6f} C")
