"""Clipped sums: equal to the oracle, bounded for every unit whatever is in it, and the same however the batch is cut."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from sparsedp.dp import clipping
from sparsedp.dp.clipping import Rows, clip_factor, clipped_sum, clipped_sum_on_grid, reference
from sparsedp.dp.masks import expand, participating
from sparsedp.dp.noise import grid_for
from sparsedp.dp.values import ClippedSum
from sparsedp.errors import UsageError
from tests import oracles
from tests.made_up import BAD_VALUES, CLASSES, World, as_rows, build, cross_entropy, random_masks, unit_of, worlds

SLACK = 1 + 1e-6


def sum_of(world: World, chosen: list[int] | None = None) -> dict[str, Tensor]:
    return clipped_sum(reference, world.model, cross_entropy, [world.rows(chosen)], world.masks, world.clip).tensors


def on_grid(world: World, parts: list[Rows] | None = None, sigma: float = 1.0) -> ClippedSum:
    grid = grid_for(sigma, world.clip, clipping.selected(participating(world.model), world.masks))
    parts = [world.rows()] if parts is None else parts
    return clipped_sum_on_grid(world.model, cross_entropy, parts, world.masks, world.clip, grid)


@given(worlds())
def test_equals_the_oracle(world: World) -> None:
    expected = oracles.clipped_sum(world.model, cross_entropy, world.units, world.masks, world.clip)
    got = sum_of(world)
    assert got.keys() == expected.keys()
    assert oracles.distance(got, expected) <= 1e-9 * world.clip * max(1, len(world.units))


@given(worlds(dtypes=(torch.float32, torch.bfloat16)))
def test_narrow_models_are_summed_in_float32_and_equal_the_oracle(world: World) -> None:
    got = sum_of(world)
    assert {t.dtype for t in got.values()} == {torch.float32}
    if world.dtype == torch.float32:
        expected = oracles.clipped_sum(world.model, cross_entropy, world.units, world.masks, world.clip)
        sizes = max((float(x.abs().max()) for unit in world.units for x, _ in unit), default=0.0)
        assert oracles.distance(got, expected) <= 1e-5 * max(world.clip, min(sizes, world.clip)) * max(1, len(world.units))


@given(worlds(bad=True), st.data())
def test_neighbours_differ_by_at_most_the_clip(world: World, data: st.DataObject) -> None:
    """Guarantee: adding a unit to the batch, or taking one away, moves the result by at most `clip` in L2."""
    index = data.draw(st.integers(0, len(world.units) - 1))
    whole = sum_of(world)
    assert all(bool(t.isfinite().all()) for t in whole.values())
    others = [i for i in range(len(world.units)) if i != index]
    without = sum_of(world, others)
    slack = 1e-12 * len(world.units) * world.clip
    assert oracles.distance(whole, without) <= world.clip * SLACK + slack
    emptied = sum_of(world.with_unit(index, ()))
    assert oracles.distance(whole, emptied) <= world.clip * SLACK + slack
    assert oracles.distance(emptied, without) <= slack
    replaced = sum_of(world.with_unit(index, unit_of(data.draw(st.integers(0, 99)), data.draw(st.integers(1, 3)), 5.0)))
    assert oracles.distance(whole, replaced) <= 2 * world.clip * SLACK + slack
    twice = clipped_sum(reference, world.model, cross_entropy, [world.rows(), world.rows([index])], world.masks, world.clip)
    assert oracles.distance(twice.tensors, whole) <= world.clip * SLACK + slack


@given(worlds(bad=True, dtypes=(torch.float32, torch.bfloat16)))
def test_every_single_unit_is_within_the_clip_in_narrow_types(world: World) -> None:
    for index in range(len(world.units)):
        assert oracles.norm(sum_of(world, [index])) <= world.clip * SLACK


@given(worlds(bad=True))
def test_nothing_off_the_masks(world: World) -> None:
    for total in (sum_of(world), on_grid(world).tensors):
        for name, mask in world.masks.items():
            assert not total[name][~expand(mask, total[name].shape).expand_as(total[name])].any()


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_any_micro_batch_gives_the_same_sum(size: int) -> None:
    """Guarantee: the result does not depend on how the batch is cut into parts, to float tolerance."""
    model = build("conv", 3)
    units = [unit_of(i, 1 + i % 3, bad=BAD_VALUES[i % 6] if i % 9 == 0 else None) for i in range(70)]
    masks = random_masks(model, "weight", 0.5, 4)
    whole = clipped_sum(reference, model, cross_entropy, [as_rows(units, torch.float64)], masks, 0.5)
    parts = [as_rows(units[i : i + size], torch.float64) for i in range(0, len(units), size)]
    cut = clipped_sum(reference, model, cross_entropy, parts, masks, 0.5)
    assert oracles.distance(whole.tensors, cut.tensors) <= 1e-6 * oracles.norm(whole.tensors)
    assert whole.sensitivity == cut.sensitivity == 0.5


def test_an_empty_batch_is_a_sum_of_zeros() -> None:
    model = build("oddities", 0, torch.float32)
    for total in (
        clipped_sum(reference, model, cross_entropy, [], {}, 1.0),
        clipped_sum(reference, model, cross_entropy, [as_rows([], torch.float32)], {}, 1.0),
        clipped_sum_on_grid(model, cross_entropy, [], {}, 1.0, 1e-3),
    ):
        assert total.tensors.keys() == participating(model).keys()
        assert not any(t.any() for t in total.tensors.values())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("family", ["mlp", "conv", "standardised", "oddities"])
def test_a_unit_that_is_not_finite_counts_exactly_zero(family: str, value: float) -> None:
    model = build(family, 1, torch.float32)
    good = [unit_of(i, 2) for i in range(3)]
    with_bad = [good[0], unit_of(9, 2, bad=value), *good[1:]]
    clean = clipped_sum(reference, model, cross_entropy, [as_rows(good, torch.float32)], {}, 1.0)
    spoilt = clipped_sum(reference, model, cross_entropy, [as_rows(with_bad, torch.float32)], {}, 1.0)
    assert all(torch.equal(clean.tensors[n], spoilt.tensors[n]) for n in clean.tensors)


@pytest.mark.parametrize("value", [1e30, -3e38, 3e38])
def test_a_huge_pixel_is_clipped_or_counts_zero(value: float) -> None:
    for family in ("linear", "mlp", "conv", "standardised"):
        model = build(family, 1, torch.float32)
        total = clipped_sum(reference, model, cross_entropy, [as_rows([unit_of(9, 1, bad=value)], torch.float32)], {}, 1.0)
        assert oracles.norm(total.tensors) <= SLACK


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_loss_that_is_not_finite_counts_zero_though_its_gradient_is(value: float) -> None:
    model = build("linear", 0)
    units = [unit_of(i, 1) for i in range(3)]

    def spoilt(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels) + torch.where(labels == units[1][0][1], value, 0.0)

    got = clipped_sum(reference, model, spoilt, [as_rows(units, torch.float64)], {}, 1.0).tensors
    kept = [u for u in units if u[0][1] != units[1][0][1]]
    assert oracles.distance(got, oracles.clipped_sum(model, cross_entropy, kept, {}, 1.0)) < 1e-12


class _RootOfWeight(nn.Module):
    """Its gradient is NaN at the coordinates whose weight is zero, while its loss is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.0, 4.0, 9.0]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight.abs().sqrt() * x).sum(1)


def test_only_the_selected_coordinates_decide_whether_a_gradient_is_finite() -> None:
    model, rows = _RootOfWeight(), Rows.make(torch.ones(1, 3), torch.zeros(1))

    def loss(out: Tensor, target: Tensor) -> Tensor:
        return out

    everything = clipped_sum(reference, model, loss, [rows], {}, 10.0).tensors["weight"]
    assert not everything.any()
    mask = {"weight": torch.tensor([False, True, True])}
    assert clipped_sum(reference, model, loss, [rows], mask, 10.0).tensors["weight"].tolist() == [
        0.0,
        0.25,
        pytest.approx(1 / 6),
    ]


def test_short_gradients_are_left_alone_and_zero_stays_zero() -> None:
    assert clip_factor({"a": torch.zeros(4)}, 1.0) == 1.0
    assert clip_factor({"a": torch.full((4,), 1e-30)}, 1.0) == 1.0
    assert clip_factor({"a": torch.full((4,), 2.0)}, 1.0) == 0.25
    model = build("linear", 0)
    tiny = clipped_sum(
        reference, model, lambda o, t: 1e-9 * cross_entropy(o, t), [as_rows([unit_of(1, 1)], torch.float64)], {}, 1.0
    )
    assert 0 < oracles.norm(tiny.tensors) < 1e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-3, 1.0, 60.0])
def test_the_norm_does_not_overshoot_over_a_million_coordinates(dtype: torch.dtype, size: float) -> None:
    model = nn.Linear(1_000_000, 1, bias=False).to(dtype)
    x = size * torch.randn(1, 1_000_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    total = clipped_sum(reference, model, lambda out, _: out[:, 0].float() / 1e3, [Rows.make(x, torch.zeros(1))], {}, 5e-4)
    assert total.tensors["weight"].dtype == torch.float32
    assert 4.99e-4 < oracles.norm(total.tensors) <= 5e-4 * SLACK


def test_the_largest_floats_do_not_overshoot() -> None:
    model, rows = nn.Linear(1000, 1000, bias=False), Rows.make(torch.ones(1, 1000), torch.zeros(1))
    for size in (1e30, 1e34, 1e35, 3e38):
        loss = _dot_with(torch.full((1000, 1000), size), model)
        assert oracles.norm(clipped_sum(reference, model, loss, [rows], {}, 1.0).tensors) <= SLACK


def _dot_with(direction: Tensor, model: nn.Linear) -> Any:
    """A loss whose gradient by the weight is `direction`, without a large value anywhere else."""

    class Dot(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            return torch.zeros(1)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return direction.clone()

    return lambda out, target: Dot.apply(model.weight)


@given(worlds(bad=True), st.randoms(use_true_random=False))
def test_on_the_grid_the_sum_is_the_same_to_the_bit_in_any_order_and_cut(world: World, random: Any) -> None:
    order = list(range(len(world.units)))
    random.shuffle(order)
    one = on_grid(world)
    other = on_grid(world, [world.rows([i]) for i in order])
    assert {t.dtype for t in one.tensors.values()} == {torch.int64}
    assert all(torch.equal(one.tensors[n], other.tensors[n]) for n in one.tensors)


@given(worlds(bad=True), st.sampled_from((0.3, 1.0, 20.0)))
def test_on_the_grid_the_norm_is_bounded_in_integers(world: World, sigma: float) -> None:
    for index in range(len(world.units)):
        total = on_grid(world, [world.rows([index])], sigma)
        assert total.grid is not None
        square = sum(int(v) ** 2 for t in total.tensors.values() for v in t.reshape(-1).tolist())
        assert square * total.grid**2 <= world.clip**2 * (1 + 1e-12)
        assert total.sensitivity == world.clip


@given(worlds())
def test_on_the_grid_the_sum_is_near_that_of_floats(world: World) -> None:
    total = on_grid(world)
    assert total.grid is not None
    scaled = {n: t.double() * total.grid for n, t in total.tensors.items()}
    assert oracles.distance(scaled, sum_of(world)) <= 2e-3 * world.clip * max(1, len(world.units))


def test_on_the_grid_a_unit_that_makes_the_loss_raise_counts_zero_and_short_memory_does_not() -> None:
    model = build("mlp", 1, torch.float64)
    good = [unit_of(i, 2) for i in range(3)]
    (x, y), last = unit_of(9, 2)
    bad = ((x, y + CLASSES), last)

    def total(units: list[Any], loss: Any = cross_entropy) -> dict[str, Tensor]:
        return clipped_sum_on_grid(model, loss, [as_rows(units, torch.float64)], {}, 0.5, 1e-6).tensors

    def full(output: Tensor, labels: Tensor) -> Tensor:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] can't allocate memory: you tried to allocate 9 bytes.")

    clean, spoilt = total(good), total([good[0], bad, *good[1:]])
    assert all(torch.equal(t, spoilt[n]) for n, t in clean.items())
    with pytest.raises(RuntimeError, match="allocate memory"):
        total(good, full)


def test_rows_of_unequal_units() -> None:
    rows = Rows.make(torch.arange(6.0), torch.arange(6), torch.tensor([0, 0, 0, 1, 2, 2]))
    assert rows.units == 3 and rows.counts.tolist() == [3, 1, 2]
    assert [x.tolist() for x, _ in rows.of_each_unit()] == [[0, 1, 2], [3], [4, 5]]
    views = Rows.make(torch.arange(6.0), torch.arange(6), views=2)
    assert [y.tolist() for _, y in views.of_each_unit()] == [[0, 1], [2, 3], [4, 5]]


def test_views_are_averaged_before_clipping() -> None:
    model = build("linear", 2)
    views = unit_of(5, 8, 10.0)
    together = clipped_sum(reference, model, cross_entropy, [as_rows([views], torch.float64)], {}, 0.1)
    assert oracles.norm(together.tensors) == pytest.approx(0.1)


def test_inputs_may_be_tuples_and_dicts() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, CLASSES)

        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            return self.head(first + second)

    model, generator = Sum(), torch.Generator().manual_seed(0)
    a, b, y = torch.randn(5, 4, generator=generator), torch.randn(5, 4, generator=generator), torch.arange(5) % CLASSES
    sums = [
        clipped_sum(reference, model, cross_entropy, [Rows.make(inputs, y)], {}, 1.0).tensors["head.weight"]
        for inputs in ((a, b), {"second": b, "first": a}, (a + b, torch.zeros_like(b)))
    ]
    assert torch.equal(sums[0], sums[1]) and torch.allclose(sums[0], sums[2])


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan")])
def test_a_clip_that_is_not_above_zero_is_refused(clip: float) -> None:
    with pytest.raises(UsageError, match="clip is .* must be above zero"):
        clipped_sum(reference, build("linear", 0), cross_entropy, [], {}, clip)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_over_the_batch_is_refused(reduction: str) -> None:
    rows = as_rows([unit_of(0, 2)], torch.float64)
    with pytest.raises(UsageError, match=r"loss returned \(\) for 2 rows, but .* use reduction='none'"):
        clipped_sum(reference, build("linear", 0), nn.CrossEntropyLoss(reduction=reduction), [rows], {}, 1.0)


def test_without_clipping_it_is_the_sum_of_gradients() -> None:
    model = build("mlp", 4)
    units = [unit_of(i, 1) for i in range(4)]
    got = clipped_sum(reference, model, cross_entropy, [as_rows(units, torch.float64)], {}, math.inf).tensors
    rows = as_rows(units, torch.float64)
    plain = torch.autograd.grad(cross_entropy(model(rows.inputs), rows.targets).sum(), list(participating(model).values()))
    assert all(np.allclose(g, got[n], rtol=1e-10) for n, g in zip(got, plain, strict=True))


def test_the_users_grads_and_parameters_are_not_touched() -> None:
    model = build("conv", 4)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    clipped_sum(reference, model, cross_entropy, [as_rows([unit_of(0, 2)], torch.float64)], {}, 1.0)
    assert all(p.grad is None and torch.equal(p, before[n]) for n, p in model.named_parameters())
