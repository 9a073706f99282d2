"""Poisson sampling: the right rate, independent between units, steps and purposes, and recomputable."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsedp.dp.randomness import words
from sparsedp.dp.sampling import micro_batches, participants, sampling_rate, shard
from sparsedp.errors import UsageError
from tests.distributions import ALARM, binomial_p, chi_squared_p, correlation_deviations
from tests.made_up import KEY, OTHER_KEY


def joined(step: int, units: int, rate: float, purpose: str = "train") -> np.ndarray:
    coins = np.zeros(units)
    coins[participants(KEY, step, units, rate, purpose).numpy()] = 1
    return coins


def test_the_rate_over_ten_million_coins() -> None:
    for rate, units, steps in ((0.08192, 50_000, 140), (0.5, 50_000, 40), (0.001, 100_000, 10)):
        counts = np.array([len(participants(KEY, t, units, rate)) for t in range(steps)])
        assert binomial_p(int(counts.sum()), units * steps, rate) > ALARM


@pytest.mark.release
@pytest.mark.parametrize(("rate", "units", "steps"), [(0.08192, 50_000, 200), (0.5, 50_000, 200), (0.001, 100_000, 100)])
def test_ten_million_coins_of_each_rate(rate: float, units: int, steps: int) -> None:
    """Within five deviations in all, in every unit's count, in the spread of batches, and between the shares of four ranks."""
    coins = np.stack([joined(t, units, rate).astype(np.uint8) for t in range(steps)])
    variance = rate * (1 - rate)
    assert abs(coins.sum(dtype=np.int64) - rate * coins.size) < 5 * (variance * coins.size) ** 0.5
    sizes, each = coins.sum(1, dtype=np.int64), coins.sum(0, dtype=np.int64)
    assert abs(sizes.var() / (units * variance) - 1) < 5 * (2 / steps) ** 0.5
    assert abs(each.var() / (steps * variance) - 1) < 5 * ((2 + 1 / (steps * variance)) / units) ** 0.5
    shares = [coins[:, rank::4].astype(np.float32).ravel() for rank in range(4)]
    assert all(correlation_deviations(shares[i], shares[j]) < 5 for i in range(4) for j in range(i))
    for lag in (1, 2, 7):
        assert correlation_deviations(coins[lag:].ravel(), coins[:-lag].ravel()) < 5


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_a_rate_one_per_cent_off_would_be_noticed(factor: float) -> None:
    count = sum(len(participants(KEY, t, 50_000, 0.08192 * factor)) for t in range(200))
    assert binomial_p(count, 10_000_000, 0.08192) < ALARM


def test_batch_sizes_have_the_binomial_spread() -> None:
    units, rate, steps = 500, 0.1, 4000
    counts = np.array([len(participants(KEY, t, units, rate)) for t in range(steps)])
    spread = counts.var() / (units * rate * (1 - rate))
    assert abs(spread - 1) < 6 * (2 / steps) ** 0.5  # fixed batches have spread 0


def test_participations_of_a_unit_have_the_binomial_spread() -> None:
    steps, units = 200, 5000
    each = np.sum([joined(t, units, 0.25) for t in range(steps)], axis=0)
    assert abs(each.var() / (steps * 0.25 * 0.75) - 1) < 6 * (2 / units) ** 0.5  # shuffled epochs have spread 0


def test_steps_units_and_purposes_are_independent() -> None:
    coins = [joined(t, 200_000, 0.3) for t in range(6)] + [joined(0, 200_000, 0.3, "dp-snip")]
    for i, first in enumerate(coins):
        for second in coins[:i]:
            assert correlation_deviations(first, second) < 6
    for lag in (1, 2, 64):
        assert correlation_deviations(coins[0][lag:], coins[0][:-lag]) < 6


@given(st.integers(0, 2**40), st.integers(1, 3000), st.floats(0, 1), st.integers(0, 100))
def test_a_coin_belongs_to_its_unit_alone(step: int, units: int, rate: float, more: int) -> None:
    """Guarantee: the coin of unit i at step t is a function of (key, t, i) alone."""
    few, many = participants(KEY, step, units, rate), participants(KEY, step, units + more, rate)
    assert torch.equal(few, many[many < units])
    assert torch.equal(few, participants(KEY, step, units, rate))
    assert len(few) == 0 or bool((few[1:] > few[:-1]).all())


def test_other_keys_and_steps_draw_other_batches() -> None:
    first = participants(KEY, 0, 1000, 0.5)
    for other in (
        participants(OTHER_KEY, 0, 1000, 0.5),
        participants(KEY, 1, 1000, 0.5),
        participants(KEY, 0, 1000, 0.5, "dp-snip"),
    ):
        assert not torch.equal(first, other)


def test_the_probability_is_rounded_down() -> None:
    """Guarantee: the probability is `rate` rounded down to a multiple of 2**-64, never above `rate`."""
    coins = words(KEY, 0, 1000, "sampling", "train", 0)
    for place in (0, 10, 999):
        exact = int(coins[place])
        below = np.nextafter(exact / 2**64, 0)  # at most the coin: it must not join
        above = np.nextafter(exact / 2**64, 1)
        assert place not in participants(KEY, 0, 1000, below) and place in participants(KEY, 0, 1000, above)
    assert len(participants(KEY, 0, 1000, 0.0)) == 0
    assert len(participants(KEY, 0, 1000, 2.0**-70)) == 0
    assert participants(KEY, 0, 1000, 1.0).tolist() == list(range(1000))


def test_empty_batches_happen_as_often_as_they_should() -> None:
    empty = sum(len(participants(KEY, t, 1, 0.01)) == 0 for t in range(20_000))
    assert binomial_p(empty, 20_000, 0.99) > ALARM and empty < 20_000
    sizes = np.bincount([len(participants(KEY, t, 3, 0.4)) for t in range(20_000)], minlength=4)
    assert chi_squared_p(sizes, np.array([0.216, 0.432, 0.288, 0.064])) > ALARM


@given(st.integers(0, 100), st.integers(1, 120))
def test_micro_batches_are_the_batch(count: int, size: int) -> None:
    units = torch.arange(count) * 3
    parts = list(micro_batches(units, size))
    assert all(1 <= len(part) <= size for part in parts)
    assert torch.equal(torch.cat([*parts, units[:0]]), units)


@given(st.integers(0, 50), st.integers(1, 7))
def test_shards_are_disjoint_and_together_everything(count: int, world: int) -> None:
    units = torch.arange(count) * 3
    shares = [shard(units, rank, world).tolist() for rank in range(world)]
    assert sorted(sum(shares, [])) == units.tolist()
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_settings_that_cannot_be() -> None:
    assert sampling_rate(50_000, 4096) == 0.08192
    for units, batch, said in ((0, 1, "num_examples is 0"), (10, 11, "batch_size is 11"), (10, 0, "batch_size is 0")):
        with pytest.raises(UsageError, match=said):
            sampling_rate(units, batch)
    for rate in (-0.1, 1.1, float("nan")):
        with pytest.raises(UsageError, match="sampling rate"):
            participants(KEY, 0, 10, rate)
    with pytest.raises(UsageError, match="micro_batch is 0"):
        list(micro_batches(torch.arange(3), 0))
