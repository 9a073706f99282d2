"""Images that stay on disk until they are read: memory holds their names and labels only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sparsedp.data.decoding import Pixels, Undecodable, Unreadable
from sparsedp.data.values import Batch, Shape, UnitIndex, blank_broken, labels_in_range, rows_of
from sparsedp.data.workers import Decoder, Encoded
from sparsedp.errors import machine_fault, reason_of


class Source(Protocol):
    """Encoded images by row."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Encoded: ...

    def name(self, row: int) -> str:
        """What to call the row in an error."""
        ...


@dataclass(frozen=True)
class Paths:
    """Files by their paths."""

    paths: Sequence[str]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> str:
        return self.paths[row]

    def name(self, row: int) -> str:
        return self.paths[row]


@dataclass(frozen=True)
class LazyImages:
    """Encoded images with labels int64 [N] or float32 [N, classes]. `limit`ed sets and splits are other sources."""

    source: Source
    labels: Tensor
    num_classes: int
    decoder: Decoder
    index: UnitIndex | None = None

    @property
    def shape(self) -> Shape:
        return (self.decoder.channels, self.decoder.size, self.decoder.size)

    @property
    def units(self) -> Tensor | None:
        return None if self.index is None else self.index.units

    @property
    def num_units(self) -> int:
        return len(self) if self.index is None else self.index.count

    def __len__(self) -> int:
        return len(self.source)

    def rows_of(self, units: Tensor) -> tuple[Tensor, Tensor]:
        return rows_of(self.index, units)

    @cached_property
    def dtype(self) -> torch.dtype:
        """uint16 or uint8: that of the first image that can be read. The check has made sure that all others agree."""
        for row in torch.arange(len(self)).split(1):
            (found,) = self.decoder.decode(self._encoded(row))
            if not isinstance(found, Undecodable):
                return torch.uint16 if found.dtype == np.uint16 else torch.uint8
        return torch.uint8

    def read(self, indices: Tensor) -> Batch:
        """Content that does not decode is a row that is not valid. What cannot be read at all, though the check could, is an error:
        as a zero it would change a step, and be back when the step is done again."""
        labels = self.labels[indices]
        valid = labels_in_range(labels, self.num_classes)
        pixels = torch.zeros(len(indices), *self.shape, dtype=self.dtype)
        out = pixels.numpy()
        for place, found in enumerate(self.decoder.decode(self._encoded(indices))):
            if isinstance(found, Unreadable):
                raise machine_fault("An image", str(found))
            if isinstance(found, Undecodable) or found.dtype != out.dtype:
                valid[place] = False
            else:
                out[place] = found
        return blank_broken(Batch(pixels, labels, valid))

    def _encoded(self, indices: Tensor) -> Iterator[Encoded]:
        for row in indices.tolist():
            try:
                yield self.source[row]
            except (OSError, MemoryError) as error:
                raise machine_fault("An image", f"it cannot be read ({reason_of(error)})") from None

    def problem(self, row: int, found: Pixels | Undecodable) -> str | None:
        """Why a row, as decoded, cannot be used."""
        if isinstance(found, Undecodable):
            return f"the file is {self.source.name(row)!r}, but {found}; mend or remove it."
        if (found.dtype == np.uint16) != (self.dtype == torch.uint16):
            return (
                f"the file is {self.source.name(row)!r}, but it has other than the first file's bits; convert all to one depth."
            )
        return None
