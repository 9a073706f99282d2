"""Sums of products between an operator's input and its output's gradient: per unit, folded over units, or their lengths only.

`Pair` holds the two for one use of a convolution or linear layer. Which of its ways is fastest depends on the shape; `choice by
measurement` is made elsewhere.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedp.engines.units import Units, channels_last

SCRATCH_BYTES = {"cpu": 2**20}
"""Gradients of a few units are worked on at a time, so that they stay in the processor's cache."""

SCRATCH_BYTES_ELSEWHERE = 2**28
"""A GPU wants many units at once."""


class Pair:
    """Input and output gradient of one use, entries (rows, or several per row) first; channels first after that."""

    def __init__(self, x: Tensor, dy: Tensor, weight_shape: torch.Size, settings: tuple[Any, ...], units: Units) -> None:
        self.x, self.dy, self.weight_shape, self.settings, self.units = x, dy, weight_shape, settings, units
        self.multiple = len(x) // max(units.rows, 1)
        self.shape = weight_shape
        """Of the gradients that come out."""
        self.centre = False
        """Whether each filter's gradient less its mean will do; `one` may then give that, and `centred` says that it does."""

    @property
    def centred(self) -> bool:
        """Whether the unit gradients have mean zero over every filter."""
        return False

    @property
    def scratch_units(self) -> int:
        """How many units are worked on at once."""
        scratch = SCRATCH_BYTES.get(self.dy.device.type, SCRATCH_BYTES_ELSEWHERE)
        return max(1, scratch // max(1, self.unit_bytes))

    @property
    def unit_bytes(self) -> int:
        """About how much memory a unit takes while its gradient is formed."""
        return 4 * math.prod(self.weight_shape)

    def entries(self, rows: slice) -> slice:
        """Where a range of rows lies in input and gradient."""
        return slice(rows.start * self.multiple, rows.stop * self.multiple)

    def row_factors(self, per_unit: Tensor) -> Tensor:
        """A factor per unit as one per entry, in the gradients' type, to multiply `dy` with."""
        factors = self.units.of_rows(per_unit).to(self.dy.dtype)
        factors = factors.repeat_interleave(self.multiple) if self.multiple > 1 else factors
        return factors.reshape(-1, *[1] * (self.dy.ndim - 1))

    def folded(self, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Input, and gradient times factor; entries of units whose factor is zero are zero in both, whatever they hold."""
        rows = self.row_factors(factors)
        if bool((factors > 0).all()):
            return self.x, self.dy * rows
        live = rows > 0
        nothing = torch.zeros((), dtype=self.dy.dtype, device=self.dy.device)
        return torch.where(live.reshape(-1, *[1] * (self.x.ndim - 1)), self.x, nothing), torch.where(
            live, self.dy * rows, nothing
        )

    def unit_gradients(self, first: int, stop: int) -> Tensor:
        """The gradients of units [first, stop)."""
        parts = [self.one(self.entries(rows)) for rows in self.units.spans(first, stop)]
        return parts[0][None] if len(parts) == 1 else torch.stack(parts)

    def mass(self) -> Tensor:
        """Per unit, a bound on the sum of the lengths of all the products that its gradient is the sum of."""
        per_row = [
            self.units.sum(torch.linalg.vector_norm(t.flatten(1), dim=1, dtype=torch.float64).square())
            for t in (self.x, self.dy)
        ]
        return (per_row[0] * per_row[1] * math.prod(self.weight_shape[2:])).sqrt()

    def one(self, entries: slice) -> Tensor:
        """The summed gradient of some entries."""
        raise NotImplementedError

    def sum(self, factors: Tensor) -> Tensor:
        """The sum of all units' gradients times their factors, in one operation."""
        raise NotImplementedError


class ConvolutionPair(Pair):
    """`unfold` multiplies image patches instead of asking for the convolution's own weight gradient; `last` wants channels last."""

    def __init__(
        self, x: Tensor, dy: Tensor, weight_shape: torch.Size, settings: tuple[Any, ...], units: Units, unfold: bool, last: bool
    ) -> None:
        super().__init__(x, dy, weight_shape, settings, units)
        self.unfold, self.last = unfold, last and not unfold
        self.like = torch.empty(weight_shape, dtype=dy.dtype, device=dy.device)
        if channels_last(x) and not unfold:
            self.dy = dy = dy.contiguous(memory_format=torch.channels_last)
            self.like = self.like.contiguous(memory_format=torch.channels_last)
        if unfold:
            self.flat = dy.flatten(2).contiguous()
        self.shape = torch.Size(weight_shape[i] for i in self.order)

    @property
    def order(self) -> tuple[int, ...]:
        """How gradients are laid out: the weight's own order, or channels last."""
        return (0, 2, 3, 1) if self.last else tuple(range(len(self.weight_shape)))

    @property
    def centred(self) -> bool:
        return self.centre and self.unfold

    def one(self, entries: slice) -> Tensor:
        if self.unfold:
            stride, padding, dilation, _ = self.settings
            patches = F.unfold(self.x[entries], self.weight_shape[2:], dilation, padding, stride)
            if self.centre:
                patches -= patches.mean(1, keepdim=True)
            gradients = [matmul_transposed(d, p) for d, p in zip(self.flat[entries], patches, strict=True)]
            return (gradients[0] if len(gradients) == 1 else torch.stack(gradients).sum(0)).reshape(self.shape)
        return self._weight_gradient(self.x[entries], self.dy[entries]).permute(self.order)

    def sum(self, factors: Tensor) -> Tensor:
        x, dy = self.folded(factors)
        return self._weight_gradient(x, dy).permute(self.order)

    def _weight_gradient(self, x: Tensor, dy: Tensor) -> Tensor:
        stride, padding, dilation, groups = self.settings
        gradient: Tensor = torch.ops.aten.convolution_backward(
            dy, x, self.like, None, stride, padding, dilation, False, [0] * len(stride), groups, (False, True, False)
        )[1]
        return gradient

    def squared_lengths(self, scale: Tensor | None) -> Tensor:
        """|g|^2 per unit from Gram matrices over positions; `scale` multiplies output channels first.

        In float64: where positions cancel, little is left of large products.
        """
        dy = self.dy if scale is None else self.dy * scale.reshape(1, -1, *[1] * (self.dy.ndim - 2))
        d = _positions_last(dy, self.units.count).double()
        gram = torch.bmm(d.transpose(1, 2), d)
        return (gram * self._patch_gram()).flatten(1).sum(1)

    def _patch_gram(self) -> Tensor:
        stride, padding, dilation, _ = self.settings
        units = self.units.count
        if set(stride) != {1}:
            patches = F.unfold(self.x, self.weight_shape[2:], dilation, padding, stride)
            p = _positions_last(patches, units).double()
            return torch.bmm(p.transpose(1, 2), p)
        x = F.pad(self.x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else self.x
        rows, (height, width) = len(x) // units, x.shape[2:]
        p = _positions_last(x, units).double()
        gram = torch.bmm(p.transpose(1, 2), p).reshape(units, rows, height, width, rows, height, width)
        high, wide = self.dy.shape[2:]
        total: Tensor | None = None
        for a in range(0, self.weight_shape[2] * dilation[0], dilation[0]):
            for b in range(0, self.weight_shape[3] * dilation[1], dilation[1]):
                shifted = gram[:, :, a : a + high, b : b + wide, :, a : a + high, b : b + wide]
                total = shifted.clone(memory_format=torch.contiguous_format) if total is None else total.add_(shifted)
        assert total is not None
        return total.reshape(units, rows * high * wide, -1)

    def filter_sums(self) -> Tensor:
        """<g, 1> for every unit and output channel, without g."""
        stride, padding, dilation, _ = self.settings
        ones = self.x.new_ones((1, 1, *self.weight_shape[2:]))
        box = F.conv2d(self.x.sum(1, keepdim=True), ones, None, stride, padding, dilation)
        return self.units.sum(position_sums(self.dy * box))


class BatchedPair(ConvolutionPair):
    """The gradients of many units in one product of their patches, for devices that loops over units would starve."""

    @property
    def unit_bytes(self) -> int:
        positions = self.dy[0, 0].numel() * -(-len(self.dy) // max(self.units.count, 1))
        return super().unit_bytes + 4 * positions * math.prod(self.weight_shape[1:])

    @property
    def centred(self) -> bool:
        return False

    def unit_gradients(self, first: int, stop: int) -> Tensor:
        entries = self.entries(self.units.rows_of(first, stop))
        patches, flat = self._patches(self.x[entries]), self.dy[entries].flatten(2)
        if self.units.each is not None:
            patches, flat = (_positions_last(t, stop - first) for t in (patches, flat))
            return torch.bmm(flat, patches.transpose(1, 2)).reshape(-1, *self.shape)
        return self.units.sum_of(torch.bmm(flat, patches.transpose(1, 2)), first, stop).reshape(-1, *self.shape)

    def _patches(self, x: Tensor) -> Tensor:
        """[entries, in x kernel, positions] by one copy out of a view."""
        stride, padding, dilation, _ = self.settings
        x = F.pad(x, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else x
        (rows, channels), (high, wide) = x.shape[:2], self.dy.shape[2:]
        kernel, (row, channel, down, right) = self.weight_shape[2:], x.stride()
        view = x.as_strided(
            (rows, channels, *kernel, high, wide),
            (row, channel, dilation[0] * down, dilation[1] * right, stride[0] * down, stride[1] * right),
        )
        return view.reshape(rows, -1, high * wide)


class GroupedPair(ConvolutionPair):
    """The gradients of many units as the weight gradient of one convolution in which every entry is a group of its own."""

    @property
    def unit_bytes(self) -> int:
        return super().unit_bytes * -(-len(self.dy) // max(self.units.count, 1))

    def unit_gradients(self, first: int, stop: int) -> Tensor:
        entries = self.entries(self.units.rows_of(first, stop))
        x, dy = self.x[entries], self.dy[entries]
        count, (stride, padding, dilation, groups) = len(x), self.settings
        like = torch.empty((count * len(self.like), *self.like.shape[1:]), dtype=dy.dtype, device=dy.device)
        gradient: Tensor = torch.ops.aten.convolution_backward(
            dy.flatten(0, 1)[None], x.flatten(0, 1)[None], like, None, stride, padding, dilation, False, [0] * len(stride),
            count * groups, (False, True, False),
        )[1]  # fmt: skip
        return self.units.sum_of(gradient.reshape(count, *self.shape), first, stop)


class LinearPair(Pair):
    """Input [entries, positions, in] and gradient [entries, positions, out] of a linear layer."""

    def one(self, entries: slice) -> Tensor:
        return self.dy[entries].flatten(0, 1).t() @ self.x[entries].flatten(0, 1)

    def unit_gradients(self, first: int, stop: int) -> Tensor:
        if self.units.each is None:
            return super().unit_gradients(first, stop)
        x, dy = (self._by_unit(t)[first:stop] for t in (self.x, self.dy))
        return torch.bmm(dy.transpose(1, 2), x)

    def sum(self, factors: Tensor) -> Tensor:
        x, dy = self.folded(factors)
        return dy.flatten(0, 1).t() @ x.flatten(0, 1)

    def squared_lengths(self, scale: Tensor | None) -> Tensor:
        """|g|^2 per unit from Gram matrices over positions; units must have equally many rows."""
        x, dy = self._by_unit(self.x).double(), self._by_unit(self.dy if scale is None else self.dy * scale).double()
        return (torch.bmm(x, x.transpose(1, 2)) * torch.bmm(dy, dy.transpose(1, 2))).flatten(1).sum(1)

    def masked_outer_squares(self, mask: Tensor | None) -> Tensor:
        """|g|^2 over the mask's coordinates, where every unit has one position: (dy^2)' M (x^2)."""
        x, dy = self.x.flatten(0, 1).double().square(), self.dy.flatten(0, 1).double().square()
        if mask is None:
            return x.sum(1) * dy.sum(1)
        if mask.ndim == 1:
            return x.sum(1) * (dy @ mask.double())
        return ((dy @ mask.double()) * x).sum(1)

    def _by_unit(self, t: Tensor) -> Tensor:
        return t.reshape(self.units.count, -1, t.shape[-1])


def position_sums(t: Tensor) -> Tensor:
    """The sum over everything after rows and channels."""
    return t if t.ndim == 2 else t.sum(tuple(range(2, t.ndim)))


def matmul_transposed(a: Tensor, b: Tensor) -> Tensor:
    """a @ b.T. On a CPU oneDNN's product is about twice as fast as the default one, where this build of torch offers it."""
    if a.dtype == torch.float32 and a.device.type == "cpu" and _onednn is not None:
        product: Tensor = _onednn(a, b, None, "none", [], "")
        return product
    return a @ b.t()


def _find_onednn() -> Any:
    """torch's oneDNN product of plain tensors, if it is there and right."""
    try:
        operator = torch.ops.mkldnn._linear_pointwise
        a, b = torch.arange(6.0).reshape(2, 3), torch.arange(12.0).reshape(4, 3)
        return operator if torch.allclose(operator(a, b, None, "none", [], ""), a @ b.t()) else None
    except (AttributeError, RuntimeError, NotImplementedError):
        return None


_onednn = _find_onednn()


def _positions_last(t: Tensor, units: int) -> Tensor:
    """[rows, channels, ...] as [units, channels, rows * positions]."""
    flat = t.flatten(2)
    return flat.unflatten(0, (units, -1)).transpose(1, 2).flatten(2) if len(flat) != units else flat
