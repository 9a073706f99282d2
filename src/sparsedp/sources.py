"""How a private step reads its rows: from tensors, from a map-style data set, or from anything with these few methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from sparsedp.data.values import UnitIndex
from sparsedp.dp.clipping import Loss, Rows, row_losses
from sparsedp.engines.made_up import made_up_rows
from sparsedp.errors import UsageError, require


class Source(Protocol):
    """Private rows, found by unit."""

    num_units: int

    def example(self) -> Rows:
        """A few rows of the shapes and types that `read` gives, for the self-check, which makes up its own values: of the content
        only the largest integers are used (how many classes or tokens there are, which is public)."""
        ...

    def read(self, units: Tensor, step: int) -> Rows:
        """The rows of these units at this step (augmentations may differ from step to step)."""
        ...

    def rows_of(self, units: Tensor) -> Tensor:
        """How many rows each of these units has."""
        ...


Collate = Callable[[list[Any]], tuple[Any, Any]]


class TensorSource:
    """Tensors that fit in memory; `units` numbers the privacy unit of each row, one row each by default."""

    def __init__(self, inputs: Any, targets: Any, units: Tensor | None = None) -> None:
        leaves = [leaf for leaf in tree_leaves((inputs, targets)) if isinstance(leaf, Tensor)]
        sizes = {len(leaf) if leaf.ndim else 0 for leaf in leaves}
        require(
            len(sizes) == 1, "the numbers of rows", sorted(sizes), "inputs and targets have as many", "check what was passed"
        )
        self._inputs, self._targets = inputs, targets
        self._index = _index(sizes.pop(), units)
        self.num_units = self._index.count

    def example(self) -> Rows:
        first = tree_map_only(Tensor, lambda t: t[:1], self._inputs)
        return as_many(Rows.make(first, _highest(self._targets)), self._index)

    def extremes(self) -> Any:
        """Two made-up rows of targets: the lowest and the highest integers."""
        return tree_map_only(Tensor, _ends, self._targets)

    def rows_of(self, units: Tensor) -> Tensor:
        return self._index.starts.diff()[units]

    def read(self, units: Tensor, step: int) -> Rows:
        places, unit = self._index.rows_of(units)
        inputs, targets = tree_map_only(Tensor, lambda t: t[places.to(t.device)], (self._inputs, self._targets))
        return Rows(inputs, targets, unit, len(units))


class DatasetSource:
    """A map-style data set of (input, target) pairs, read and collated a micro-batch at a time."""

    def __init__(self, dataset: Any, units: Tensor | None = None, collate: Collate | None = None) -> None:
        self._dataset, self._collate = dataset, collate or torch.utils.data.default_collate
        self._index = _index(len(dataset), units)
        self.num_units = self._index.count

    def example(self) -> Rows:
        return as_many(Rows.make(*self._first), self._index)

    @cached_property
    def _first(self) -> tuple[Any, Any]:
        """The first row, which shows what a row is like."""
        try:
            inputs, targets = self._collate([self._dataset[0]])
        except Exception as error:  # noqa: BLE001 - what a data set raises may hold data
            raise UsageError(
                f"The first row of the data set cannot be read and collated ({type(error).__name__}); mend or remove it."
            ) from None
        return inputs, targets

    def rows_of(self, units: Tensor) -> Tensor:
        return self._index.starts.diff()[units]

    def read(self, units: Tensor, step: int) -> Rows:
        """A record that cannot be read, or is not like the first one, counts as zero, in silence: its unit is left out of the rows."""
        places, unit = self._index.rows_of(units)
        items = [self._item(int(place)) for place in places]
        broken = {int(u) for u, item in zip(unit, items, strict=True) if item is None}
        whole = [(item, int(u)) for item, u in zip(items, unit, strict=True) if int(u) not in broken]
        if not whole:
            return Rows(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.int64), 0)
        inputs, targets = self._collate([item for item, _ in whole])
        numbers = torch.tensor([u for _, u in whole]).unique(return_inverse=True)[1]
        return Rows(inputs, targets, numbers, len(units) - len(broken))

    def _item(self, place: int) -> Any:
        try:
            item = self._dataset[place]
            alone = self._collate([item])
        except Exception:  # noqa: BLE001 - whatever a user's data set raises, the run must not depend on one record
            return None
        return item if self._kind(alone) == self._kind(self._first) else None

    def _kind(self, row: tuple[Any, Any]) -> tuple[Any, ...]:
        """What rows must share to be collated without changing each other: types, and shapes unless a collate of one's own pads."""
        leaves, nesting = tree_flatten(tuple(row))
        shapes = self._collate is torch.utils.data.default_collate
        return (nesting, *((t.dtype, t.shape if shapes else t.ndim) if isinstance(t, Tensor) else type(t) for t in leaves))


def _index(rows: int, units: Tensor | None) -> UnitIndex:
    numbers = torch.arange(rows) if units is None else torch.as_tensor(units).to(torch.int64).cpu()
    require(
        numbers.shape == (rows,),
        "the shape of the unit numbers",
        tuple(numbers.shape),
        f"there are {rows} rows",
        "give one per row",
    )
    require(rows > 0, "the number of rows", rows, "there must be at least one", "check the data set")
    require(int(numbers.min()) >= 0, "the lowest unit number", int(numbers.min()), "units are numbered from 0", "renumber them")
    index = UnitIndex.of(numbers)
    empty = int((index.starts.diff() == 0).sum())
    require(empty == 0, "the number of units without rows", empty, "units are numbered without gaps",
            "renumber them, for instance with torch.unique(..., return_inverse=True)")  # fmt: skip
    return index


def as_many(first: Rows, index: UnitIndex | None) -> Rows:
    """The example of one row, as two units: of unequal size where units have several rows, so that a check sees that too."""
    sizes = torch.tensor([1, 1 if index is None or int(index.starts.diff().max()) == 1 else 2])
    repeats = int(sizes.sum())
    inputs, targets = tree_map_only(Tensor, lambda t: t.repeat_interleave(repeats, 0), (first.inputs, first.targets))
    unit = torch.arange(2).repeat_interleave(sizes * (len(first.unit)))
    return Rows(inputs, targets, unit, 2)


def parts(source: Source, units: Tensor, step: int, most_rows: int) -> Iterator[Rows]:
    """The rows of a batch, in parts of whole units with at most `most_rows` rows (more only where one unit has more)."""
    if len(units) == 0:
        return
    ends = source.rows_of(units).cumsum(0)
    start = 0
    while start < len(units):
        before = int(ends[start - 1]) if start else 0
        stop = max(int(torch.searchsorted(ends, before + most_rows, right=True)), start + 1)
        rows = source.read(units[start:stop], step)
        if rows.units:
            yield rows
        start = stop


def as_source(data: Any, units: Tensor | None = None, collate: Collate | None = None) -> Source:
    """A source from what users have: a pair of tensors, a map-style data set, or a source already."""
    if all(hasattr(data, name) for name in ("num_units", "example", "read", "rows_of")):
        return data  # type: ignore[no-any-return]
    if isinstance(data, torch.utils.data.TensorDataset) and len(data.tensors) == 2:
        return TensorSource(*data.tensors, units=units)
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(t, Tensor | dict | tuple) for t in data):
        return TensorSource(*data, units=units)
    if isinstance(data, torch.utils.data.DataLoader):
        raise UsageError(
            "data is a DataLoader, which shuffles into fixed batches, but the guarantee needs every unit to join by its own "
            "coin; pass the data set itself (loader.dataset)."
        )
    if hasattr(data, "__getitem__") and isinstance(data, Sequence | torch.utils.data.Dataset) and hasattr(data, "__len__"):
        return DatasetSource(data, units, collate)
    raise UsageError(
        f"data is a {type(data).__name__}, but a private step reads rows by number; pass a pair of tensors or a map-style data set."
    )


def check_labels(model: nn.Module, loss: Loss, source: Source) -> None:
    """Raise if the loss refuses the lowest or the highest label, and not a label of zero; tried on made-up inputs."""
    if not isinstance(source, TensorSource):
        return
    rows = made_up_rows(Rows.make(source.example().part(0, 1)[0], None), 2)
    limits, zero = source.extremes(), tree_map_only(Tensor, torch.zeros_like, source.extremes())
    refused = _refusal(model, loss, rows.inputs, limits)
    if refused is not None and _refusal(model, loss, rows.inputs, zero) is None:
        raise UsageError(
            f"labels go from {_said(limits, 0)} to {_said(limits, 1)}, but the loss does not take them ({refused}); classes are numbered "
            "from 0 to one less than the model has outputs."
        )


def _refusal(model: nn.Module, loss: Loss, inputs: Any, targets: Any) -> str | None:
    try:
        with torch.no_grad():
            row_losses(model, loss, inputs, targets)
    except UsageError:
        return None
    except (IndexError, RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return None


def _said(limits: Any, row: int) -> str:
    return ", ".join(str(leaf[row].tolist()) for leaf in tree_leaves(limits) if isinstance(leaf, Tensor))


def _highest(targets: Any) -> Any:
    """One made-up target row with the types of the real ones; integers show the highest class, which is public."""
    return tree_map_only(Tensor, lambda t: t[:1] if t.is_floating_point() else torch.full_like(t[:1], int(t.max())), targets)


def _ends(targets: Tensor) -> Tensor:
    if targets.is_floating_point():
        return targets[:1].repeat_interleave(2, 0)
    return torch.stack([torch.full_like(targets[0], int(targets.min())), torch.full_like(targets[0], int(targets.max()))])
