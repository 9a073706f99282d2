"""The words of this folder: a batch, images that can be read by row, a data set.

Everything a run may know of the data before it spends any budget is here by type: the number of rows and units, the
shape, the classes and the public normalisation. Pixels and labels come out through `read` alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Normalisation:
    """Public mean and standard deviation per channel, on the scale where black is 0 and white is 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Batch:
    """Rows as read: pixels uint8 or uint16 [n, C, H, W], labels int64 [n] or float32 [n, classes], valid bool [n].

    A row that is not valid is all zeros, its label too; the caller gives it no weight.
    """

    pixels: Tensor
    labels: Tensor
    valid: Tensor


class Images(Protocol):
    """Rows of images with their labels, in an order that never changes."""

    @property
    def shape(self) -> Shape: ...

    @property
    def units(self) -> Tensor | None:
        """The unit number, 0 to num_units - 1, of every row; None where every row is a unit of its own."""

    @property
    def num_units(self) -> int: ...

    def __len__(self) -> int: ...

    def rows_of(self, units: Tensor) -> tuple[Tensor, Tensor]:
        """All rows of `units`, and for each its position in `units`; positions ascend."""
        ...

    def read(self, indices: Tensor) -> Batch:
        """The rows `indices`. Never raises because of what a record holds; a UsageError where the machine cannot read one."""
        ...


@dataclass(frozen=True)
class DataSet:
    """Images to train on, images to evaluate on if there are any, and the public facts about both."""

    name: str
    train: Images
    evaluation: Images | None
    classes: tuple[str, ...]
    normalisation: Normalisation
    multilabel: bool = False


@dataclass(frozen=True)
class UnitIndex:
    """Which rows belong to which unit: the rows of unit u are order[starts[u] : starts[u + 1]], ascending."""

    units: Tensor
    order: Tensor
    starts: Tensor

    @classmethod
    def of(cls, units: Tensor) -> UnitIndex:
        counts = torch.bincount(units)
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return cls(units, units.argsort(stable=True), starts)

    @property
    def count(self) -> int:
        return len(self.starts) - 1

    def rows_of(self, units: Tensor) -> tuple[Tensor, Tensor]:
        sizes = self.starts[units + 1] - self.starts[units]
        positions = torch.arange(len(units)).repeat_interleave(sizes)
        first = (sizes.cumsum(0) - sizes)[positions]
        within = torch.arange(len(positions)) - first
        return self.order[self.starts[units][positions] + within], positions


@dataclass(frozen=True)
class ArrayImages:
    """Images held in memory: pixels uint8 or uint16 [N, C, H, W], labels int64 [N] or float32 [N, classes]."""

    pixels: Tensor
    labels: Tensor
    num_classes: int
    index: UnitIndex | None = field(default=None)

    @property
    def shape(self) -> Shape:
        return tuple(self.pixels.shape[1:])

    @property
    def units(self) -> Tensor | None:
        return None if self.index is None else self.index.units

    @property
    def num_units(self) -> int:
        return len(self) if self.index is None else self.index.count

    def __len__(self) -> int:
        return len(self.pixels)

    def rows_of(self, units: Tensor) -> tuple[Tensor, Tensor]:
        return rows_of(self.index, units)

    def read(self, indices: Tensor) -> Batch:
        labels = self.labels[indices]
        return blank_broken(Batch(self.pixels[indices], labels, labels_in_range(labels, self.num_classes)))


def rows_of(index: UnitIndex | None, units: Tensor) -> tuple[Tensor, Tensor]:
    """`Images.rows_of` for an index that is None where every row is its own unit."""
    return (units, torch.arange(len(units))) if index is None else index.rows_of(units)


def labels_in_range(labels: Tensor, num_classes: int) -> Tensor:
    """Per row: a class number below `num_classes`, or as many entries as classes, each 0 or 1."""
    if labels.dim() == 1:
        return (labels >= 0) & (labels < num_classes)
    return ((labels == 0) | (labels == 1)).all(dim=1) & (labels.shape[1] == num_classes)


def blank_broken(batch: Batch) -> Batch:
    """The batch with zeros in every row that is not valid."""
    if bool(batch.valid.all()):
        return batch
    pixels, labels = batch.pixels.clone(), batch.labels.clone()
    pixels.numpy()[~batch.valid.numpy()] = 0  # torch has no masked assignment for uint16
    labels[~batch.valid] = 0
    return replace(batch, pixels=pixels, labels=labels)


def unit_index(names: Sequence[str]) -> UnitIndex:
    """Units numbered 0, 1, .. in the order in which their names first occur."""
    numbers: dict[str, int] = {}
    return UnitIndex.of(torch.tensor([numbers.setdefault(name, len(numbers)) for name in names], dtype=torch.int64))
