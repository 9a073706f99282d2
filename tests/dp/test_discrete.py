"""Discrete Gaussian numbers: against the exact probabilities, at every size of scale, and drawn alone or together."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsedp.dp import discrete
from sparsedp.dp.discrete import CHUNK, LARGEST_SCALE, discrete_gaussian
from tests.distributions import ALARM, binomial_p, chi_squared_p, correlation_deviations, normal_p, scale_p
from tests.made_up import KEY
from tests.oracles import discrete_gaussian_pmf


@pytest.mark.parametrize("scale", [1, 2, 3, 7, 40])
def test_the_exact_probabilities(scale: int) -> None:
    drawn, reach = discrete_gaussian(scale, KEY, 0, 400_000, "chi", scale), 12 * scale
    assert np.abs(drawn).max() <= reach
    observed = np.bincount(drawn + reach, minlength=2 * reach + 1).astype(float)
    assert chi_squared_p(observed, discrete_gaussian_pmf(scale, reach)) > ALARM
    for wrong in (0.95, 1.05):
        assert chi_squared_p(observed, discrete_gaussian_pmf(scale * wrong, reach)) < ALARM


@pytest.mark.parametrize("scale", [1000, 2**20, LARGEST_SCALE])
def test_large_scales_are_normal_to_the_eye(scale: int) -> None:
    drawn = discrete_gaussian(scale, KEY, 0, 300_000, "ks", scale).astype(float)
    assert scale_p(drawn, scale) > ALARM and normal_p(drawn, scale) > ALARM
    assert scale_p(drawn, scale * 1.02) < ALARM and scale_p(drawn, scale * 0.98) < ALARM
    assert correlation_deviations(drawn[1:], drawn[:-1]) < 6


def test_both_signs_and_every_residue_are_as_likely() -> None:
    drawn = discrete_gaussian(1024, KEY, 0, 400_000, "signs")
    assert binomial_p(int((drawn > 0).sum()), int((drawn != 0).sum()), 0.5) > ALARM
    assert chi_squared_p(np.bincount(drawn % 16, minlength=16).astype(float), np.full(16, 1 / 16)) > ALARM


@given(st.integers(0, 2 * CHUNK), st.integers(0, 40))
def test_a_part_is_the_same_drawn_alone(start: int, count: int) -> None:
    start += CHUNK - 20
    whole = discrete_gaussian(5, KEY, 0, start + count, "part")
    assert np.array_equal(discrete_gaussian(5, KEY, start, start + count, "part"), whole[start:])


@pytest.mark.parametrize(("num", "den"), [(0, 5), (1, 2), (3, 7), (7, 7), (1, 10**6)])
def test_trials_of_exponential_probability(num: int, den: int) -> None:
    trials = 200_000
    source = discrete._Source(KEY, "trial", num, den)
    won = discrete._exponential(np.full(trials, num, np.uint64), np.full(trials, den, np.uint64), source)
    assert binomial_p(int(won.sum()), trials, math.exp(-num / den)) > ALARM


@pytest.mark.parametrize("bound", [2, 3, 10, 2**33 + 1, 3 * 2**62, 2**64 - 1])
def test_whole_numbers_below_a_bound_are_uniform(bound: int) -> None:
    drawn = discrete._Source(KEY, "below", bound).below(np.full(100_000, bound, np.uint64))
    assert int(drawn.max()) < bound
    cells = np.array([int(Fraction(int(d), bound) * min(bound, 16)) for d in drawn])
    width = min(bound, 16)
    assert chi_squared_p(np.bincount(cells, minlength=width).astype(float), np.full(width, 1 / width)) > ALARM


def test_no_product_can_leave_64_bits() -> None:
    """With at most 40 whole deviations and 30 rounds (more has probability below 1e-30), every product still fits."""
    s, k, rounds = LARGEST_SCALE, 40, 30
    assert 2 * (k + 1) * s * s * rounds < 2**64 and s * (2 * k * s + s) < 2**63


@pytest.mark.parametrize("scale", [0, -1, LARGEST_SCALE + 1])
def test_scales_outside_are_a_fault_of_ours(scale: int) -> None:
    with pytest.raises(AssertionError):
        discrete_gaussian(scale, KEY, 0, 1, "x")
