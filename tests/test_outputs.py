"""What a run writes into public/: the model card, the summary's words, the order in which files appear."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsedp import disk, outputs
from sparsedp.errors import UsageError
from sparsedp.outputs import number
from tests import whole_runs
from tests.whole_runs import SPARSE, go, images, tiny


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_runs.quick_accounting(monkeypatch)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return images(tmp_path / "data")


def test_the_model_card_says_what_a_receiver_needs(tmp_path: Path, data: Path) -> None:
    go(tiny(data, sparsity=SPARSE, runtime={"key": None}), tmp_path / "run")
    card = (tmp_path / "run" / "public" / "model_card.md").read_text()
    summary = json.loads((tmp_path / "run" / "public" / "summary.json").read_text())
    for words in (
        "# small_cnn trained on mnist", f"epsilon {summary['epsilon']:.4g} at delta 0.001 (pld, add-remove)", "Input: 1 x 28 x 28",
        "Classes: 10 (0, 1, 2", "6 steps of an expected 16 of 60 units", "pre-pruning random at rate 0.3, dropping random at rate 0.4",
        "Started from: random weights; trained: all", "| class | recall |",
    ):  # fmt: skip
        assert words in card, words
    rows = [line for line in card.splitlines() if line.startswith("| ") and not line.startswith("| class")]
    assert len(rows) == 10
    assert [row.split("|")[2].strip() for row in rows] == [number(r) for r in summary["metrics"]["last"]["recall"]]


def test_the_summary_comes_last(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is finished when it is there: what fails before leaves an unfinished run that can be taken up again."""
    run = tiny(data)
    written: list[str] = []
    real = disk._replace

    def watched(path: Path, content: bytes, mode: int) -> None:
        written.append(path.name)
        real(path, content, mode)

    monkeypatch.setattr(disk, "_replace", watched)
    monkeypatch.setattr(outputs, "model_card", lambda *_: (_ for _ in ()).throw(UsageError("no.")))
    with pytest.raises(UsageError, match="no."):
        go(run, tmp_path / "run")
    monkeypatch.undo()
    assert "model.safetensors" in written and "summary.json" not in written
    assert (tmp_path / "run" / "private" / "key").exists()
    whole_runs.quick_accounting(monkeypatch)
    monkeypatch.setattr(disk, "_replace", watched)
    go(run, tmp_path / "run")
    assert [name for name in written if name != "id"][-1] == "summary.json"


def test_exports_give_what_the_model_gives(tmp_path: Path, data: Path) -> None:
    result = go(tiny(data, runtime={"export": ("torch-export",)}), tmp_path / "run")
    images_ = torch.randn(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    program = torch.export.load(tmp_path / "run" / "public" / "model.pt2").module()
    with torch.no_grad():
        assert torch.allclose(program(images_), result.model.eval()(images_), atol=1e-5)


def test_metrics_name_step_and_what_is_spent(tmp_path: Path, data: Path) -> None:
    go(tiny(data, runtime={"evaluate_every": 3}), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "public" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 6]
    assert 0 < lines[0]["epsilon"] < lines[1]["epsilon"]
    assert all({"last", "average"} <= line.keys() for line in lines)


def test_tensorboard_has_the_public_numbers(tmp_path: Path, data: Path) -> None:
    pytest.importorskip("tensorboard")
    go(tiny(data, runtime={"tensorboard": True}), tmp_path / "run")
    assert list((tmp_path / "run" / "public" / "tensorboard").glob("events*"))


@pytest.mark.parametrize(
    ("value", "said"), [(None, "none"), (float("inf"), "infinite"), (0.123456, "0.1235"), (12345.6, "1.235e+04")]
)
def test_numbers_in_words(value: Any, said: str) -> None:
    assert number(value) == said
