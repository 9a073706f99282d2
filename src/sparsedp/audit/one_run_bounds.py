"""What correct guesses in a single run prove about epsilon. Pure statistics.

Of m canaries each is in the training data by a fair coin of its own. The attacker sees the run and guesses, for as many as it
likes, whether they were in. Two theorems bound how often many guesses can be right under a guarantee:

- Steinke, Nasr and Jagielski (2023), theorem 5.2: under (epsilon, delta);
- Mahloujifar, Melis and Chaudhuri (2024, arXiv 2410.22235): under a whole trade-off curve, which is tighter.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import special, stats

from sparsedp.dp.tradeoff import Profile

_LARGEST_EPSILON = 50.0
_HALVINGS = 40


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """A bound on the chance of at least so many correct guesses, if the run is (epsilon, delta)-private.

    Guesses under pure epsilon are no better than coins of probability e^epsilon / (1 + e^epsilon); delta adds at most the
    steepest chord of their distribution's tail, times 2 * canaries * delta.
    """
    chance = float(special.expit(epsilon))
    beta = float(stats.binom.sf(correct - 1, guesses, chance))
    if correct == 0 or delta == 0:
        return min(1.0, beta)
    below = stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, chance)
    steepest = float((np.cumsum(below) / np.arange(1, correct + 1)).max())
    return min(1.0, beta + 2 * canaries * delta * steepest)


def epsilon_bound(canaries: int, guesses: int, correct: int, delta: float, confidence: float) -> float:
    """The largest epsilon that so many correct guesses contradict with this confidence."""
    return _edge(lambda e: p_value(canaries, guesses, correct, e, delta) <= 1 - confidence)


def curve_rejected(blow_down: Callable[[float], float], canaries: int, guesses: int, correct: int, confidence: float) -> bool:
    """Whether so many correct guesses contradict a trade-off curve with this confidence.

    `blow_down(y)` is the largest false positive rate at which no attack has more power than y. The recursion bounds, from
    the assumed tail downwards, r[i]: the expected share of canaries guessed right when at least i guesses are right (and
    h[i] of those guessed wrong); if even so they cannot add up to all guesses, the tail was that improbable.
    """
    if correct == 0 or guesses == 0:
        return False
    tail = (1 - confidence) * guesses / canaries
    right, wrong = tail * correct / guesses, tail * (guesses - correct) / guesses
    for i in range(correct - 1, -1, -1):
        before, wrong = wrong, max(wrong, blow_down(right))
        right += i / (guesses - i) * (wrong - before)
        if right + wrong > guesses / canaries:
            return True
    return False


def of_profile(claim: Profile) -> Callable[[float], float]:
    """The blow-down of a claim: its trade-off curve is symmetric, so it is the curve itself, read at 1 - y."""
    return lambda power: claim.miss_rate(min(max(1.0 - power, 0.0), 1.0))


def of_gaussian(mu: float) -> Callable[[float], float]:
    """The blow-down of the Gaussian mechanism mu."""
    return lambda power: float(special.ndtr(special.ndtri(power) - mu))


def mu_bound(canaries: int, guesses: int, correct: int, confidence: float) -> float:
    """The largest mu of a Gaussian mechanism that so many correct guesses contradict."""
    return _edge(lambda mu: curve_rejected(of_gaussian(mu), canaries, guesses, correct, confidence))


def _edge(contradicted: Callable[[float], bool]) -> float:
    """The largest number that is contradicted; smaller ones are too."""
    if not contradicted(0.0):
        return 0.0
    low, high = 0.0, _LARGEST_EPSILON
    if contradicted(high):
        return math.inf
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if contradicted(middle) else (low, middle)
    return low
