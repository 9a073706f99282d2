"""One unit's clipped gradient is at most as long as the clipping norm, where rounding is at its worst."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from sparsedp.dp.clipping import Engine, Rows, reference
from sparsedp.engines import choose_engine
from sparsedp.engines.fast import Fast
from sparsedp.engines.functional import functional
from sparsedp.engines.precision import made_in_full
from sparsedp.engines.self_check import made_up_masks
from sparsedp.engines.structure import find_structure
from sparsedp.models.layers import WSConv2d

CLIP = 1.0


def length(tensors: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))


def summed(output: Tensor, targets: Tensor) -> Tensor:
    return (output.flatten(1) * targets.flatten(1)).sum(1)


def fast_by(model: nn.Module, rows: Rows, method: str) -> Engine:
    chosen = choose_engine("fast", model, summed, rows, clip=CLIP)
    engine = chosen.engine
    assert isinstance(engine, Fast)
    return Fast(engine.structure, dict.fromkeys(engine.methods, method))


@pytest.mark.parametrize("method", ["gram:fold", "direct:fold", "direct:keep"])
@pytest.mark.parametrize("size", [1.0, 1e2, 1e4, 1e6])
def test_positions_that_cancel_do_not_lengthen_a_unit(method: str, size: float) -> None:
    """Guarantee: adding a unit to the batch moves the result by at most `clip` in L2, rounding included."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(64, 32, bias=False)
    v, d = (torch.randn(1, 64, generator=generator) for _ in range(2))
    inputs = torch.stack([size * v, -size * v + d], dim=1)
    targets = torch.randn(1, 1, 32, generator=generator).repeat(1, 2, 1)
    engine = fast_by(model, Rows.make(inputs, targets), method)
    ours = engine(model, summed, Rows.make(inputs, targets), {}, CLIP)
    assert length(ours) <= CLIP * (1 + 1e-6)
    assert length(ours) > 0.5 * CLIP or size > 1e5, "and is not thrown away where there is no need"


@pytest.mark.parametrize("features", [20_000, 150_528])
def test_long_rows_are_measured_in_float64(features: int) -> None:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(features, 2)
    rows = Rows.make(torch.rand(2, features, generator=generator), torch.ones(2, 2), views=2)
    ours = choose_engine("fast", model, summed, rows, clip=CLIP)(model, summed, rows, {}, CLIP)
    assert 1 - 1e-4 < length(ours) / CLIP <= 1 + 1e-6


@pytest.mark.parametrize("size", [3.0, 300.0])
@pytest.mark.parametrize("name", ["fast", "functional", "reference"])
def test_under_autocast_norms_and_sums_keep_their_precision(name: str, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    loss = nn.CrossEntropyLoss(reduction="none")
    x, y = size * torch.randn(9, 3, 8, 8, generator=generator), torch.randint(0, 4, (9,), generator=generator)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        engine: Engine = {"functional": functional, "reference": reference}.get(name) or choose_engine(
            name, model, loss, Rows.make(x, y), clip=CLIP
        )
        for unit in range(9):
            one = engine(model, loss, Rows.make(x[unit : unit + 1], y[unit : unit + 1]), {}, CLIP)
            assert length(one) <= CLIP * (1 + 1e-6)
        more, fewer = (engine(model, loss, Rows.make(x[:n], y[:n]), {}, 0.1) for n in (9, 8))
    moved = length({n: more[n] - fewer[n] for n in more})
    assert moved <= 0.1 * (1 + 1e-4), "the difference of two sums of nine"


def standardised(seed: int) -> nn.Module:
    """Filters of few entries, some of them small, so that a direction of few bits is far from unit length."""
    torch.manual_seed(seed)
    kernel = 1 + seed % 3
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
    model = nn.Sequential(WSConv2d(2, 4, kernel), nn.ReLU(), WSConv2d(4, 6, kernel), nn.ReLU(), head)
    for layer in model:
        if isinstance(layer, WSConv2d):
            layer.weight.data.mul_((1.0, 0.3, 0.1, 0.03)[seed % 4])
    return model


@pytest.mark.parametrize("method", ["gram:fold", "direct:fold", "direct:keep", "unfold:keep"])
@pytest.mark.parametrize("masked", ["none", "weight", "filter"])
@pytest.mark.parametrize("kind", ["autocast", "bfloat16", "float16"])
def test_standardised_filters_of_few_bits_do_not_lengthen_a_unit(kind: str, masked: str, method: str) -> None:
    """Guarantee: adding a unit to the batch moves the result by at most `clip` in L2, rounding included."""
    loss, clip, lengths = nn.CrossEntropyLoss(reduction="none"), 1e-3, []
    dtype = torch.float32 if kind == "autocast" else getattr(torch, kind)
    for seed in range(12):
        model = standardised(seed).to(dtype)
        x, y = torch.randn(8, 2, 8, 8).to(dtype), torch.randint(0, 3, (8,))
        masks = {} if masked == "none" else made_up_masks(model, masked)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
            structure = find_structure(model, loss, Rows.make(x[:2], y[:2]))
            engine = Fast(structure, {key + place: method for key in structure.slots for place in ("", "@weight", "@filter")})
            for unit in range(8):
                one = engine(model, loss, Rows.make(x[unit : unit + 1], y[unit : unit + 1]), masks, clip)
                lengths.append(length(one) / clip)
    assert max(lengths) <= 1 + 1e-6
    assert max(lengths) > 1 - 1e-5, "and is as long as it may be"


def test_outputs_of_shortened_products_are_told() -> None:
    x, w = torch.randn(1, 2, 4, 4), torch.randn(2, 2, 1, 1)
    assert made_in_full(torch.conv2d(x, w)) and made_in_full(torch.conv2d(x.double(), w.double()))
    assert not made_in_full(torch.conv2d(x.bfloat16(), w.bfloat16()))
    if hasattr(torch.backends.mkldnn, "conv"):
        before = torch.backends.mkldnn.conv.fp32_precision
        try:
            torch.backends.mkldnn.conv.fp32_precision = "bf16"
            assert not made_in_full(torch.conv2d(x, w))
        finally:
            torch.backends.mkldnn.conv.fp32_precision = before
