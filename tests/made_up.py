"""Small models and batches for property tests, each a function of a seed, and strategies that draw them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from sparsedp.dp.clipping import Rows
from sparsedp.dp.masks import Masks, kept_count, maskable_layers
from sparsedp.dp.randomness import Key

CLASSES = 3
SHAPE = (2, 5, 5)
KEY = Key(b"a key for tests, never for a run" + os.environ.get("SPARSEDP_TEST_KEY", "").encode(), given=True)
"""The same in every test run; `python -m tests.mutants --repeats` draws others."""
OTHER_KEY = Key(b"and another one, just as useless", given=True)


def cross_entropy(logits: Any, labels: Any) -> Tensor:
    """One loss per row."""
    return F.cross_entropy(logits, labels, reduction="none")


class Standardised(nn.Conv2d):
    """A convolution whose weight is standardised, with a gain: parameters that meet only inside the forward pass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.ones(self.out_channels))

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.flatten(1)
        flat = (flat - flat.mean(1, keepdim=True)) / (flat.var(1, keepdim=True, unbiased=False) + 1e-4).sqrt()
        return F.conv2d(x, (flat * self.gain[:, None]).reshape(self.weight.shape), self.bias, self.stride, self.padding)


class Oddities(nn.Module):
    """A bare parameter, a weight used twice, a frozen layer, and a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(50, 6)
        self.twice = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(()))
        self.last = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x.flatten(1)))
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        return self.last(self.scale * torch.relu_(self.frozen(x) + x))


def build(family: str, seed: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model of one of FAMILIES, its weights drawn from `seed`."""
    model = FAMILIES[family]()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn / max(1, parameter[0].numel() if parameter.ndim > 1 else 2) ** 0.5)
    return model.to(dtype)


FAMILIES = {
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(50, CLASSES)),
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(50, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, CLASSES)),
    "conv": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 3, 2, stride=2, bias=False),
        nn.Flatten(), nn.Linear(3, CLASSES),
    ),
    "standardised": lambda: nn.Sequential(Standardised(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, CLASSES)),
    "oddities": Oddities,
}  # fmt: skip


@dataclass(frozen=True)
class World:
    """A model, a data set of units with their rows, and the settings of one clipped sum."""

    model: nn.Module
    units: tuple[tuple[tuple[Tensor, Tensor], ...], ...]
    masks: Masks
    clip: float

    def rows(self, chosen: Sequence[int] | None = None) -> Rows:
        """The rows of some units, of all when left out."""
        return as_rows([self.units[i] for i in (range(len(self.units)) if chosen is None else chosen)], self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def with_unit(self, index: int, unit: tuple[tuple[Tensor, Tensor], ...]) -> World:
        """A neighbour: one unit's rows are others."""
        return replace(self, units=(*self.units[:index], unit, *self.units[index + 1 :]))


def as_rows(units: Sequence[Sequence[tuple[Tensor, Tensor]]], dtype: torch.dtype) -> Rows:
    """Units of (input, target) rows as one batch."""
    pairs = [pair for unit in units for pair in unit]
    if not pairs:
        return Rows.make(torch.zeros(0, *SHAPE, dtype=dtype), torch.zeros(0, dtype=torch.int64))
    numbers = torch.tensor([i for i, unit in enumerate(filter(None, units)) for _ in unit])  # every number has a row
    return Rows.make(torch.stack([x for x, _ in pairs]).to(dtype), torch.stack([y for _, y in pairs]), numbers)


BAD_VALUES = (float("nan"), float("inf"), float("-inf"), 1e30, -3e38, 0.0)


def unit_of(seed: int, rows: int, size: float = 1.0, bad: float | None = None) -> tuple[tuple[Tensor, Tensor], ...]:
    """A unit of `rows` rows with inputs of about `size`; `bad` is written over one pixel of its last row."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(rows):
        x = size * torch.randn(SHAPE, generator=generator, dtype=torch.float64)
        made.append([x, torch.randint(CLASSES, (), generator=generator)])
    if bad is not None:
        made[-1][0][0, 0, 0] = bad
        made[-1][0][1, 2, 2] = bad
    return tuple((x, y) for x, y in made)


def random_masks(model: nn.Module, granularity: str, rate: float, seed: int) -> dict[str, Tensor]:
    """Masks of exact counts on every maskable layer."""
    generator = torch.Generator().manual_seed(seed)
    masks = {}
    for layer in maskable_layers(model, granularity):
        shape = layer.shape[:1] if layer.by_filter else layer.shape
        count = torch.Size(shape).numel()
        flat = torch.zeros(count, dtype=torch.bool)
        flat[torch.randperm(count, generator=generator)[: kept_count(count, rate)]] = True
        masks[layer.name] = flat.reshape(shape)
    return masks


@st.composite
def worlds(draw: st.DrawFn, bad: bool = False, dtypes: tuple[torch.dtype, ...] = (torch.float64,)) -> World:
    """Random models, masks of both granularities, units of unequal numbers of rows and sizes, clipping norms over six decades."""
    seed = draw(st.integers(0, 2**31))
    model = build(draw(st.sampled_from(sorted(FAMILIES))), seed, draw(st.sampled_from(dtypes)))
    granularity, rate = draw(st.sampled_from(("weight", "filter"))), draw(st.sampled_from((0.0, 0.3, 0.9, 0.999)))
    masks = random_masks(model, granularity, rate, seed + 1) if rate else {}
    rows = draw(st.lists(st.integers(1, 4), min_size=0 if not bad else 1, max_size=6))
    sizes = st.sampled_from((0.0, 1e-3, 1.0, 30.0))
    values = st.sampled_from((None, *BAD_VALUES)) if bad else st.none()
    units = tuple(unit_of(seed + 10 + i, n, draw(sizes), draw(values)) for i, n in enumerate(rows))
    return World(model, units, masks, draw(st.sampled_from((1e-3, 0.1, 1.0, 7.5, 1e3))))
