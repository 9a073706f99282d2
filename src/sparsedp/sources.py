"""How a private step reads its rows: from tensors, from a map-style data set, or from anything with these few methods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from sparsedp.data.values import UnitIndex
from sparsedp.dp.clipping import Loss, Rows, row_losses
from sparsedp.engines.made_up import made_up_rows
from sparsedp.errors import UsageError, machine_fault, out_of_memory, reason_of, require


class Source(Protocol):
    """Private rows, found by unit."""

    num_units: int

    def example(self) -> Rows:
        """A few rows of the shapes and types that `read` gives, for the self-check, which makes up its own values: of the content
        only the largest integers are used (how many classes or tokens there are, which is public)."""
        ...

    def read(self, units: Tensor, step: int) -> Rows | list[Rows]:
        """The rows of these units at this step (augmentations may differ from step to step); several where they are of several shapes."""
        ...

    def rows_of(self, units: Tensor) -> Tensor:
        """How many rows each of these units has."""
        ...


Pair = tuple[Any, Any]
Collate = Callable[[list[Any]], Pair]
Kind = tuple[str, tuple[str, ...]]
MOST_KINDS = 3  # that an error lists


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
    """A map-style data set of (input, target) pairs, read and collated one unit at a time, so that no record sees another.

    Every record is read once when the source is made, before anything is spent. Then all must be of one kind, and it decides from
    there on: a record that raises, or is of another kind, counts as zero, in silence. Under a collate of one's own, units may
    differ in length.
    """

    def __init__(self, dataset: Any, units: Tensor | None = None, collate: Collate | None = None) -> None:
        self._dataset, self._collate = dataset, collate
        self._index = _index(len(dataset), units)
        self.num_units = self._index.count
        self._kind, self._first = self._checked()

    def example(self) -> Rows:
        return as_many(Rows.make(*tree_map_only(Tensor, lambda t: t[:1], self._first)), self._index)

    def rows_of(self, units: Tensor) -> Tensor:
        return self._index.starts.diff()[units]

    def read(self, units: Tensor, step: int) -> list[Rows]:
        """The units that can be used, those of one shape together: to pad them all alike would let one decide what others are."""
        groups: dict[Kind, list[Pair]] = {}
        for unit in units.tolist():
            if (pair := self._usable(unit)) is not None:
                groups.setdefault(_kind_of(pair, shapes=True), []).append(pair)
        return [_joined(pairs) for pairs in groups.values()]

    def _usable(self, unit: int) -> Pair | None:
        """What a unit holds; nothing if it raises or is of another kind, for a run must not depend on one record."""
        try:
            pair = self._alone(unit)
            return pair if self._kind_of(pair) == self._kind else None
        except Exception as error:  # noqa: BLE001 - whatever a user's data set raises
            if isinstance(error, OSError) or out_of_memory(error):
                raise machine_fault("A record of the data set", f"it cannot be read ({reason_of(error)})") from None
            return None

    def _alone(self, unit: int) -> Pair:
        """A unit's rows, collated by themselves."""
        places = self._index.rows_of(torch.tensor([unit]))[0].tolist()
        items = [self._dataset[place] for place in places]
        if self._collate is not None:
            inputs, targets = self._collate(items)
        else:
            inputs, targets = torch.utils.data.default_collate(items)
            targets = tree_map_only(Tensor, _number, targets)
        _by_rows(inputs, targets, len(places))
        return inputs, targets

    def _kind_of(self, pair: Pair) -> Kind:
        return _kind_of(pair, shapes=self._collate is None)

    def _checked(self) -> tuple[Kind, Pair]:
        """The kind of all units, and the first of them."""
        kinds: Counter[Kind] = Counter()
        raised: Counter[str] = Counter()
        first = None
        for unit in range(self.num_units):
            try:
                pair = self._alone(unit)
                kinds[self._kind_of(pair)] += 1
            except _Uncut:
                raise
            except Exception as error:  # noqa: BLE001 - what a data set raises may hold data
                raised[type(error).__name__] += 1
            else:
                first = first or pair
        what = f"of {self.num_units} {'rows' if self.num_units == len(self._index.units) else 'units'} of the data set"
        if raised:
            raise UsageError(
                f"{sum(raised.values())} {what} cannot be read and collated ({', '.join(raised)}); mend or remove them."
            )
        if len(kinds) > 1:
            listed = [
                f"{count} {'have' if count > 1 else 'has'} {words}" for (words, _), count in kinds.most_common(MOST_KINDS)
            ]
            more = f", and there are {len(kinds) - MOST_KINDS} kinds more" * (len(kinds) > MOST_KINDS)
            raise UsageError(f"{', '.join(listed)}{more} {what}, but all must be alike; give them one type and one shape.")
        assert first is not None, "there is a unit, and it was read"
        return next(iter(kinds)), first


class _Uncut(UsageError):
    """What a collate gives cannot be told apart by rows."""


def _by_rows(inputs: Any, targets: Any, rows: int) -> None:
    """Raise unless there is a tensor to each side's every leaf, or a constant, and the tensors have so many rows."""
    for leaf in tree_leaves((inputs, targets)):
        constant = leaf is None or isinstance(leaf, str | bytes | int | float)
        if not constant and not (isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == rows):
            found = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
            raise _Uncut(
                f"collate made {found} of {rows} rows, but rows are told apart by the first dimension; return tensors with one entry "
                "per row, such as pad_sequence(..., batch_first=True)."
            )


def _number(t: Tensor) -> Tensor:
    """Targets that are one number a row: whole ones as int64 and others as float32, however each was written."""
    if t.ndim != 1 or t.dtype == torch.bool or t.is_complex():
        return t
    return t.to(torch.float32 if t.is_floating_point() else torch.int64)


def _kind_of(pair: Pair, shapes: bool) -> Kind:
    """What rows must share to stand in one tensor: in words, and by the constants beside the tensors, which words must not quote."""
    words, constants = [], []
    for name, side in zip(("inputs", "targets"), pair, strict=True):
        leaves, nesting = tree_flatten(side)
        form = "" if isinstance(side, Tensor) else " in " + " ".join(str(nesting).split())
        words.append(f"{name} {', '.join(_worded(leaf, shapes) for leaf in leaves)}{form}")
        constants += [repr(leaf) for leaf in leaves if not isinstance(leaf, Tensor)]
    return " and ".join(words), tuple(constants)


def _worded(leaf: Any, shapes: bool) -> str:
    if not isinstance(leaf, Tensor):
        return f"a {type(leaf).__name__} outside of tensors"
    size = str(tuple(leaf.shape[1:])) if shapes else f"of {leaf.ndim - 1} dimensions"
    place = "" if leaf.device.type == "cpu" and leaf.layout == torch.strided else f" {leaf.layout} on {leaf.device}"
    return f"{str(leaf.dtype).removeprefix('torch.')} {size}{place}"


def _joined(pairs: list[Pair]) -> Rows:
    """Units of one kind and shape, as rows; each pair is a unit."""
    flat = [tree_flatten(pair) for pair in pairs]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    inputs, targets = tree_unflatten([torch.cat(c) if isinstance(c[0], Tensor) else c[0] for c in columns], flat[0][1])
    counts = torch.tensor([len(next(leaf for leaf in leaves if isinstance(leaf, Tensor))) for leaves, _ in flat])
    return Rows(inputs, targets, torch.arange(len(pairs)).repeat_interleave(counts), len(pairs))


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
        found = source.read(units[start:stop], step)
        yield from (rows for rows in (found if isinstance(found, list) else [found]) if rows.units)
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
    """Raise if the loss refuses the lowest or the highest label, or targets of this type at all; tried on made-up inputs."""
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
    if refused is not None:
        kinds = ", ".join(
            f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape[1:])}" for t in tree_leaves(limits) if isinstance(t, Tensor)
        )
        raise UsageError(
            f"the model and the loss do not take these rows, whose targets are {kinds} ({refused}); cross entropy, for one, takes one whole "
            "number a row (int64)."
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
