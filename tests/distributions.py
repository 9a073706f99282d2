"""Two-sided tests of draws against a distribution: each returns a p-value, so that right code passes and code 1 % off fails."""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

ALARM = 1e-12
"""Right code stays above this in all but one of 10**12 runs; with a million draws, a scale 1 % off falls below it."""


def scale_p(draws: np.ndarray, sigma: float) -> float:
    """That the root mean square of normal draws is `sigma`: chi-squared, two-sided."""
    square = float(np.sum((draws / sigma) ** 2))
    return 2 * float(min(stats.chi2.cdf(square, len(draws)), stats.chi2.sf(square, len(draws))))


def mean_p(draws: np.ndarray, mean: float, sigma: float) -> float:
    """That the mean is `mean`, the deviation being known."""
    return 2 * float(stats.norm.sf(abs(float(np.mean(draws)) - mean) * math.sqrt(len(draws)) / sigma))


def normal_p(draws: np.ndarray, sigma: float) -> float:
    """That the shape is normal: Kolmogorov and Smirnov."""
    return float(stats.kstest(draws, "norm", args=(0, sigma), method="asymp").pvalue)


def tail_p(draws: np.ndarray, sigma: float, at: float) -> float:
    """That as many draws lie beyond `at` deviations, on each side, as should: binomial, the worse side, two-sided."""
    chance = float(stats.norm.sf(at))
    counts = (int(np.sum(draws > at * sigma)), int(np.sum(draws < -at * sigma)))
    return min(binomial_p(count, len(draws), chance) for count in counts)


def binomial_p(count: int, trials: int, chance: float) -> float:
    """That `count` of `trials` coins of this chance came up: exact, two-sided."""
    below, above = stats.binom.cdf(count, trials, chance), stats.binom.sf(count - 1, trials, chance)
    return min(1.0, 2 * float(min(below, above)))


def correlation_deviations(first: np.ndarray, second: np.ndarray) -> float:
    """The correlation of two samples, in its standard deviations under independence."""
    return abs(float(np.corrcoef(first, second)[0, 1])) * math.sqrt(len(first))


def chi_squared_p(observed: np.ndarray, probabilities: np.ndarray) -> float:
    """That counts came from probabilities that sum to one: cells with few expected draws are joined."""
    expected = probabilities * observed.sum()
    order = np.argsort(expected)
    joined = int(np.searchsorted(np.cumsum(expected[order]), 20.0)) + 1
    cells, wanted = observed[order], expected[order]
    cells = np.concatenate([[cells[:joined].sum()], cells[joined:]])
    wanted = np.concatenate([[wanted[:joined].sum()], wanted[joined:]])
    return float(stats.chi2.sf(np.sum((cells - wanted) ** 2 / wanted), len(cells) - 1))
