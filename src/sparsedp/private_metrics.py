"""Metrics that look at training data without noise: off unless asked for, for the operator's eyes, in `private/` alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsedp import disk
from sparsedp.data.augment import evaluation_view
from sparsedp.dp.sampling import participants
from sparsedp.evaluation import evaluate
from sparsedp.images import for_device

if TYPE_CHECKING:
    from sparsedp.private import Private
    from sparsedp.state import Learner
    from sparsedp.training import Setting

STAMP = "NOT PRIVATE: computed from training data without noise; do not publish"
ROWS = 1000  # training images that are looked at, at most
AT_ONCE = 250


def add(setting: Setting, learner: Learner, private: Private) -> None:
    """One line of private/metrics.jsonl, after a step: how training images are classified, and how many units were in its batch."""
    classes, several = len(setting.dataset.classes), setting.dataset.multilabel
    found = evaluate(learner.model, _training_images(setting), classes, several)
    last, settings = private.taken - 1, private.settings
    drawn = participants(private.key, last, settings.num_units, settings.sampling_rate)
    line = {
        "stamp": STAMP, "step": private.taken, "train_loss": found.loss, "train_accuracy": found.accuracy, "train_rows": found.count,
        "realised_batch": len(drawn),
    }  # fmt: skip
    disk.append_line(setting.folder.private / "metrics.jsonl", line)


def _training_images(setting: Setting) -> Iterator[tuple[Tensor, Tensor]]:
    images, device = setting.dataset.train, setting.parts.device
    for rows in torch.arange(min(ROWS, len(images))).split(AT_ONCE):
        batch = images.read(rows)
        yield for_device(evaluation_view(batch.pixels, setting.parts.spec), device), batch.labels.to(device)
