"""Rows of random values that look like the data: the same structure, shapes and types, and none of its content."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from sparsedp.dp.clipping import Rows


def made_up_rows(like: Rows, units: int, seed: int = 0) -> Rows:
    """`units` units with as many rows each as the first units of `like`, in turn.

    Floating-point inputs are normal; floating-point targets are uniform in [0, 1]; integers are uniform up to the largest
    one in `like`, which should therefore hold a token or class of the highest number.
    """
    counts = like.counts[:units] if like.units else torch.ones(1, dtype=torch.int64)
    counts = counts.repeat(-(-units // len(counts)))[:units]
    unit = torch.arange(units).repeat_interleave(counts)
    generator = torch.Generator().manual_seed(seed)

    def inputs(t: Tensor) -> Tensor:
        return _values(t, len(unit), generator, uniform=False)

    def targets(t: Tensor) -> Tensor:
        return _values(t, len(unit), generator, uniform=True)

    both: tuple[Any, Any] = (tree_map_only(Tensor, inputs, like.inputs), tree_map_only(Tensor, targets, like.targets))
    return Rows(both[0], both[1], unit, units)


def _values(like: Tensor, rows: int, generator: torch.Generator, uniform: bool) -> Tensor:
    shape = (rows, *like.shape[1:])
    if like.is_floating_point() or like.is_complex():
        draw = torch.rand if uniform else torch.randn
        values = draw(shape, generator=generator, dtype=torch.promote_types(like.dtype, torch.float32))
    else:
        top = int(like.max()) + 1 if like.numel() else 1
        values = torch.randint(0, max(top, 1), shape, generator=generator)
    values = values.to(like.dtype).to(like.device)
    if like.ndim == 4 and like.is_contiguous(memory_format=torch.channels_last):
        values = values.contiguous(memory_format=torch.channels_last)
    return values
