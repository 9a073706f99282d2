"""Streams: the same numbers for the same place, others for every other, and of the right distribution."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsedp import keys
from sparsedp.dp.randomness import BLOCK, Key, normal, raw, uniform, words
from sparsedp.errors import UsageError
from tests.distributions import ALARM, chi_squared_p, correlation_deviations, normal_p, scale_p
from tests.made_up import KEY, OTHER_KEY

places = st.lists(st.one_of(st.integers(-5, 2**40), st.text(max_size=4)), max_size=4).map(tuple)


@given(places, places, st.sampled_from("ab"), st.sampled_from("ab"))
def test_other_places_are_other_streams(first: tuple, second: tuple, name: str, other: str) -> None:
    same = (name, *first) == (other, *second)
    assert (raw(KEY, 32, name, *first) == raw(KEY, 32, other, *second)) == same
    assert raw(KEY, 32, name, *first) != raw(OTHER_KEY, 32, name, *first)


def test_places_do_not_run_into_each_other() -> None:
    spellings = [("ab",), ("a", "b"), ("a", "", "b"), ("a", 1), ("a", "1"), ("a", 11), ("a", 1, 1), ("a", -1), ("a", 1, "", 1)]
    assert len({raw(KEY, 32, *place) for place in spellings}) == len(spellings)
    assert raw(Key(b"x" * 32, True), 32, "xa") != raw(Key(b"x" * 33, True), 32, "a")


def test_the_generator_is_shake_256() -> None:
    secret = b"s" * 32
    coded = bytes([1]) + (1).to_bytes(8, "big") + b"n" + bytes([0]) + (16).to_bytes(8, "big") + (7).to_bytes(16, "big")
    assert raw(Key(secret, True), 99, "n", 7) == hashlib.shake_256((32).to_bytes(8, "big") + secret + coded).digest(99)


@given(st.integers(0, 2 * BLOCK), st.integers(0, 70))
def test_a_part_is_the_same_drawn_alone(start: int, count: int) -> None:
    start += BLOCK - 35
    whole, gauss = words(KEY, 0, start + count, "a", 3), normal(KEY, 0, start + count, "a", 3)
    assert np.array_equal(words(KEY, start, start + count, "a", 3), whole[start:])
    assert torch.equal(normal(KEY, start, start + count, "a", 3), gauss[start:])


def test_uniform_numbers() -> None:
    drawn = uniform(KEY, 1_000_000, "u").numpy()
    assert drawn.dtype == np.float64 and drawn.min() > 0 and drawn.max() <= 1
    assert chi_squared_p(np.histogram(drawn, bins=1000, range=(0, 1))[0], np.full(1000, 1e-3)) > ALARM
    assert correlation_deviations(drawn[1:], drawn[:-1]) < 5
    assert len(np.unique(drawn)) == len(drawn)


def test_normal_numbers_are_independent_within_a_pair_and_from_it() -> None:
    drawn = normal(KEY, 0, 1_000_000, "g").numpy()
    assert drawn.dtype == np.float64
    assert scale_p(drawn, 1.0) > ALARM and normal_p(drawn, 1.0) > ALARM
    assert normal_p(drawn[::2], 1.0) > ALARM and normal_p(drawn[1::2], 1.0) > ALARM
    for lag in (1, 2, 3):
        assert correlation_deviations(drawn[lag:], drawn[:-lag]) < 5
    assert correlation_deviations(drawn[::2] ** 2, drawn[1::2] ** 2) < 5


def test_words_have_no_bias_in_any_bit() -> None:
    bits = np.unpackbits(words(KEY, 0, 1 << 17, "w").view(np.uint8)).reshape(-1, 64).mean(axis=0)
    assert np.abs(bits - 0.5).max() * 2 * (1 << 17) ** 0.5 < 6


def test_a_key_is_long_and_never_shown() -> None:
    assert "hidden" in repr(KEY) and "a key for tests" not in repr(KEY) + str(KEY) + f"{KEY}"
    with pytest.raises(UsageError, match="at least 32 bytes") as caught:
        Key(b"short", given=True)
    assert "short" not in str(caught.value)


def test_keys_come_from_the_system_unless_given() -> None:
    drawn = {keys.fresh().secret for _ in range(50)}
    assert len(drawn) == 50 and all(len(secret) == 32 for secret in drawn)
    assert not keys.fresh().given and keys.chosen("one").given
    assert keys.chosen("one") == keys.chosen("one") != keys.chosen("two")


def test_nothing_global_is_read_or_moved() -> None:
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    before = torch.get_rng_state()
    first = normal(KEY, 0, 100, "a")
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    np.random.seed(2)  # noqa: NPY002
    assert torch.equal(first, normal(KEY, 0, 100, "a"))
