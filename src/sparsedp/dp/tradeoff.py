"""The whole privacy claim behind one pair (epsilon, delta): delta at every epsilon, and what an attacker can do at best.

Audits compare attacks with this curve; the privacy statement prints numbers from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import dp_accounting as dp
import numpy as np
import numpy.typing as npt
from scipy import optimize, special

from sparsedp.dp.accounting import (
    Ledger,
    Neighbouring,
    Parts,
    first_grid,
    has_search,
    loss_distribution,
    parts_of,
    renyi,
    rounding,
    unsampled_mu,
)
from sparsedp.errors import UsageError, require

_POINTS = 281
_SMALLEST = 1e-10
"""The profile is followed down to this delta; below it the curve is tails that were cut."""
_COARSEST = 512.0
"""On a coarser grid e to the power of one interval leaves the range of floating point."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Profile:
    """Upper bounds on delta, one for each epsilon, ascending. The claim is all of them at once."""

    epsilons: tuple[float, ...]
    deltas: tuple[float, ...]

    def miss_rate(self, false_positive_rate: float) -> float:
        """The least rate of misses (FNR) that any attack with this false positive rate can have: the trade-off curve."""
        rate = false_positive_rate
        require(0 <= rate <= 1, "false positive rate", rate, "it is a probability", "0.01 is common")
        e, d = np.array(self.epsilons), np.array(self.deltas)
        with np.errstate(over="ignore"):
            grown = np.exp(e) * rate if rate > 0 else np.zeros(len(e))
        bounds = np.maximum(1 - d - grown, np.exp(-e) * (1 - d - rate))
        return float(max(0.0, bounds.max()))

    def attack_power(self, false_positive_rate: float) -> float:
        """The greatest share of members (TPR) that any attack can find at this false positive rate."""
        return 1.0 - self.miss_rate(false_positive_rate)

    def gaussian(self) -> float:
        """The smallest mu for which the claim mu-GDP covers every pair of the profile. Below the last delta it may not hold."""
        return max((gaussian_mu(e, d) for e, d in zip(self.epsilons, self.deltas, strict=True)), default=0.0)


def profile(
    spent: dp.DpEvent | Ledger, neighbouring: Neighbouring = "add-remove", epsilons: Sequence[float] | None = None
) -> Profile:
    """Delta at each of `epsilons`, or at evenly spread ones from 0 to where delta has fallen to 1e-10."""
    parts = parts_of(spent)
    if not parts:
        grid = tuple(epsilons or (0.0,))
        return Profile(grid, (0.0,) * len(grid))
    if dp.NonPrivateDpEvent() in parts:
        raise UsageError("A release without noise has no privacy profile: an attacker can always tell; add noise first.")
    if has_search(parts):
        return _of_search(parts, neighbouring, epsilons)
    interval = first_grid(parts, neighbouring)
    if interval > _COARSEST:
        return _without_grid(parts, neighbouring, epsilons)
    losses = loss_distribution(parts, neighbouring, interval)
    allowance = rounding(parts)
    if epsilons is None:
        last = losses.get_epsilon_for_delta(max(_SMALLEST, 2 * allowance))
        epsilons = np.linspace(0.0, last, _POINTS).tolist()
    points = sorted(float(e) for e in epsilons)
    return Profile(tuple(points), tuple(min(1.0, float(losses.get_delta_for_epsilon(e)) + allowance) for e in points))


def _without_grid(parts: Parts, neighbouring: Neighbouring, epsilons: Sequence[float] | None) -> Profile:
    """Where no grid serves: the Gaussian mechanism that all would be without sampling, which can only help; its smaller term is left out."""
    mu = unsampled_mu(parts, neighbouring)
    last = mu * (mu / 2 - float(special.ndtri(_SMALLEST)))
    points = sorted(float(e) for e in (np.linspace(0.0, last, _POINTS) if epsilons is None else epsilons))
    return Profile(tuple(points), tuple(float(special.ndtr(mu / 2 - e / mu)) for e in points))


def _of_search(parts: Parts, neighbouring: Neighbouring, epsilons: Sequence[float] | None) -> Profile:
    """By Renyi differential privacy, which is all that is known of the best of several trials."""
    require(neighbouring == "add-remove", "neighbouring", neighbouring, "a search is accounted for under add-remove alone",
            "use add-remove")  # fmt: skip
    spent = renyi(parts)
    last = float(spent.get_epsilon(_SMALLEST))
    points = sorted(float(e) for e in (np.linspace(0.0, last, _POINTS) if epsilons is None else epsilons))
    return Profile(tuple(points), tuple(min(1.0, float(spent.get_delta(e))) for e in points))


def gaussian_delta(epsilon: float, mu: float) -> float:
    """The exact delta of a Gaussian mechanism with sensitivity mu times its noise's deviation (Balle and Wang 2018)."""
    if mu <= 0:
        return 0.0
    first = special.ndtr(mu / 2 - epsilon / mu)
    return float(first - math.exp(epsilon + special.log_ndtr(-mu / 2 - epsilon / mu)))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The mu at which the Gaussian mechanism has exactly this delta at this epsilon."""
    if delta <= 0:
        return 0.0
    if delta >= 1:
        return math.inf
    high = 1.0
    while gaussian_delta(epsilon, high) < delta:
        high *= 2
    return float(optimize.brentq(lambda mu: gaussian_delta(epsilon, mu) - delta, 0.0, high, xtol=1e-12))
