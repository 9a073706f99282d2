"""Every metric against its definition, computed slowly."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from sparsedp.errors import UsageError
from sparsedp.evaluation import Metrics, auroc, calibration_error, evaluate, metrics, multilabel_metrics


class Given(nn.Module):
    """The inputs are the outputs; in training mode they are spoilt."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return -x if self.training else x


def area_by_pairs(scores: np.ndarray, truth: np.ndarray) -> float | None:
    won = [1.0 if p > n else 0.5 if p == n else 0.0 for p in scores[truth] for n in scores[~truth]]
    return sum(won) / len(won) if won else None


def error_by_bins(confidence: np.ndarray, right: np.ndarray, bins: int = 15) -> float:
    total = 0.0
    for b in range(bins):
        chosen = (confidence > b / bins) & (confidence <= (b + 1) / bins)
        if chosen.any():
            total += chosen.mean() * abs(right[chosen].mean() - confidence[chosen].mean())
    return total


def mean_of(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def single_by_hand(logits: np.ndarray, labels: np.ndarray) -> dict[str, object]:
    classes = logits.shape[1]
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    chances = shifted / shifted.sum(1, keepdims=True)
    predicted = chances.argmax(1)
    right = predicted == labels
    recall = [float(right[labels == c].mean()) if (labels == c).any() else None for c in range(classes)]
    return {
        "count": len(labels),
        "loss": float(-np.log(chances[np.arange(len(labels)), labels]).mean()),
        "accuracy": float(right.mean()),
        "exact": float(right.mean()),
        "balanced_accuracy": mean_of(recall),
        "recall": recall,
        "auroc": mean_of([area_by_pairs(logits[:, c], labels == c) for c in range(classes)]),
        "calibration_error": error_by_bins(chances.max(1), right),
    }


def multi_by_hand(logits: np.ndarray, labels: np.ndarray) -> dict[str, object]:
    chances = 1 / (1 + np.exp(-logits))
    truth, predicted = labels == 1, logits > 0
    recall, balanced = [], []
    for c in range(logits.shape[1]):
        found = predicted[:, c][truth[:, c]]
        spared = ~predicted[:, c][~truth[:, c]]
        recall.append(float(found.mean()) if len(found) else None)
        balanced.append((found.mean() + spared.mean()) / 2 if len(found) and len(spared) else None)
    return {
        "count": len(labels),
        "loss": float(-(np.log(chances) * truth + np.log(1 - chances) * ~truth).mean()),
        "accuracy": float((predicted == truth).mean()),
        "exact": float((predicted == truth).all(1).mean()),
        "balanced_accuracy": mean_of(balanced),
        "recall": recall,
        "auroc": mean_of([area_by_pairs(logits[:, c], truth[:, c]) for c in range(logits.shape[1])]),
        "calibration_error": error_by_bins(chances.flatten(), truth.flatten()),
    }


def drawn(seed: int, rows: int, classes: int, ties: bool) -> tuple[Tensor, np.random.Generator]:
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(rows, classes)) * 2
    return torch.from_numpy(np.round(logits) + 0.25 if ties else logits).float(), generator


def agree(found: Metrics, wanted: dict[str, object]) -> None:
    plain = found.to_json()
    assert set(plain) == set(wanted)
    for name, value in wanted.items():
        ours, theirs = (v if isinstance(v, list) else [v] for v in (plain[name], value))
        assert [v is None for v in ours] == [v is None for v in theirs], name
        assert [v for v in ours if v is not None] == pytest.approx([v for v in theirs if v is not None], rel=1e-5, abs=1e-7), (
            name
        )


@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(2, 6))
def test_single_label_metrics_are_their_definitions(seed: int, rows: int, classes: int):
    logits, generator = drawn(seed, rows, classes, ties=False)
    labels = generator.integers(0, classes, rows)
    agree(metrics(logits, torch.from_numpy(labels)), single_by_hand(logits.double().numpy(), labels))


@given(st.integers(0, 10**6), st.integers(1, 60), st.integers(1, 5), st.booleans())
def test_multi_label_metrics_are_their_definitions(seed: int, rows: int, classes: int, ties: bool):
    logits, generator = drawn(seed, rows, classes, ties)
    labels = (generator.random((rows, classes)) < 0.3).astype(np.float32)
    agree(multilabel_metrics(logits, torch.from_numpy(labels)), multi_by_hand(logits.double().numpy(), labels))


@given(st.lists(st.tuples(st.integers(-2, 2), st.booleans()), min_size=1, max_size=40))
def test_auroc_is_the_share_of_pairs_in_order_with_ties_as_halves(rows: list[tuple[int, bool]]):
    scores, truth = (np.array(column) for column in zip(*rows, strict=True))
    (found,) = auroc(torch.from_numpy(scores)[:, None].float(), torch.from_numpy(truth)[:, None])
    wanted = area_by_pairs(scores, truth)
    assert (found is None) == (wanted is None)
    assert found is None or found == pytest.approx(wanted, abs=1e-12)


def test_auroc_by_hand():
    assert auroc(torch.tensor([[0.1], [0.4], [0.4], [0.9]]), torch.tensor([[False], [False], [True], [True]])) == (0.875,)


def test_calibration_error_by_hand():
    confidence = torch.tensor([0.95, 0.95, 0.95, 0.95, 0.55, 1.0, 0.0], dtype=torch.float64)
    right = torch.tensor([True, True, True, False, False, True, False])
    assert calibration_error(confidence, right) == pytest.approx((abs(4 - 4.8) + 0.55 + 0) / 7)


def test_a_bin_has_its_upper_edge():
    found = calibration_error(torch.tensor([0.2, 0.19], dtype=torch.float64), torch.tensor([True, False]))
    assert found == pytest.approx(abs(1 - 0.39) / 2)


def batches_of(logits: Tensor, labels: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(logits.split(size), labels.split(size), strict=True))


@pytest.mark.parametrize("size", [1, 7, 50])
@pytest.mark.parametrize("multilabel", [False, True])
def test_batches_do_not_matter(size: int, multilabel: bool):
    logits, generator = drawn(0, 50, 4, ties=True)
    labels = torch.from_numpy(
        generator.integers(0, 2, (50, 4)).astype(np.float32) if multilabel else generator.integers(0, 4, 50)
    )
    wanted = multilabel_metrics(logits, labels) if multilabel else metrics(logits, labels)
    assert evaluate(Given(), batches_of(logits, labels, size), 4, multilabel) == wanted


def test_the_model_is_evaluated_in_evaluation_mode_and_left_as_it_was():
    model = Given().train()
    model.dropout.eval()
    logits, generator = drawn(1, 9, 3, ties=False)
    labels = torch.from_numpy(generator.integers(0, 3, 9))
    assert evaluate(model, [(logits, labels)], 3) == metrics(logits, labels)
    assert (model.training, model.dropout.training) == (True, False)
    with pytest.raises(UsageError):
        evaluate(model, [(logits, labels)], 4)
    assert (model.training, model.dropout.training) == (True, False)


def test_invalid_rows_are_left_out():
    logits, generator = drawn(2, 12, 3, ties=False)
    labels = torch.from_numpy(generator.integers(0, 3, 12))
    valid = torch.arange(12) % 3 > 0
    found = evaluate(Given(), [(logits, labels, valid)], 3)
    assert found == metrics(logits[valid], labels[valid])
    assert found.count == 8


def test_rows_that_are_not_finite_are_wrong_and_what_they_spoil_is_none():
    logits = torch.tensor([[5.0, 0.0], [0.0, 5.0], [float("nan"), 0.0]])
    found = metrics(logits, torch.tensor([0, 1, 0]))
    assert found.accuracy == pytest.approx(2 / 3)
    assert found.recall == (0.5, 1.0)
    assert (found.loss, found.auroc, found.calibration_error) == (None, None, None)
    json.dumps(found.to_json(), allow_nan=False)


@pytest.mark.parametrize("multilabel", [False, True])
def test_no_rows_at_all(multilabel: bool):
    found = evaluate(Given(), [], 3, multilabel)
    assert found.count == 0
    assert found.recall == (None, None, None)
    assert (found.accuracy, found.loss, found.auroc, found.balanced_accuracy, found.calibration_error) == (None,) * 5


def test_a_perfect_and_a_blind_classifier():
    labels = torch.tensor([0, 1, 2] * 5)
    perfect = metrics(nn.functional.one_hot(labels).float() * 50, labels)
    assert (perfect.accuracy, perfect.balanced_accuracy, perfect.auroc) == (1.0, 1.0, 1.0)
    assert perfect.calibration_error == pytest.approx(0, abs=1e-9)
    blind = metrics(torch.zeros(15, 3), labels)
    assert blind.auroc == 0.5
    assert blind.loss == pytest.approx(math.log(3))
    assert blind.recall == (1.0, 0.0, 0.0)


def test_metrics_are_frozen_and_plain():
    found = metrics(torch.eye(3), torch.tensor([0, 1, 1]))
    assert dataclasses.is_dataclass(found)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.accuracy = 1.0  # type: ignore[misc]
    assert json.loads(json.dumps(found.to_json()))["recall"] == [1.0, 0.5, None]


@pytest.mark.parametrize(
    ("outputs", "labels", "multilabel", "says"),
    [
        (torch.zeros(2, 4), torch.tensor([0, 1]), False, r"model's output is \(2, 4\).*\(2, 3\)"),
        (torch.zeros(2, 3), torch.tensor([0, 3]), False, "numbers from 0 to 2"),
        (torch.zeros(2, 3), torch.tensor([0, -1]), False, "numbers from 0 to 2"),
        (torch.zeros(2, 3), torch.full((2, 3), 0.5), True, "labels are 0 or 1"),
        (torch.zeros(2, 3), torch.tensor([0, 1]), True, "set data.multilabel"),
        (torch.zeros(2, 3), torch.zeros(2, 3), False, "set data.multilabel"),
    ],
)
def test_outputs_and_labels_that_do_not_fit(outputs: Tensor, labels: Tensor, multilabel: bool, says: str):
    with pytest.raises(UsageError, match=says):
        evaluate(Given(), [(outputs, labels)], 3, multilabel)
