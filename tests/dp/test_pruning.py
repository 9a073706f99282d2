"""From scores to masks: exact counts, ties, floors, and signatures that cannot receive data."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparsedp.dp import pruning
from sparsedp.dp.masks import Layer, keep_top, kept_count
from sparsedp.dp.pruning import from_scores, random, saliency, shape_of, synflow, top
from sparsedp.dp.values import Released
from sparsedp.errors import UsageError
from tests.made_up import KEY, OTHER_KEY

LAYERS = (Layer("a", (3, 5), False), Layer("b", (7,), False), Layer("c", (2, 3, 2, 2), False))
MIXED = (Layer("a", (3, 5), True), Layer("c", (9, 3, 2, 2), True), Layer("last", (4, 6), False))
rates = st.floats(0, 0.9999)


def kept(masks: dict[str, Tensor]) -> int:
    return sum(int(mask.sum()) for mask in masks.values())


@given(rates)
def test_random_keeps_exact_counts_in_every_layer(rate: float) -> None:
    for layers in (LAYERS, MIXED):
        masks = random(layers, rate, KEY)
        for layer in layers:
            n = math.prod(shape_of(layer))
            assert masks[layer.name].shape == shape_of(layer) and masks[layer.name].dtype == torch.bool
            assert int(masks[layer.name].sum()) == max(n - math.floor(rate * n + 0.5), 1)


def test_random_is_a_function_of_the_key_and_differs_between_layers_and_keys() -> None:
    """Guarantee: the mask is a function of (layers, rate, key); it cannot receive data."""
    twins = (Layer("a", (40, 50), False), Layer("b", (40, 50), False))
    first, again, other = random(twins, 0.5, KEY), random(twins, 0.5, KEY), random(twins, 0.5, OTHER_KEY)
    assert all(torch.equal(first[n], again[n]) for n in first)
    for one, two in ((first["a"], first["b"]), (first["a"], other["a"])):
        assert 400 < int((one & two).sum()) < 600  # half of a half of 2000, and not the same


def test_random_is_uniform_over_places() -> None:
    layer = (Layer("a", (4, 5), False),)
    draws = [random((Layer(f"a{i}", (4, 5), False),), 0.75, KEY)[f"a{i}"] for i in range(4000)]
    counts = torch.stack(draws).sum(0).double()
    chi2 = float(((counts - 1000) ** 2 / (1000 * 0.75)).sum()) * 19 / 20
    assert chi2 < 50 and layer  # 19 degrees of freedom: above 50 once in 10,000


def test_a_rate_is_what_is_dropped_on_a_kernel_that_is_not_square() -> None:
    scores = {"a": torch.arange(15.0).reshape(3, 5)}
    mask = from_scores(LAYERS[:1], scores, 0.8)["a"]
    golden = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 1, 1]], dtype=torch.bool)
    assert torch.equal(mask, golden)


def obvious(layers: Sequence[Layer], scores: dict[str, Tensor], rate: float) -> dict[str, Tensor]:
    """The global ranking with its floor, by sorting a Python list."""
    masks = {}
    for by_filter in (True, False):
        group = [la for la in layers if la.by_filter == by_filter]
        entries = [(-float(s), g, i) for g, la in enumerate(group) for i, s in enumerate(scores[la.name].flatten().tolist())]
        n = len(entries)
        if not n:
            continue
        stay = sorted(entries)[: max(n - math.floor(rate * n + 0.5), 1)]
        empty = [g for g in range(len(group)) if not any(e[1] == g for e in stay)]
        lone = {g: min(e for e in entries if e[1] == g) for g in range(len(group))}
        for _ in empty:
            free = [e for e in stay if e != lone[e[1]]]
            if free:
                stay.remove(max(free))
        stay += [lone[g] for g in empty]
        for g, la in enumerate(group):
            mask = torch.zeros(math.prod(shape_of(la)), dtype=torch.bool)
            mask[[e[2] for e in stay if e[1] == g]] = True
            masks[la.name] = mask.reshape(shape_of(la))
    return masks


@given(st.integers(0, 10**6), rates, st.sampled_from((2, 5, 10**6)), st.sampled_from((LAYERS, MIXED)))
def test_global_ranking_equals_the_obvious_one_with_ties(
    seed: int, rate: float, levels: int, layers: tuple[Layer, ...]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = {
        la.name: torch.randint(levels, shape_of(la), generator=generator).double() * 10.0 ** (3 * i)
        for i, la in enumerate(layers)
    }
    masks = from_scores(layers, scores, rate)
    expected = obvious(layers, scores, rate)
    assert all(torch.equal(masks[n], expected[n]) for n in expected)
    assert all(bool(mask.any()) for mask in masks.values())
    for group in ([la for la in layers if la.by_filter], [la for la in layers if not la.by_filter]):
        n = sum(math.prod(shape_of(la)) for la in group)
        if n:
            assert sum(int(masks[la.name].sum()) for la in group) == max(kept_count(n, rate), len(group))


def test_nothing_is_lost_when_a_global_ranking_empties_layers() -> None:
    scores = {"a": torch.full((3, 5), 9.0), "b": torch.arange(7.0) * 1e-9, "c": torch.zeros(2, 3, 2, 2)}
    masks = from_scores(LAYERS, scores, 0.9)
    assert kept(masks) == kept_count(15 + 7 + 24, 0.9)
    assert masks["b"].tolist() == [False] * 6 + [True] and int(masks["c"].sum()) == 1 and bool(masks["c"][0, 0, 0, 0])


@given(st.integers(0, 10**6), st.integers(1, 3000), st.sampled_from((3, 10**6)))
def test_top_is_keep_top(seed: int, n: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randint(-1, levels, (n,), generator=generator).float() / 7
    for count in {0, 1, n // 3, n - 1, n}:
        assert torch.equal(top(flat, count), keep_top(flat, count))


def test_saliency_is_normalised_by_its_own_sum() -> None:
    released = Released({"a": torch.tensor([3.0, -1.0]), "b": torch.tensor([[0.0, -4.0]])}, "made up")
    found = saliency(released)
    assert torch.allclose(found["a"], torch.tensor([0.375, 0.125], dtype=torch.float64))
    assert torch.allclose(found["b"], torch.tensor([[0.0, 0.5]], dtype=torch.float64))
    nothing = saliency(Released({"a": torch.zeros(3)}, "made up"))
    assert nothing["a"].tolist() == [0, 0, 0]


def test_synflow_ranks_again_what_the_last_round_kept_on_the_exponential_schedule() -> None:
    layers = (Layer("a", (10, 100), False),)
    seen = []

    def flow(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.append(int((weights["a"] > 0).sum()))
        return {"a": weights["a"].clone()}

    masks = synflow(layers, {"a": torch.arange(1.0, 1001).reshape(10, 100)}, flow, 0.99, rounds=100)
    assert seen == [1000] + [round(1000 * 0.01 ** (k / 100)) for k in range(1, 100)]
    assert int(masks["a"].sum()) == 10 and bool(masks["a"][9, 90:].all())


def test_a_zero_weight_that_is_left_is_kept_before_a_pruned_one() -> None:
    weights = {"a": torch.tensor([[0.0, 5.0, 0.0, 0.0]])}
    masks = synflow((Layer("a", (1, 4), False),), weights, lambda w: {"a": w["a"].clone()}, 0.5, rounds=3)
    assert masks["a"].tolist() == [[True, True, False, False]]


def test_a_channel_scores_the_flow_through_its_whole_filter() -> None:
    weights = {"a": torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 2.0]])}
    masks = synflow((Layer("a", (2, 3), True),), weights, lambda w: {"a": w["a"].clone()}, 0.5, rounds=1)
    assert masks["a"].tolist() == [True, False]


def test_free_criteria_cannot_receive_data() -> None:
    """Guarantee: no data: `weights` are the initial (or public) ones, `flow` is the linearised network on an all-ones input."""
    assert set(inspect.signature(pruning.random).parameters) == {"layers", "rate", "key"}
    assert set(inspect.signature(pruning.synflow).parameters) == {"layers", "weights", "flow", "rate", "rounds", "floor"}


def test_wrong_scores_and_rates_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="scores for b"):
        from_scores(LAYERS, {"a": torch.ones(3, 5), "b": torch.ones(8), "c": torch.ones(2, 3, 2, 2)}, 0.5)
    with pytest.raises(UsageError, match="scores for b is None"):
        from_scores(LAYERS, {"a": torch.ones(3, 5)}, 0.5)
    with pytest.raises(UsageError, match="fraction dropped"):
        random(LAYERS, 1.0, KEY)
    with pytest.raises(UsageError, match="flow through a"):
        synflow(LAYERS[:1], {"a": torch.ones(3, 5)}, lambda w: {"a": w["a"] * math.inf}, 0.5)
    with pytest.raises(UsageError, match="rounds is 0"):
        synflow(LAYERS[:1], {"a": torch.ones(3, 5)}, lambda w: {"a": w["a"]}, 0.5, rounds=0)
