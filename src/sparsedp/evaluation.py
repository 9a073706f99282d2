"""How good a classifier is on declared evaluation data: accuracy, and what accuracy hides.

Privacy hurts small classes, so recall per class, balanced accuracy, AUROC and calibration stand beside accuracy. All are
exact; batches are streamed, and only the outputs of the network are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsedp.errors import UsageError, require

BINS = 15


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Results over `count` examples. None where a number does not exist, such as the recall of a class without examples.

    Multi-label: a label is predicted where its logit is above zero; `accuracy` is over all (example, label) pairs,
    `exact` asks for all labels of an example at once, balanced accuracy is the mean over labels of (recall + specificity) / 2.
    """

    count: int
    loss: float | None
    accuracy: float | None
    exact: float | None
    """Share of examples that are right in all labels; for single-label data the accuracy."""
    balanced_accuracy: float | None
    """Mean over the classes that occur."""
    recall: tuple[float | None, ...]
    """Of the examples of each class, the share that was found."""
    auroc: float | None
    """Area under the ROC curve, one class against the rest, ties counted half; mean over the classes where it exists."""
    calibration_error: float | None
    """Expected calibration error in 15 bins of equal width: of the top probability, or for multi-label of every probability."""

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def evaluate(model: nn.Module, batches: Iterable[Sequence[Tensor]], classes: int, multilabel: bool = False) -> Metrics:
    """Run the model in evaluation mode over batches of (inputs, targets) or (inputs, targets, valid).

    Targets are class numbers [n], or for multi-label 0/1 [n, classes]; rows whose `valid` is False are left out. The model
    comes back in the mode it was in. A row whose output is not finite counts as wrong.
    """
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    modes = {module: module.training for module in model.modules()}
    outputs, targets = [], []
    model.eval()
    try:
        with torch.no_grad():
            for inputs, labels, *valid in batches:
                logits = model(inputs.to(device)).float().cpu()
                _check(logits, labels, classes, multilabel)
                chosen = valid[0].cpu().bool() if valid else slice(None)
                outputs.append(logits[chosen])
                targets.append(labels.cpu()[chosen])
    finally:
        for module, mode in modes.items():
            module.training = mode
    logits = torch.cat(outputs) if outputs else torch.zeros(0, classes)
    empty = torch.zeros((0, classes) if multilabel else 0, dtype=torch.float32 if multilabel else torch.int64)
    labels = torch.cat(targets) if targets else empty
    return multilabel_metrics(logits, labels) if multilabel else metrics(logits, labels)


def _check(logits: Tensor, labels: Tensor, classes: int, multilabel: bool) -> None:
    rows = len(logits)
    require(
        logits.shape == (rows, classes), "the shape of the model's output", tuple(logits.shape),
        f"evaluation over {classes} classes takes ({rows}, {classes})", "build the model for this data set",
    )  # fmt: skip
    expected = (rows, classes) if multilabel else (rows,)
    require(
        tuple(labels.shape) == expected, "the shape of the labels", tuple(labels.shape),
        f"{'multi' if multilabel else 'single'}-label evaluation takes {expected}", "set data.multilabel to what the labels are",
    )  # fmt: skip
    legal = ((labels == 0) | (labels == 1)) if multilabel else ((labels >= 0) & (labels < classes))
    if not bool(legal.all()):
        rule = "0 or 1" if multilabel else f"numbers from 0 to {classes - 1}"
        raise UsageError(f"a label of the evaluation data is out of range; labels are {rule}; check the data set's files.")


def metrics(logits: Tensor, labels: Tensor) -> Metrics:
    """Single-label: logits [n, classes] and class numbers [n]."""
    count, classes = logits.shape
    finite = logits.isfinite().all(1)
    logarithms = functional.log_softmax(logits.double(), dim=1)
    confidence, predicted = logarithms.exp().max(1)
    right = (predicted == labels) & finite
    found = torch.bincount(labels[right], minlength=classes).double()
    present = torch.bincount(labels, minlength=classes).double()
    recall = _shares(found, present)
    usable = bool(finite.all())
    return Metrics(
        count=count,
        loss=_number(functional.nll_loss(logarithms, labels)) if count else None,
        accuracy=_mean(right),
        exact=_mean(right),
        balanced_accuracy=_average(recall),
        recall=recall,
        auroc=_average(auroc(logits, functional.one_hot(labels, classes).bool())) if usable else None,
        calibration_error=calibration_error(confidence, right) if usable else None,
    )


def multilabel_metrics(logits: Tensor, labels: Tensor) -> Metrics:
    """Multi-label: logits and 0/1 labels, both [n, classes]."""
    truth = labels > 0.5
    usable = bool(logits.isfinite().all())
    right = ((logits > 0) == truth) & logits.isfinite()
    recall = _shares((right & truth).sum(0).double(), truth.sum(0).double())
    specificity = _shares((right & ~truth).sum(0).double(), (~truth).sum(0).double())
    balanced = tuple(None if a is None or b is None else (a + b) / 2 for a, b in zip(recall, specificity, strict=True))
    loss = functional.binary_cross_entropy_with_logits(logits.double(), truth.double()) if len(logits) else None
    return Metrics(
        count=len(logits),
        loss=None if loss is None else _number(loss),
        accuracy=_mean(right),
        exact=_mean(right.all(1)),
        balanced_accuracy=_average(balanced),
        recall=recall,
        auroc=_average(auroc(logits, truth)) if usable else None,
        calibration_error=calibration_error(logits.double().sigmoid().flatten(), truth.flatten()) if usable else None,
    )


def auroc(scores: Tensor, truth: Tensor) -> tuple[float | None, ...]:
    """Per column, the probability that a positive scores above a negative, ties counted half; None without both kinds.

    By ranks (Mann and Whitney): the mean rank of the positives says it exactly, with ties sharing their mean rank.
    """
    areas: list[float | None] = []
    for column, positive in zip(scores.T, truth.T, strict=True):
        positives = int(positive.sum())
        negatives = len(positive) - positives
        if not positives or not negatives:
            areas.append(None)
            continue
        _, place, size = column.unique(return_inverse=True, return_counts=True)
        last = size.cumsum(0).double()
        ranks = (last - (size.double() - 1) / 2)[place]
        above = float(ranks[positive].sum()) - positives * (positives + 1) / 2
        areas.append(above / (positives * negatives))
    return tuple(areas)


def calibration_error(confidence: Tensor, right: Tensor) -> float | None:
    """Mean over the bins, weighted by their counts, of |share that is right - mean confidence|. Bins are (low, high]."""
    if not len(confidence):
        return None
    place = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, place, right.double() - confidence.double())
    return float(gaps.abs().sum()) / len(confidence)


def _shares(part: Tensor, whole: Tensor) -> tuple[float | None, ...]:
    return tuple(a / b if b else None for a, b in zip(part.tolist(), whole.tolist(), strict=True))


def _average(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _mean(flags: Tensor) -> float | None:
    return float(flags.double().mean()) if flags.numel() else None


def _number(value: Tensor) -> float | None:
    return float(value) if math.isfinite(float(value)) else None
