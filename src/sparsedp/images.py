"""From stored images to the rows of a private step: read, check, augment by the key, normalise, to the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsedp.data import DataSet, Images
from sparsedp.data.augment import Augmentation, augment, augmentation_bits, evaluation_view
from sparsedp.dp.clipping import Rows
from sparsedp.dp.randomness import Key


@dataclass(frozen=True, eq=False)
class ImageSource:
    """The training images of a data set as a `sources.Source`: K views of every image, the same at every visit of a step.

    A record that cannot be read becomes not-a-number, so that its unit counts as zero, in silence.
    """

    data: DataSet
    spec: Augmentation
    views: int
    key: Key
    device: torch.device
    plain: bool = False

    @property
    def num_units(self) -> int:
        return self.data.train.num_units

    def rows_of(self, units: Tensor) -> Tensor:
        numbers = self.data.train.units
        if numbers is None:
            return torch.full((len(units),), self.views)
        return torch.bincount(numbers)[units] * self.views

    def example(self) -> Rows:
        """Two made-up units, of unequal size where units have several images; their labels show the highest class number."""
        classes = len(self.data.classes)
        counts = torch.tensor([1, 1 if self.data.train.units is None else 2]) * self.views
        rows = int(counts.sum())
        labels = torch.ones(rows, classes) if self.data.multilabel else torch.full((rows,), classes - 1)
        pixels = torch.zeros((rows // self.views, *self.data.train.shape), dtype=torch.uint8)
        inputs = self._inputs(pixels, np.zeros((len(pixels), self.views, 1), np.uint64))
        return Rows(inputs, labels.to(self.device), torch.arange(2).repeat_interleave(counts), 2)

    def read(self, units: Tensor, step: int) -> Rows:
        rows, unit = self.data.train.rows_of(units)
        batch = self.data.train.read(rows)
        bits = augmentation_bits(self.key, step, rows, self.views)
        inputs = self._inputs(batch.pixels, bits)
        valid = batch.valid.repeat_interleave(self.views).to(self.device)
        inputs[~valid] = torch.nan
        labels = batch.labels.repeat_interleave(self.views, 0).to(self.device)
        return Rows(inputs, labels, unit.repeat_interleave(self.views), len(units))

    def _inputs(self, pixels: Tensor, bits: np.ndarray) -> Tensor:
        views = evaluation_view(pixels, self.spec) if self.plain else augment(pixels, bits, self.views, self.spec)
        return for_device(views, self.device)


def for_device(pixels: Tensor, device: torch.device) -> Tensor:
    """On the device, in the memory layout that convolutions are fastest in."""
    return pixels.to(device).contiguous(memory_format=torch.channels_last)


def plain_batches(images: Images, spec: Augmentation, device: torch.device, size: int = 500) -> Iterator[tuple[Tensor, Tensor]]:
    """Images that are not private, in order, as inputs and labels: for evaluation and prediction."""
    for start in range(0, len(images), size):
        batch = images.read(torch.arange(start, min(start + size, len(images))))
        yield for_device(evaluation_view(batch.pixels, spec), device), batch.labels.to(device)
