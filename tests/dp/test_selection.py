"""The coordinates of a step: exact counts on what pre-pruning left, the same for all who ask, and blind to the batch."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparsedp.dp import selection
from sparsedp.dp.clipping import Rows
from sparsedp.dp.masks import Layer, Masks, kept_count, maskable_layers
from sparsedp.dp.selection import Draw, select
from sparsedp.dp.values import ClippedSum, Released, public
from sparsedp.errors import UsageError
from tests.distributions import ALARM, binomial_p, correlation_deviations
from tests.made_up import KEY, OTHER_KEY, build, random_masks

LAYER = Layer("w", (40, 50), False)


def of_weight(weight: Tensor, criterion: str | Callable, rate: float, step: int = 0, pruned: Masks | None = None) -> Tensor:
    layer = Layer("w", tuple(weight.shape), False)
    return select([layer], criterion, rate, pruned or {}, public({"w": weight}, "test"), KEY, step)["w"]


@given(
    st.sampled_from(("conv", "mlp", "oddities", "standardised")), st.sampled_from(("weight", "filter")),
    st.sampled_from(("random", "magnitude")), st.sampled_from((0.1, 0.5, 0.9, 0.999)), st.sampled_from((0.0, 0.4, 0.95)), st.integers(0, 99),
)  # fmt: skip
def test_counts_are_exact_on_what_pruning_left(
    family: str, grain: str, criterion: str, rate: float, prune: float, seed: int
) -> None:
    model = build(family, seed)
    layers = maskable_layers(model, grain)
    pruned = random_masks(model, grain, prune, seed) if prune else {}
    masks = select(layers, criterion, rate, pruned, public(dict(model.named_parameters()), "test"), KEY, seed)
    assert set(masks) == {layer.name for layer in layers}
    for layer in layers:
        mask, left = masks[layer.name], pruned.get(layer.name)
        assert mask.dtype == torch.bool and mask.shape == (layer.shape[:1] if layer.by_filter else layer.shape)
        eligible = mask.numel() if left is None else int(left.sum())
        assert int(mask.sum()) == kept_count(eligible, rate)
        assert left is None or not bool((mask & ~left).any())


def test_weight_pruning_under_filter_dropping() -> None:
    layer = Layer("w", (3, 4), True)
    pruned = {"w": torch.tensor([[True, False, True, True], [False] * 4, [True] * 4])}
    mask = select([layer], "random", 0.5, pruned, public({"w": torch.ones(3, 4)}, "test"), KEY, 0)["w"]
    assert mask.shape == (3, 4) and not mask[1].any()
    assert (
        sum(bool(torch.equal(mask[i], pruned["w"][i])) and bool(mask[i].any()) for i in (0, 2)) == 1
    )  # one of two live channels


def test_magnitude_keeps_large_weights() -> None:
    weight = torch.tensor([[0.1, -5.0, 2.0], [-0.3, 0.0, -1.0]])
    assert of_weight(weight, "magnitude", 0.5).int().tolist() == [[0, 1, 1], [0, 0, 1]]
    by_filter = select([Layer("w", (2, 3), True)], "magnitude", 0.5, {}, public({"w": weight}, "test"), KEY, 0)["w"]
    assert by_filter.tolist() == [True, False]
    assert torch.equal(of_weight(weight, "magnitude", 0.5, step=9), of_weight(weight, "magnitude", 0.5))


def test_random_is_uniform_and_fresh_at_every_step_and_layer() -> None:
    steps = 400
    drawn = np.array([of_weight(torch.zeros(40, 50), "random", 0.7, t).flatten().numpy() for t in range(steps)]).astype(float)
    each = drawn.sum(axis=0)
    assert min(binomial_p(int(c), steps, 0.3) for c in (each.min(), each.max())) > ALARM
    assert abs(each.var() / (steps * 0.3 * 0.7) - 1) < 0.25
    assert correlation_deviations(drawn[1:].flatten(), drawn[:-1].flatten()) < 6
    twins = [Layer("a", (40, 50), False), Layer("b", (40, 50), False)]
    both = select(twins, "random", 0.5, {}, public({"a": torch.zeros(40, 50), "b": torch.zeros(40, 50)}, "test"), KEY, 0)
    assert correlation_deviations(both["a"].flatten().numpy(), both["b"].flatten().numpy()) < 6


def test_random_looks_at_nothing_but_the_key_and_the_place() -> None:
    first = of_weight(torch.zeros(40, 50), "random", 0.5)
    assert torch.equal(first, of_weight(torch.randn(40, 50, generator=torch.Generator().manual_seed(1)), "random", 0.5))
    other = select([LAYER], "random", 0.5, {}, public({"w": torch.zeros(40, 50)}, "test"), OTHER_KEY, 0)["w"]
    assert not torch.equal(first, other)


def test_nothing_to_drop_returns_what_pruning_left() -> None:
    pruned = {"w": torch.tensor([True, False])}
    for criterion, rate in (("none", 0.5), ("random", 0.0)):
        assert (
            select([Layer("w", (2,), False)], criterion, rate, pruned, public({"w": torch.ones(2)}, "test"), KEY, 0) is pruned
        )


def test_a_users_criterion() -> None:
    seen = {}

    def farthest_from_one(layer: Layer, weight: Tensor, draw: Draw) -> Tensor:
        seen[layer.name] = weight.clone()
        assert torch.equal(draw.uniform(3), draw.uniform(3))
        return (weight - 1).abs()

    pruned = {"w": torch.tensor([True, True, False, True])}
    mask = of_weight(torch.tensor([1.0, 9.0, 99.0, -1.0]), farthest_from_one, 0.34, pruned=pruned)
    assert mask.tolist() == [False, True, False, True]
    assert seen["w"].tolist() == [1.0, 9.0, 0.0, -1.0]  # pruned weights are not shown
    with pytest.raises(UsageError, match=r"scores for w is \(2,\), but they must have shape \(4,\)"):
        of_weight(torch.ones(4), lambda layer, weight, draw: torch.ones(2), 0.5)
    with pytest.raises(UsageError, match="drop criterion is 'largest'.*magnitude, none, random"):
        of_weight(torch.ones(4), "largest", 0.5)


def test_no_signature_can_receive_a_batch() -> None:
    """Guarantee: nothing here can receive a batch."""
    about_layers = {"layers", "layer", "pruned", "weights", "weight", "alive", "scores"}
    allowed = about_layers | {"criterion", "rate", "key", "step", "draw", "count"}
    for name, function in inspect.getmembers(selection, inspect.isfunction):
        if function.__module__ == selection.__name__:
            assert set(inspect.signature(function).parameters) - {"self"} <= allowed, name
    hints = typing.get_type_hints(select)
    assert hints["weights"] is Released
    assert not any(value is Rows or value is ClippedSum for value in vars(selection).values())
