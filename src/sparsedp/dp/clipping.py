"""From a batch to a clipped sum: the interface that every engine serves, and the obvious engine that judges them.

A privacy unit is an example, or all rows that carry one unit number: the K augmented views of an image, or all images of
a patient. The rows of a unit are averaged, the average gradient is restricted to the selected coordinates, and then
clipped over exactly those. A unit whose loss or selected gradient is not finite counts as zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from sparsedp.dp.masks import Masks, expand, participating, restrict
from sparsedp.dp.values import ClippedSum
from sparsedp.errors import UsageError, out_of_memory, require

P = ParamSpec("P")
Loss = Callable[[Any, Any], Tensor]
"""(what the model returns, targets) -> one loss per row."""


@dataclass(frozen=True, eq=False, repr=False)
class Rows:
    """Part of a batch. `inputs` and `targets` are tensors, or tuples or dicts of tensors, whose first dimension is the rows.

    `unit` numbers each row's unit from 0, ascending; every unit below `units` has at least one row.
    """

    inputs: Any
    targets: Any
    unit: Tensor
    units: int

    @staticmethod
    def make(inputs: Any, targets: Any, unit: Tensor | None = None, views: int = 1) -> Rows:
        """Rows of one unit each, of `views` consecutive rows each, or with the given ascending unit numbers."""
        count = len(next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)))
        unit = torch.arange(count) // views if unit is None else unit.cpu()
        return Rows(inputs, targets, unit, int(unit[-1]) + 1 if count else 0)

    @property
    def counts(self) -> Tensor:
        """How many rows each unit has."""
        return torch.bincount(self.unit, minlength=self.units)

    def part(self, start: int, stop: int) -> tuple[Any, Any]:
        """Inputs and targets of rows [start, stop)."""
        return tree_map_only(Tensor, lambda t: t[start:stop], (self.inputs, self.targets))  # type: ignore[no-any-return]

    def of_each_unit(self) -> Iterator[tuple[Any, Any]]:
        """Inputs and targets of one unit after the other."""
        start = 0
        for count in self.counts.tolist():
            yield self.part(start, start + count)
            start += count


class Engine(Protocol):
    """A way to compute the sum, over the units of `rows`, of their clipped gradients on the masks' coordinates.

    Returns float32 or wider tensors for exactly the parameters of `participating(model)`, zero off the masks.
    """

    def __call__(self, model: nn.Module, loss: Loss, rows: Rows, masks: Masks, clip: float) -> dict[str, Tensor]: ...


def clipped_sum(engine: Engine, model: nn.Module, loss: Loss, batch: Iterable[Rows], masks: Masks, clip: float) -> ClippedSum:
    """The sum over all units of all parts of a batch. Units must not be split over parts.

    Guarantee: the result does not depend on how the batch is cut into parts, to float tolerance.
    Guarantee: adding a unit to the batch, or taking one away, moves the result by at most `clip` in L2.
    """
    require(clip > 0, "clip", clip, "the clipping norm must be above zero", "1.0 is usual")
    total = {name: torch.zeros_like(p, dtype=wide(p.dtype)) for name, p in participating(model).items()}
    for rows in batch:
        for name, tensor in engine(model, loss, rows, masks, clip).items():
            total[name] += tensor
    return ClippedSum(total, sensitivity=clip)


def reference(model: nn.Module, loss: Loss, rows: Rows, masks: Masks, clip: float) -> dict[str, Tensor]:
    """One unit at a time by plain autograd: right for any model, and what every other engine is compared with."""
    trained = participating(model)
    total = {name: torch.zeros_like(p, dtype=wide(p.dtype)) for name, p in trained.items()}
    for inputs, targets in rows.of_each_unit():
        losses = row_losses(model, loss, inputs, targets)
        gradients = torch.autograd.grad(losses.mean(), list(trained.values()), allow_unused=True, materialize_grads=True)
        own = restrict({n: g.to(wide(g.dtype)) for n, g in zip(trained, gradients, strict=True)}, masks)
        factor = clip_factor(own, clip) if bool(losses.isfinite().all()) else torch.tensor(0.0)
        if factor > 0:
            for name, tensor in own.items():
                total[name] += tensor * factor.to(tensor.device)
    return total


def clip_factor(gradient: dict[str, Tensor], clip: float) -> Tensor:
    """min(1, clip / norm) in float64; zero when the gradient is not finite."""
    squares = [t.double().pow(2).sum().cpu() for t in gradient.values()]
    return factor_of(torch.stack(squares).sum(), clip)


def factor_of(squared_norm: Tensor, clip: float) -> Tensor:
    """The clip factor that belongs to float64 squared norms, of one unit or of many; zero where they are not finite.

    Also zero for a norm so large that float32 could hold the factor only as a subnormal number, rounded upwards past `clip`.
    """
    factor = (clip / squared_norm.sqrt().clamp_min(torch.finfo(torch.float64).tiny)).clamp_max(1.0)
    exact_enough = squared_norm.isfinite() & (factor >= torch.finfo(torch.float32).tiny)
    return torch.where(exact_enough, factor, torch.zeros_like(factor))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which gradients are clipped and summed: float32, or float64 for a float64 model."""
    return torch.promote_types(dtype, torch.float32)


def call(model: nn.Module, inputs: Any) -> Any:
    """The model on its inputs: a tuple is its positional arguments, a dict its keywords, anything else its one argument."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def row_losses(model: nn.Module, loss: Loss, inputs: Any, targets: Any) -> Tensor:
    """The loss of every row, checked to be one number a row."""
    losses = loss(call(model, inputs), targets)
    rows = len(next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)))
    if not isinstance(losses, Tensor) or losses.shape != (rows,):
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise UsageError(
            f"loss returned {shape} for {rows} rows, but it must return one number per row, shape ({rows},); "
            "use reduction='none' and average over everything but the first dimension."
        )
    return losses


def clipped_sum_on_grid(
    model: nn.Module, loss: Loss, batch: Iterable[Rows], masks: Masks, clip: float, grid: float
) -> ClippedSum:
    """The same sum in whole multiples of `grid`, one unit at a time, in integers: equal to the bit in any order.

    Each unit is clipped a little further so that, rounded to the grid, its norm still is at most `clip`; that is checked in
    integer arithmetic, and a unit that fails (it cannot, up to the rounding of a float64 product) counts as zero. So does one that
    makes the model or the loss raise.
    """
    total = {name: torch.zeros_like(p, dtype=torch.int64) for name, p in participating(model).items()}
    for rows in batch:
        for inputs, targets in rows.of_each_unit():
            unit = one_unit(inputs, targets)
            for name, tensor in unless_it_raises(_one_on_grid, model, loss, unit, masks, clip, grid).items():
                total[name] += tensor
    return ClippedSum(total, sensitivity=clip, grid=grid)


def one_unit(inputs: Any, targets: Any) -> Rows:
    """The rows of one unit."""
    count = len(next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)))
    return Rows(inputs, targets, torch.zeros(count, dtype=torch.int64), 1)


def unless_it_raises(compute: Callable[P, dict[str, Tensor]], *given: P.args, **named: P.kwargs) -> dict[str, Tensor]:
    """What one unit adds; nothing where it makes the model or the loss raise: whether a run ends must not depend on one record."""
    try:
        return compute(*given, **named)
    except Exception as error:
        if out_of_memory(error):
            raise
        return {}


def _one_on_grid(model: nn.Module, loss: Loss, unit: Rows, masks: Masks, clip: float, grid: float) -> dict[str, Tensor]:
    own = reference(model, loss, unit, masks, clip)
    room = clip - grid * math.sqrt(selected(own, masks)) / 2
    norm = math.sqrt(sum(float(t.double().pow(2).sum()) for t in own.values()))
    factor = min(1.0, room / norm) if norm > 0 else 1.0
    whole = {name: (t.double() * (factor / grid)).round().to(torch.int64) for name, t in own.items()}
    if sum(int(t.pow(2).sum()) for t in whole.values()) > math.floor((clip / grid) ** 2):
        return {name: torch.zeros_like(t) for name, t in whole.items()}
    return whole


def selected(tensors: Mapping[str, Tensor], masks: Masks) -> int:
    """How many coordinates take part."""
    return sum(int(expand(masks[n], t.shape).expand_as(t).sum()) if n in masks else t.numel() for n, t in tensors.items())
