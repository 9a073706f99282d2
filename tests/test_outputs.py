"""What a run writes into public/: the model card, the summary's words, the order in which files appear."""

from __future__ import annotations

import hashlib
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


def test_a_class_of_any_name_stays_on_its_line() -> None:
    assert outputs._cell("a\nb|c") == "a\\nb\\|c" and outputs._cell("cat") == "cat"


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


def test_public_numbers_have_these_names_and_no_others(tmp_path: Path, data: Path) -> None:
    """Whatever is added to a public file is added here too, by someone who has asked where it comes from."""
    go(tiny(data, sparsity=SPARSE, runtime={"evaluate_every": 2, "unsafe_metrics": True}), tmp_path / "run")
    public = tmp_path / "run" / "public"
    lines = [json.loads(line) for line in (public / "metrics.jsonl").read_text().splitlines()]
    summary, stated = (json.loads((public / name).read_text()) for name in ("summary.json", "privacy.json"))
    assert all(set(line) == {"step", "epsilon", "last", "average"} for line in lines)
    assert set(summary) == {
        "accuracy", "accuracy_average", "epsilon", "delta", "accountant", "neighbouring", "private", "stamp", "steps", "batch_size",
        "num_units", "noise_multiplier", "seconds", "throughput", "metrics", "versions", "warnings",
    }  # fmt: skip
    assert set(stated["mechanism"]) == {
        "clip", "noise_multiplier", "steps", "sampling_rate", "batch_size", "num_units", "views", "noise_on", "divisor",
        "dp_snip",
    }  # fmt: skip


@pytest.mark.parametrize(("arithmetic", "words"), [("float", "in floating point"), ("exact", "discrete Gaussian noise")])
def test_the_statement_says_which_arithmetic_was_used(tmp_path: Path, data: Path, arithmetic: str, words: str) -> None:
    run = tiny(data, mechanism={"arithmetic": arithmetic, "steps": 1, "batch_size": 2}, model={"train": "head"})
    go(run, tmp_path / "run")
    assert words in json.loads((tmp_path / "run" / "public" / "privacy.json").read_text())["arithmetic"]


def test_the_statement_is_bound_to_the_files_that_it_speaks_of(tmp_path: Path, data: Path) -> None:
    go(tiny(data, sparsity=SPARSE, runtime={"key": None}), tmp_path / "run")
    public = tmp_path / "run" / "public"
    stated, words = json.loads((public / "privacy.json").read_text()), (public / "privacy.md").read_text()
    assert set(stated["files"]) == {
        "model.safetensors", "average.safetensors", "mask.safetensors", "ledger.json", "config.json"
    }  # fmt: skip
    for name, digest in stated["files"].items():
        assert digest == hashlib.sha256((public / name).read_bytes()).hexdigest(), name
    assert stated["void_if"] and all(reason in words for reason in stated["void_if"])


def test_tensorboard_has_the_public_numbers(tmp_path: Path, data: Path) -> None:
    pytest.importorskip("tensorboard")
    go(tiny(data, runtime={"tensorboard": True, "evaluate_every": 3}), tmp_path / "run")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    files = sorted((tmp_path / "run" / "public" / "tensorboard").glob("events.out.tfevents*"))
    assert [path.name for path in files] == [
        "events.out.tfevents.0000000003.sparsedp",
        "events.out.tfevents.0000000006.sparsedp",
    ]
    assert {event.wall_time for path in files for event in EventFileLoader(str(path)).Load()} == {0.0, 3.0, 6.0}, (
        "steps, no times"
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "public" / "metrics.jsonl").read_text().splitlines()]
    board = EventAccumulator(str(tmp_path / "run" / "public" / "tensorboard")).Reload()
    for tag, values in (("epsilon", [x["epsilon"] for x in lines]), ("last/accuracy", [x["last"]["accuracy"] for x in lines])):
        scalars = [(event.step, event.value) for event in board.Scalars(tag)]
        assert [step for step, _ in scalars] == [3, 6] and [v for _, v in scalars] == pytest.approx(values)


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.0, 0.01), (0.0101, 0.011), (0.5, 0.5), (0.991, 1.0), (1.0, 1.0), (9.95, 10.0), (123.4, 130.0), (86400.3, 87000.0)]
)  # fmt: skip
def test_seconds_are_rounded_up_to_two_digits(seconds: float, told: float) -> None:
    assert outputs.rounded_up(seconds) == told


def test_the_summary_tells_no_exact_time(tmp_path: Path, data: Path) -> None:
    summary = go(tiny(data), tmp_path / "run").summary
    assert summary["seconds"] == outputs.rounded_up(summary["seconds"]) == float(f"{summary['seconds']:.2g}")
    assert summary["throughput"] == round(6 * 16 / summary["seconds"], 2)


@pytest.mark.parametrize(
    ("value", "said"), [(None, "none"), (float("inf"), "infinite"), (0.123456, "0.1235"), (12345.6, "1.235e+04")]
)
def test_numbers_in_words(value: Any, said: str) -> None:
    assert number(value) == said
