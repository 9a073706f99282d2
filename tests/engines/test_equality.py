"""Every engine gives the reference's clipped sum: for every kind of model, mask, unit, number type and broken record."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sparsedp.dp.clipping import Engine, Loss, Rows, reference
from sparsedp.dp.masks import Masks, expand
from sparsedp.engines.fast import Fast
from sparsedp.engines.functional import functional
from sparsedp.engines.planning import fast_engine
from sparsedp.engines.self_check import disagreements, made_up_masks
from sparsedp.engines.structure import find_structure
from sparsedp.engines.weights import METHODS
from tests.engines import zoo

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")

UNITS = {"one row each": [1] * 5, "three views": [3] * 3, "unequal": [2, 1, 3, 1]}


def images(counts: list[int], seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    rows = sum(counts)
    x = torch.randn(rows, 3, 8, 8, generator=generator)
    y = torch.randint(0, zoo.CLASSES, (rows,), generator=generator)
    return Rows.make(x, y, torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)))


def build(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return zoo.MODELS[name]().to(dtype)


def fast_by(method: str | None, model: nn.Module, rows: Rows, loss: Loss = zoo.cross_entropy) -> Fast:
    """The fast engine with one method wherever it is legal, or with its rule of thumb. Nothing is measured."""
    structure = find_structure(model, loss, rows)
    keys = [f"{key}{suffix}" for key in structure.slots for suffix in ("", "@weight", "@filter")]
    return Fast(structure, dict.fromkeys(keys, method) if method else {})


def assert_same(
    engine: Engine, model: nn.Module, rows: Rows, masks: Masks, loss: Loss = zoo.cross_entropy, tolerance: float = 2e-4
) -> None:  # fmt: skip
    for clip in (1e-2, 0.7, 1e4):
        expected, found = reference(model, loss, rows, masks, clip), engine(model, loss, rows, masks, clip)
        assert disagreements(found, expected, tolerance) == [], clip
        for name, tensor in found.items():
            assert tensor.dtype == expected[name].dtype
            if name in masks:
                assert not tensor[~expand(masks[name], tensor.shape).expand_as(tensor)].any()


def all_masks(model: nn.Module) -> dict[str, Masks]:
    return {"none": {}, "weight": made_up_masks(model, "weight"), "filter": made_up_masks(model, "filter")}


@pytest.mark.parametrize("name", zoo.MODELS)
@pytest.mark.parametrize("counts", UNITS.values(), ids=UNITS)
def test_fast_equals_reference(name: str, counts: list[int]) -> None:
    model, rows = build(name), images(counts)
    engine = fast_by(None, model, rows)
    for masks in all_masks(model).values():
        assert_same(engine, model, rows, masks)


@pytest.mark.parametrize("name", zoo.MODELS)
def test_functional_equals_reference(name: str) -> None:
    model, rows = build(name), images(UNITS["unequal"])
    for masks in all_masks(model).values():
        assert_same(functional, model, rows, masks)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["convolutions", "standardised", "windows"])
@pytest.mark.parametrize("counts", UNITS.values(), ids=UNITS)
def test_every_method_equals_reference(method: str, name: str, counts: list[int]) -> None:
    for last in (False, True):
        model, rows = build(name), images(counts)
        if last:
            model = model.to(memory_format=torch.channels_last)
            rows = Rows(rows.inputs.contiguous(memory_format=torch.channels_last), rows.targets, rows.unit, rows.units)
        engine = fast_by(method, model, rows)
        for masks in all_masks(model).values():
            assert_same(engine, model, rows, masks)


@pytest.mark.parametrize("name", ["convolutions", "standardised", "tied", "norms"])
def test_float64_is_exact_to_the_safety_margin(name: str) -> None:
    model, rows = build(name, torch.float64), images(UNITS["unequal"])
    rows = Rows(rows.inputs.double(), rows.targets, rows.unit, rows.units)
    for masks in all_masks(model).values():
        assert_same(fast_by("direct:fold", model, rows), model, rows, masks, tolerance=2e-5)


@pytest.mark.parametrize("name", ["convolutions", "standardised", "windows"])
def test_autocast(name: str) -> None:
    model, rows = build(name), images(UNITS["three views"])
    with torch.autocast("cpu", torch.bfloat16):
        for masks in all_masks(model).values():
            assert_same(fast_by(None, model, rows), model, rows, masks, tolerance=0.05)


def test_a_loss_of_ones_own_over_several_outputs() -> None:
    def loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return F.cross_entropy(output["classes"], target, reduction="none") + output["size"].squeeze(1).square()

    with torch.random.fork_rng():
        model = zoo.Several()
    rows = images(UNITS["unequal"])
    for engine in (fast_by(None, model, rows, loss), functional):
        assert_same(engine, model, rows, {}, loss)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38, 1e25, 0.0])
@pytest.mark.parametrize("method", METHODS)
def test_a_broken_record_counts_as_the_reference_says(value: float, method: str) -> None:
    model, rows = build("convolutions"), images(UNITS["three views"])
    rows.inputs[4] = value
    for masks in all_masks(model).values():
        engine = fast_by(method, model, rows)
        assert_same(engine, model, rows, masks)
        assert_same(functional, model, rows, masks)
        assert all(bool(t.isfinite().all()) for t in engine(model, zoo.cross_entropy, rows, masks, 1.0).values())


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_random_convolutions(data: st.DataObject) -> None:
    draw = data.draw
    groups = draw(st.sampled_from([1, 1, 2, 4]))
    kernel, stride = (
        draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
        draw(st.tuples(st.integers(1, 2), st.integers(1, 3))),
    )
    padding, dilation = draw(st.tuples(st.integers(0, 2), st.integers(0, 2))), draw(st.integers(1, 2))
    mode = draw(st.sampled_from(["zeros", "reflect", "circular", "replicate"]))
    with torch.random.fork_rng():
        torch.manual_seed(draw(st.integers(0, 99)))
        model = nn.Sequential(
            nn.Conv2d(4, 4 * draw(st.integers(1, 2)), kernel, stride, padding, dilation, groups, draw(st.booleans()), mode), nn.SiLU(),
            nn.Flatten(), nn.LazyLinear(zoo.CLASSES),
        )  # fmt: skip
        rows = Rows.make(torch.randn(4, 4, 7, 6), torch.randint(0, zoo.CLASSES, (4,)), views=draw(st.sampled_from([1, 2])))
        model(rows.inputs)
    for method in METHODS:
        for masks in all_masks(model).values():
            assert_same(fast_by(method, model, rows), model, rows, masks)


@pytest.mark.parametrize("method", METHODS)
def test_one_unit_moves_the_sum_by_at_most_the_clip(method: str) -> None:
    """Guarantee: adding a unit to the batch moves the result by at most `clip` in L2, rounding included."""
    for seed in range(10):
        model = build("standardised" if seed % 2 else "convolutions")
        rows = images([1], seed)
        rows.inputs.mul_(10.0 ** (seed % 5))
        for masks in all_masks(model).values():
            own = fast_by(method, model, rows)(model, zoo.cross_entropy, rows, masks, 1e-3)
            assert float(torch.stack([t.double().norm() for t in own.values()]).norm()) <= 1e-3 * (1 + 1e-6)


def test_the_measured_plan_is_right_and_replays_to_the_bit() -> None:
    model, rows = build("standardised"), images(UNITS["three views"])
    masks = made_up_masks(model, "weight")
    engine, plan = fast_engine(model, zoo.cross_entropy, rows, masks, None)
    again, _ = fast_engine(model, zoo.cross_entropy, rows, masks, type(plan).from_json(plan.to_json()))
    assert_same(engine, model, rows, masks)
    first, second = (e(model, zoo.cross_entropy, rows, masks, 0.5) for e in (engine, again))
    assert all(torch.equal(first[name], second[name]) for name in first)
