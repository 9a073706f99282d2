"""On a GPU: the same sums as the reference gives, the same noise and masks as on a CPU, and a run from end to end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sparsedp import keys, models, recipe, train
from sparsedp.config import Model
from sparsedp.dp.clipping import Rows
from sparsedp.dp.masks import Masks, maskable_layers, participating
from sparsedp.dp.noise import add_noise
from sparsedp.dp.selection import select
from sparsedp.dp.values import ClippedSum, public
from sparsedp.engines import choose_engine
from sparsedp.engines.compiled import Compiled
from sparsedp.engines.functional import functional
from sparsedp.engines.precision import exact_products
from sparsedp.engines.weights import METHODS
from sparsedp.training import Stopped
from tests.engines import zoo
from tests.engines.test_equality import UNITS, all_masks, assert_same, build, fast_by, images

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]


@pytest.fixture(autouse=True)
def shortcuts() -> Iterator[None]:
    """TensorFloat-32 wherever torch has it: what users switch on, norms and sums must not take."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def on_gpu(model: nn.Module, rows: Rows) -> tuple[nn.Module, Rows, dict[str, Masks]]:
    model = model.to("cuda")
    return model, Rows(rows.inputs.cuda(), rows.targets.cuda(), rows.unit, rows.units), all_masks(model)


@pytest.mark.parametrize("name", zoo.MODELS)
@pytest.mark.parametrize("counts", UNITS.values(), ids=UNITS)
def test_fast_and_functional_equal_reference(name: str, counts: list[int]) -> None:
    model, rows, several = on_gpu(build(name), images(counts))
    with exact_products():
        for masks in several.values():
            assert_same(fast_by(None, model, rows), model, rows, masks)
            assert_same(functional, model, rows, masks)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["convolutions", "standardised", "windows", "one and three dimensions"])
def test_every_method_equals_reference(method: str, name: str) -> None:
    for counts in UNITS.values():
        model, rows, several = on_gpu(build(name), images(counts))
        with exact_products():
            for masks in several.values():
                assert_same(fast_by(method, model, rows), model, rows, masks)


@pytest.mark.parametrize("method", METHODS)
def test_one_unit_moves_the_sum_by_at_most_the_clip_under_tensorfloat(method: str) -> None:
    for seed in range(10):
        model, rows, several = on_gpu(build("standardised" if seed % 2 else "convolutions"), images([1], seed))
        rows.inputs.mul_(10.0 ** (seed % 5))
        for masks in several.values():
            own = fast_by(method, model, rows)(model, zoo.cross_entropy, rows, masks, 1e-3)
            assert float(torch.stack([t.double().norm() for t in own.values()]).norm()) <= 1e-3 * (1 + 1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_a_broken_record_counts_zero(value: float) -> None:
    model, rows, several = on_gpu(build("convolutions"), images(UNITS["three views"]))
    rows.inputs[4] = value
    with exact_products():
        for masks in several.values():
            assert_same(fast_by(None, model, rows), model, rows, masks)


def test_the_chosen_engine_is_the_fast_one_and_its_convolutions_are_batched() -> None:
    model, rows, _ = on_gpu(build("convolutions"), images(UNITS["one row each"]))
    chosen = choose_engine("auto", model, zoo.cross_entropy, rows)
    assert chosen.name == "fast", chosen.notes
    assert {m.split(":")[0] for m in chosen.plan.methods.values()} <= {"batched", "grouped", "gram", "outer"}


def test_the_fast_engine_serves_residual_networks_in_channels_last() -> None:
    model = models.build(Model(name="wrn_10_1"), (3, 32, 32), 10).to("cuda", memory_format=torch.channels_last)
    rows = Rows.make(torch.randn(2, 3, 32, 32).cuda(), torch.tensor([0, 9]).cuda())
    chosen = choose_engine("auto", model, zoo.cross_entropy, rows)
    assert chosen.name == "fast", chosen.notes


def test_the_compiled_engine_equals_reference() -> None:
    model, rows, several = on_gpu(build("convolutions"), images(UNITS["one row each"]))
    with exact_products():
        for masks in several.values():
            assert_same(Compiled(model, zoo.cross_entropy, 4), model, rows, masks)


def test_noise_and_masks_are_those_of_a_cpu() -> None:
    model, key = build("convolutions"), keys.chosen("device")
    seen: list[tuple[dict[str, Tensor], Masks]] = []
    for device in ("cpu", "cuda"):
        model = model.to(device)
        layers, weights = maskable_layers(model, "weight"), public(participating(model), "initial")
        total = ClippedSum({n: torch.zeros_like(p) for n, p in participating(model).items()}, 1.0)
        for criterion in ("random", "magnitude"):
            masks = select(layers, criterion, 0.4, {}, weights, key, 3)
            released = add_noise(total, 2.0, masks, key, "train", 3)
            seen.append(({n: t.cpu() for n, t in released.tensors.items()}, {n: m.cpu() for n, m in masks.items()}))
    for first, second in zip(seen[:2], seen[2:], strict=True):
        for mine, other in zip(first, second, strict=True):
            assert mine.keys() == other.keys() and all(torch.equal(mine[n], other[n]) for n in mine)


def test_a_run_from_end_to_end_and_taken_up_again(tmp_path: Path) -> None:
    """Steps since the checkpoint are charged again: a GPU's sums are not the same to the bit in another process."""
    run = recipe("smoke")
    run = dataclasses.replace(run, runtime=dataclasses.replace(run.runtime, device="cuda", checkpoint_every=3))
    polls = iter([False] * 4 + [True] * 9)
    with pytest.raises(Stopped):
        train(run, tmp_path / "run", stop=lambda: next(polls))
    result = train(run, tmp_path / "run")
    assert result.summary["accuracy"] is not None and result.summary["private"]
    assert result.summary["epsilon"] <= 3.0
