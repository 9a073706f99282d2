"""The canary audit: many small private jobs with and without one canary, and what telling them apart proves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sparsedp.audit import bounds
from sparsedp.audit.trial import Canary, Trial, own_key
from sparsedp.dp.accounting import epsilon
from sparsedp.dp.randomness import Key
from sparsedp.dp.tradeoff import profile
from sparsedp.errors import require

LOWER, VIOLATION = 0.95, 0.99
"""Confidence of a lower bound; family-wise confidence of calling a claim wrong."""
FEWEST = 50


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One attack: what was claimed of the job that it attacked, and what it proved."""

    what: str
    method: str
    """How the lower bound was come by."""
    trials: int
    """Runs of each world; canaries of the one run."""
    claimed: float
    delta: float
    bound: float
    """Epsilon is at least this, if the method's assumption holds."""
    bound_by_rates: float
    """Epsilon is at least this, whatever the mechanism."""
    confidence: float = LOWER
    violated: bool = False
    """Whether the claim's whole trade-off curve is contradicted, at a family-wise 99 %."""
    seconds: float = 0.0

    @property
    def share(self) -> float:
        """How much of the claim the attack recovered."""
        return self.bound / self.claimed if self.claimed else math.nan


def scores(
    trial: Trial, runs: int, key: Key, canary: Canary, tick: Callable[[], None] = lambda: None
) -> tuple[bounds.Scores, bounds.Scores]:
    """Scores of `runs` jobs without the canary and of as many with it, every one with a key of its own."""
    found = np.empty((2, runs))
    for i in range(runs):
        for present in (0, 1):
            found[present, i] = trial.play(own_key(key, "in" if present else "out", i), canary if present else None)
            tick()
    return found[0], found[1]


def canary_audit(
    what: str,
    trial: Trial,
    runs: int,
    delta: float,
    key: Key,
    family: int = 1,
    canary: Canary = Canary(),
    tick: Callable[[], None] = lambda: None,
) -> Finding:
    """Attack a job: lower bounds at 95 %, and whether its claim is contradicted at 99 % over `family` attacks together."""
    require(runs >= FEWEST, "runs", runs, f"fewer than {FEWEST} of each world prove nothing", "1000 is usual")
    began = time.monotonic()
    out, inside = scores(trial, runs, key, canary, tick)
    return judged(what, trial, out, inside, delta, family, time.monotonic() - began)


def judged(
    what: str, trial: Trial, out: bounds.Scores, inside: bounds.Scores, delta: float, family: int, seconds: float = 0.0
) -> Finding:
    """What two samples of scores say of the job's claim."""
    power, counts = trial.power, bounds.attack(out, inside)
    found = bounds.limits(counts, LOWER)
    if power.sampling_rate == 1:
        method, bound = "Gaussian curve", bounds.epsilon_of_mu(bounds.mu_by_rates(found), delta)
    else:
        method = "within the family"
        bound = bounds.epsilon_in_family(power.ledger, delta, lambda claim: bounds.violates(claim, found))
    return Finding(
        what=what, method=method, trials=len(out), claimed=epsilon(power.ledger(), delta).epsilon, delta=delta, bound=bound,
        bound_by_rates=bounds.epsilon_by_rates(found, delta),
        violated=bounds.violates(profile(power.ledger()), bounds.limits(counts, VIOLATION, family)), seconds=seconds,
    )  # fmt: skip
