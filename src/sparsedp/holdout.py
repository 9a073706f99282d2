"""Some units of the training data put aside, to score on: no unit is in both parts, and every part is numbered anew."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sparsedp.data.augment import Augmentation, evaluation_view
from sparsedp.data.values import Batch, DataSet, Images, Shape, UnitIndex, rows_of
from sparsedp.dp.randomness import Key
from sparsedp.dp.tuning import held_out
from sparsedp.errors import require
from sparsedp.images import for_device

AT_ONCE = 500


@dataclass(frozen=True, eq=False)
class Part:
    """The rows of some units of `whole`, in the order that they have there."""

    whole: Images
    rows: Tensor
    index: UnitIndex | None

    @property
    def shape(self) -> Shape:
        return self.whole.shape

    @property
    def units(self) -> Tensor | None:
        return None if self.index is None else self.index.units

    @property
    def num_units(self) -> int:
        return len(self.rows) if self.index is None else self.index.count

    def __len__(self) -> int:
        return len(self.rows)

    def rows_of(self, units: Tensor) -> tuple[Tensor, Tensor]:
        return rows_of(self.index, units)

    def read(self, indices: Tensor) -> Batch:
        return self.whole.read(self.rows[indices])


def part_of(images: Images, chosen: Tensor) -> Part:
    """The units for which `chosen` is true."""
    numbers = images.units
    if numbers is None:
        return Part(images, chosen.nonzero().flatten(), None)
    rows = chosen[numbers].nonzero().flatten()
    return Part(images, rows, UnitIndex.of((chosen.cumsum(0) - 1)[numbers[rows]]))


def held_out_units(units: int, share: float) -> int:
    """How many units a share of them is; public."""
    require(0 < share < 1, "held_out", share, "it is a share of the training units, between 0 and 1", "0.1 is usual")
    count = round(share * units)
    require(1 <= count < units, "held_out", share, f"of {units} units that leaves none in one of the parts", "choose another")
    return count


def split(dataset: DataSet, share: float, key: Key) -> tuple[DataSet, Part]:
    """The data set with fewer training units, and the units that it lost. Which they are depends on the key alone.

    Guarantee: a unit that is held out is in no batch that is trained on.
    """
    whole = dataset.train
    chosen = torch.zeros(whole.num_units, dtype=torch.bool)
    chosen[torch.from_numpy(held_out(whole.num_units, held_out_units(whole.num_units, share), key))] = True
    return replace(dataset, train=part_of(whole, ~chosen)), part_of(whole, chosen)


def right_rows(model: nn.Module, images: Images, spec: Augmentation, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each unit, how many of its rows are right (in all labels), and how many it has. A broken record is wrong."""
    model = model.to(device).eval()
    right = []
    with torch.no_grad():
        for rows in torch.arange(len(images)).split(AT_ONCE):
            batch = images.read(rows)
            output = model(for_device(evaluation_view(batch.pixels, spec), device)).float().cpu()
            if batch.labels.dim() == 1:
                good = output.argmax(1) == batch.labels
            else:
                good = ((output > 0) == (batch.labels > 0.5)).all(1)
            right.append(good & output.isfinite().all(1) & batch.valid)
    flags = torch.cat(right).long()
    units = torch.arange(len(flags)) if images.units is None else images.units
    return torch.zeros(images.num_units, dtype=torch.int64).index_add_(0, units, flags), torch.bincount(units)
