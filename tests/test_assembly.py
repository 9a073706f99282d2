"""A model whose outputs are not the classes is refused before anything is spent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparsedp import training
from sparsedp.config import Model
from sparsedp.errors import UsageError
from tests.whole_runs import after, images, tiny

HERE = "tests.test_assembly"


def wide(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, classes + 3))


def narrow(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 2))


def deep() -> nn.Module:
    return nn.Conv2d(1, 10, 3)


class Pair(nn.Linear):
    def __init__(self, classes: int) -> None:
        super().__init__(28 * 28, classes)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x.flatten(1)), x


@pytest.mark.parametrize(
    ("name", "said"), [("wide", r"\[13\]"), ("narrow", r"\[2\]"), ("deep", r"\[10, 26, 26\]"), ("Pair", "'tuple'")]
)
def test_a_model_without_one_output_for_each_class_is_refused_before_the_first_event(
    name: str, said: str, tmp_path: Path, home: Path
) -> None:
    run = tiny(images(tmp_path / "data"), model=Model(name=f"{HERE}:{name}"))
    with pytest.raises(UsageError, match=f"{HERE}:{name} gives for one image is {said}, but the data have 10 classes"):
        training.train(run, tmp_path / "run")
    assert not (tmp_path / "run").exists() and not list(home.rglob("*.json"))


def test_with_a_loss_of_ones_own_the_outputs_are_its_affair(tmp_path: Path) -> None:
    run = tiny(images(tmp_path / "data"), model=Model(name=f"{HERE}:wide"), data={"evaluation": "none"})
    with pytest.raises(training.Stopped):
        training.train(
            run, tmp_path / "run", stop=after(1),
            loss=lambda output, labels: nn.functional.cross_entropy(output[:, 3:], labels, reduction="none"),
        )  # fmt: skip
