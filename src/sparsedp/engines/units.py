"""Which rows belong to which unit, and sums over them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sparsedp.dp.clipping import Rows


class Units:
    """The units of some rows. `each` is the number of rows that every unit has, or None where they differ."""

    def __init__(self, rows: Rows, device: torch.device) -> None:
        self.counts: list[int] = rows.counts.tolist()
        self.count = rows.units
        self.rows = len(rows.unit)
        self.index = rows.unit.to(device)
        self.each = self.counts[0] if self.counts and len(set(self.counts)) == 1 else None

    def spans(self, first: int = 0, stop: int | None = None) -> Iterator[slice]:
        """The rows of every unit in [first, stop)."""
        start = sum(self.counts[:first])
        for count in self.counts[first:stop]:
            yield slice(start, start + count)
            start += count

    def rows_of(self, first: int, stop: int) -> slice:
        """The rows of units [first, stop) together."""
        return slice(sum(self.counts[:first]), sum(self.counts[:stop]))

    def sum_of(self, per_row: Tensor, first: int, stop: int) -> Tensor:
        """`sum` over the rows of units [first, stop) alone."""
        rows = self.rows_of(first, stop)
        if len(per_row) != rows.stop - rows.start:
            per_row = per_row.unflatten(0, (rows.stop - rows.start, -1)).sum(1)
        if self.each is not None:
            return per_row if self.each == 1 else per_row.unflatten(0, (stop - first, self.each)).sum(1)
        total = per_row.new_zeros((stop - first, *per_row.shape[1:]))
        return total.index_add_(0, self.index[rows] - first, per_row)

    def row_weights(self) -> Tensor:
        """1 / (rows of its unit), for every row: a unit's loss is the mean over its rows."""
        return (1.0 / torch.tensor(self.counts, dtype=torch.float64, device=self.index.device))[self.index]

    def of_rows(self, per_unit: Tensor) -> Tensor:
        """A value per unit as a value per row."""
        return per_unit if self.each == 1 else per_unit[self.index]

    def sum(self, per_row: Tensor) -> Tensor:
        """The sum over the rows of each unit; the first dimension may hold several consecutive entries per row."""
        return self.sum_of(per_row, 0, self.count)


def channels_last(t: Tensor) -> bool:
    """Whether an image is laid out channels last, and not as usual."""
    return t.ndim == 4 and t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()
