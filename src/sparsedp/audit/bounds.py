"""What an attack's errors prove about epsilon, and whether they contradict a claim. Pure statistics: nothing is run here.

An attack tells two worlds apart by a score: the canary's data are there ("in"), or made empty ("out"). Its false alarms and
misses, counted over independent runs and raised to their upper confidence limits, bound epsilon from below in three ways:

- by rates (always valid): an (epsilon, delta) guarantee limits how small both can be;
- by the Gaussian curve (valid where the claim is a Gaussian mechanism): through mu = z(1 - false alarms) - z(misses);
- within the family: the claim's own events with all noise multiplied by a factor; the smallest epsilon among the members
  that the rates do not contradict. It assumes that what is wrong, if anything, acts like less noise.

A claim is contradicted, whatever its form, when the limits lie below its whole trade-off curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize, special, stats

from sparsedp.dp.accounting import epsilon
from sparsedp.dp.ledger import Ledger
from sparsedp.dp.tradeoff import Profile, gaussian_delta, profile

Scores = npt.NDArray[np.float64]

PILOT = 0.2
"""The share of the runs that is spent on choosing thresholds; they are not counted."""
QUANTILES_OUT, QUANTILES_IN = (0.5, 0.85, 0.98), (0.15, 0.5)
"""Where in the pilot's scores the thresholds lie, from nearly symmetric to few false alarms."""
THRESHOLDS = len(QUANTILES_OUT) + len(QUANTILES_IN)


def log_likelihood_ratio(seen: Scores, rate: float, sigma: float) -> Scores:
    """Of "in" against "out", for a coordinate that is b + sigma * noise, b being 1 with probability `rate` or always 0."""
    power = (2 * seen - 1) / (2 * sigma**2)
    return np.logaddexp(np.log1p(-rate) if rate < 1 else -np.inf, np.log(rate) + power)


@dataclass(frozen=True)
class Counts:
    """How often one threshold was wrong."""

    false_alarms: int
    outs: int
    misses: int
    ins: int


@dataclass(frozen=True)
class Limits:
    """Upper confidence limits of the two error rates."""

    false_alarm: float
    miss: float


def upper_limit(count: int, trials: int, alpha: float) -> float:
    """Clopper and Pearson: the rate that is exceeded with confidence at most `alpha`, after `count` in `trials`."""
    return 1.0 if count >= trials else float(stats.beta.ppf(1 - alpha, count + 1, trials - count))


def attack(out: Scores, inside: Scores) -> tuple[Counts, ...]:
    """Thresholds from the first fifth of the runs, errors from the rest."""
    a, b = int(PILOT * len(out)), int(PILOT * len(inside))
    places = [*np.quantile(out[:a], QUANTILES_OUT), *np.quantile(inside[:b], QUANTILES_IN)]
    rest_out, rest_in = out[a:], inside[b:]
    return tuple(Counts(int((rest_out >= at).sum()), len(rest_out), int((rest_in < at).sum()), len(rest_in)) for at in places)


def limits(counts: Sequence[Counts], confidence: float, family: int = 1) -> tuple[Limits, ...]:
    """Limits that all hold together with this confidence, over all thresholds of `family` attacks (Bonferroni)."""
    alpha = (1 - confidence) / (2 * len(counts) * family)
    return tuple(Limits(upper_limit(c.false_alarms, c.outs, alpha), upper_limit(c.misses, c.ins, alpha)) for c in counts)


def violates(claim: Profile, found: Sequence[Limits]) -> bool:
    """Whether some limits lie below the claim's trade-off curve, read in either direction."""
    return any(one.miss < claim.miss_rate(one.false_alarm) or one.false_alarm < claim.miss_rate(one.miss) for one in found)


def epsilon_by_rates(found: Sequence[Limits], delta: float) -> float:
    """The epsilon that the error rates prove at `delta`, of whatever mechanism."""

    def one_way(first: float, second: float) -> float:
        room = 1 - second - delta
        return math.log(room / first) if room > first > 0 else 0.0

    return max((max(one_way(one.false_alarm, one.miss), one_way(one.miss, one.false_alarm)) for one in found), default=0.0)


def mu_by_rates(found: Sequence[Limits]) -> float:
    """The mu that the error rates prove of a Gaussian mechanism."""
    best = max((float(-special.ndtri(one.false_alarm) - special.ndtri(one.miss)) for one in found), default=0.0)
    return max(best, 0.0)


def epsilon_of_mu(mu: float, delta: float) -> float:
    """The exact epsilon of the Gaussian mechanism mu at `delta`."""
    if gaussian_delta(0.0, mu) <= delta:
        return 0.0
    high = 1.0
    while gaussian_delta(high, mu) > delta:
        high *= 2
    return float(optimize.brentq(lambda e: gaussian_delta(e, mu) - delta, 0.0, high, xtol=1e-9))


Family = Callable[[float], Ledger]
"""A factor on all noise -> what would be spent with it; 1 is the claim."""

NOISIEST, QUIETEST = 64.0, 1 / 8
"""How far from the claim a family is searched, as factors of its noise."""
_HALVINGS = 11


def epsilon_in_family(family: Family, delta: float, contradicted: Callable[[Profile], bool]) -> float:
    """The epsilon of the noisiest member of the family that the evidence does not contradict; 0 if it contradicts none.

    Infinite if it still contradicts a member with an eighth of the claimed noise.
    """

    def refuted(factor: float) -> bool:
        return contradicted(profile(family(factor)))

    quiet, noisy = (QUIETEST, 1.0) if refuted(1.0) else (1.0, NOISIEST)
    if quiet == 1.0 and not refuted(noisy):
        return 0.0
    if noisy == 1.0 and refuted(quiet):
        return math.inf
    for _ in range(_HALVINGS):
        middle = math.sqrt(quiet * noisy)
        quiet, noisy = (quiet, middle) if refuted(middle) else (middle, noisy)
    return float(epsilon(family(noisy), delta).epsilon)
