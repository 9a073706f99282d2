"""Counts are exact, ties do not change them, and masks act where they should."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from sparsedp.dp.masks import (
    combine,
    dropped_count,
    expand,
    keep_top,
    kept_count,
    kth,
    maskable_layers,
    participating,
    restrict,
)
from sparsedp.errors import UsageError
from tests.made_up import build


@given(st.integers(1, 10_000), st.integers(0, 999))
def test_counts_are_exact(n: int, thousandths: int) -> None:
    rate = thousandths / 1000
    kept = kept_count(n, rate)
    assert kept == max(n - math.floor(Fraction(rate * n) + Fraction(1, 2)), 1)
    assert kept + dropped_count(n, rate) == n and 1 <= kept <= n


def test_counts_by_hand() -> None:
    cases = {
        (10, 0.0): 10,
        (10, 0.3): 7,
        (10, 0.25): 7,
        (10, 0.99): 1,
        (1, 0.9): 1,
        (15, 0.9): 1,
        (1000, 0.999): 1,
        (3, 0.5): 1,
    }
    assert {case: kept_count(*case) for case in cases} == cases


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan")])
def test_rates_outside_are_refused(rate: float) -> None:
    with pytest.raises(UsageError, match=r"fraction dropped, in \[0, 1\)"):
        kept_count(10, rate)


@given(st.data())
def test_keep_top_keeps_the_highest_and_exactly_so_many(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(((7,), (3, 5), (2, 3, 2, 2), (40,))))
    n = math.prod(shape)
    value = st.sampled_from((0.0, 1.0, -1.0, 2.0, math.inf, -math.inf, math.nan)) | st.floats(-2, 2)
    scores = torch.tensor(data.draw(st.lists(value, min_size=n, max_size=n))).reshape(shape)
    eligible = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n))).reshape(shape)
    count = data.draw(st.integers(0, int(eligible.sum())))
    for places, wanted in ((eligible, count), (None, min(count, n))):
        mask = keep_top(scores, wanted, places)
        allowed = torch.ones(shape, dtype=torch.bool) if places is None else places
        order = sorted(
            (i for i in range(n) if allowed.reshape(-1)[i]),
            key=lambda i: (-float(scores.reshape(-1)[i].nan_to_num(-math.inf, math.inf, -math.inf)), i),
        )
        assert mask.shape == scores.shape and mask.dtype == torch.bool
        assert mask.reshape(-1).nonzero().squeeze(1).tolist() == sorted(order[:wanted])


def test_ties_fall_to_the_lowest_index() -> None:
    assert keep_top(torch.ones(6), 2).tolist() == [True, True, False, False, False, False]
    assert keep_top(torch.tensor([1.0, math.nan, 1.0]), 2).tolist() == [True, False, True]


def test_a_mask_lies_as_its_weight_lies() -> None:
    scores = torch.arange(15.0).reshape(3, 5)  # not square: a transposed mask would show
    assert keep_top(scores, 4).int().tolist() == [[0] * 5, [0] * 5, [0, 1, 1, 1, 1]]
    channels = expand(torch.tensor([True, False, True]), (3, 5))
    assert channels.expand(3, 5).int().tolist() == [[1] * 5, [0] * 5, [1] * 5]


def test_restrict_leaves_exact_zeros_even_for_nan() -> None:
    tensors = {
        "a": torch.tensor([[math.nan, 1.0], [math.inf, 2.0]]),
        "b": torch.tensor([3.0]),
        "c": torch.tensor([[5, 6], [7, 8]]),
    }
    got = restrict(tensors, {"a": torch.tensor([[False, True], [False, False]]), "c": torch.tensor([False, True])})
    assert got["a"].tolist() == [[0.0, 1.0], [0.0, 0.0]] and got["b"].tolist() == [3.0]
    assert got["c"].tolist() == [[0, 0], [7, 8]] and got["c"].dtype == torch.int64


@given(st.integers(0, 1000), st.booleans(), st.booleans())
def test_combine_is_both(seed: int, first_by_channel: bool, second_by_channel: bool) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(by_channel: bool) -> Tensor:
        return torch.rand((4,) if by_channel else (4, 3), generator=generator) < 0.6

    first, second = draw(first_by_channel), draw(second_by_channel)
    both = combine({"w": first, "x": first}, {"w": second, "y": second})
    wanted = expand(first, (4, 3)).expand(4, 3) & expand(second, (4, 3)).expand(4, 3)
    assert torch.equal(expand(both["w"], (4, 3)).expand(4, 3), wanted)
    assert both["x"] is first and both["y"] is second
    assert (both["w"].ndim == 1) == (first_by_channel and second_by_channel)


def test_what_can_be_masked() -> None:
    names = {layer.name: layer for layer in maskable_layers(build("conv", 0), "filter")}
    assert list(names) == ["0.weight", "3.weight", "5.weight"]
    assert [names[n].by_filter for n in names] == [True, True, False]  # the last linear layer is the classifier
    assert names["0.weight"].shape == (4, 1, 3, 3) and names["0.weight"].size == 36
    assert not any(layer.by_filter for layer in maskable_layers(build("conv", 0), "weight"))


def test_frozen_tied_and_parametrised_weights() -> None:
    model = build("oddities", 0)
    assert "frozen.weight" not in participating(model)
    assert [layer.name for layer in maskable_layers(model)] == ["first.weight", "twice.weight", "unused.weight", "last.weight"]
    tied = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    assert [layer.name for layer in maskable_layers(tied)] == ["0.weight"]
    normed = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 2))
    assert [layer.name for layer in maskable_layers(normed)] == ["0.parametrizations.weight.original", "1.weight"]


def test_patterns_choose_others() -> None:
    model = build("conv", 0)
    chosen = maskable_layers(model, "filter", ["*.bias", "3.*"])
    assert [(layer.name, layer.by_filter) for layer in chosen] == [
        ("0.bias", False), ("1.bias", False), ("3.weight", True), ("5.bias", False),
    ]  # fmt: skip
    with pytest.raises(UsageError, match="the maskable pattern is 'nothing', but no trained parameter has such a name"):
        maskable_layers(model, "weight", ["*.bias", "nothing"])
    with pytest.raises(UsageError, match="granularity is 'channel'"):
        maskable_layers(model, "channel")
    with pytest.raises(UsageError, match="maskable parameter scale"):
        maskable_layers(build("oddities", 0), "weight", ["scale"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scores_of_any_width_are_ranked(dtype: torch.dtype) -> None:
    scores = torch.tensor([[0.5, -1.0, 2.0], [2.0, 0.25, 1.0]], dtype=dtype)
    assert keep_top(scores, 3).int().tolist() == [[0, 0, 1], [1, 0, 1]]
    assert keep_top(scores, 1).int().tolist() == [[0, 0, 1], [0, 0, 0]], "a tie falls to the lower place"


MANY = 2**20 + 7
OF_MANY = {
    "normal": lambda g: torch.randn(MANY, generator=g),
    "ties": lambda g: torch.randint(0, 3, (MANY,), generator=g).float(),
    "mostly zero": lambda g: torch.randn(MANY, generator=g) * (torch.rand(MANY, generator=g) < 0.01),
    "ascending": lambda g: torch.arange(MANY, dtype=torch.float32),
    "a sample that misleads": lambda g: torch.where(torch.arange(MANY) % (MANY // 2**16) == 0, 1e3, 0.0) + torch.rand(MANY, generator=g),
    "infinite": lambda g: torch.where(torch.rand(MANY, generator=g) < 0.5, torch.inf, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("kind", OF_MANY)
def test_of_many_values_the_one_at_a_place_is_exact(kind: str) -> None:
    values = OF_MANY[kind](torch.Generator().manual_seed(0))
    ranked = values.sort().values
    for place in (0, 1, MANY // 1000, MANY // 2, MANY - MANY // 100, MANY - 1):
        assert kth(values, place) == float(ranked[place])
