"""The parts of a run that exist before anything is spent: its data set (not yet looked into), device, model, loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsedp import data, models
from sparsedp.config import Run
from sparsedp.data import DataSet
from sparsedp.data.augment import Augmentation
from sparsedp.dp.clipping import Loss
from sparsedp.dp.randomness import Key, raw
from sparsedp.environment import pick_device
from sparsedp.errors import require
from sparsedp.images import ImageSource
from sparsedp.models.registry import Shape


@dataclass(frozen=True, eq=False)
class Parts:
    """What a run is made of. `notes` says what was done to the model."""

    run: Run
    dataset: DataSet
    spec: Augmentation
    device: torch.device
    model: nn.Module
    loss: Loss
    notes: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of what the model sees."""
        return self.spec.out_shape(self.dataset.train.shape)

    def source(self, key: Key, plain: bool = False) -> ImageSource:
        """The training images as rows: the run's augmented views, or one plain view of each, as evaluation has it."""
        return ImageSource(self.dataset, self.spec, 1 if plain else self.run.data.views, key, self.device, plain)


def assemble(run: Run, dataset: DataSet, key: Key, loss: Loss | None = None) -> Parts:
    """Build the model for the data set, initialised from the key."""
    device = pick_device(run.runtime.device)
    if run.runtime.threads is not None:
        torch.set_num_threads(run.runtime.threads)
    spec = Augmentation(run.data.augment, dataset.normalisation, run.data.pad)
    generator = torch.Generator().manual_seed(int.from_bytes(raw(key, 8, "initialisation"), "little") >> 1)
    model, done = models.prepare(run.model, spec.out_shape(dataset.train.shape), len(dataset.classes), generator)
    model = model.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    if loss is None:
        check_width(model, spec.out_shape(dataset.train.shape), len(dataset.classes), run.model.name)
    chosen = loss or (multilabel_loss if dataset.multilabel else single_label_loss)
    return Parts(run, dataset, spec, device, model, chosen, tuple(done.lines()))


def check_width(model: nn.Module, shape: Shape, classes: int, name: str) -> None:
    """Refuse a model without one output for each class, on a made-up image: cross entropy would not, or only at a rare class."""
    example = torch.zeros(2, *shape, device=next(model.parameters()).device)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        output = model(example)
    found = tuple(output.shape[1:]) if isinstance(output, Tensor) else type(output).__name__
    require(
        found == (classes,), f"what the model {name} gives for one image", found if isinstance(found, str) else list(found),
        f"the data have {classes} classes and each takes one output", "make its last layer that wide",
    )  # fmt: skip


def load_data(run: Run) -> DataSet:
    """The run's data set. Headers and labels are read; what the records hold is for `data.check`."""
    return data.load(run.data, run.runtime.workers)


def single_label_loss(output: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each row."""
    return functional.cross_entropy(output, labels, reduction="none")


def multilabel_loss(output: Tensor, labels: Tensor) -> Tensor:
    """Binary cross entropy of each row, averaged over its labels."""
    return functional.binary_cross_entropy_with_logits(output, labels, reduction="none").mean(dim=1)
