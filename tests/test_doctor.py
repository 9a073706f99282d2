"""`sparsedp doctor`: its figures by another way, its advice, and that they stay with the operator."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from sparsedp import data, finished
from sparsedp.config import Sparsity
from sparsedp.data.augment import Augmentation, evaluation_view
from sparsedp.doctor import Findings, _advice, examine
from sparsedp.dp.masks import keep_top, kept_count
from sparsedp.errors import UsageError
from sparsedp.mask_files import load as load_mask
from tests import whole_runs
from tests.whole_runs import UNITS, go, images, tiny

CLIP = 3.0
SPARSE = Sparsity(prune="random", prune_rate=0.5, drop="magnitude", drop_rate=0.4)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_runs.quick_accounting(monkeypatch)


def masks_by_hand(path: Path, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Of what pre-pruning left, per layer the largest weights."""
    pruned = load_mask(path / "public" / "mask.safetensors", model).masks
    weights = dict(model.named_parameters())
    return {
        name: keep_top(weights[name].abs(), kept_count(int(mask.sum()), SPARSE.drop_rate), mask).reshape(mask.shape)
        for name, mask in pruned.items()
    }


@pytest.mark.parametrize("sparsity", [Sparsity(), SPARSE], ids=["dense", "sparse"])
def test_its_figures_are_those_of_plain_autograd_on_the_coordinates_that_a_step_takes(
    tmp_path: Path, sparsity: Sparsity
) -> None:
    run = tiny(images(tmp_path / "data"), sparsity=sparsity, mechanism={"clip": CLIP}, runtime={"key": None})
    go(run, tmp_path / "run")
    found = examine(tmp_path / "run", None, UNITS + 9)
    _, model, _, _ = finished.load_model(tmp_path / "run", average=False)
    masks = masks_by_hand(tmp_path / "run", model) if sparsity.prune != "none" else {}
    dataset = data.load(run.data)
    batch = dataset.train.read(torch.arange(UNITS))
    inputs = evaluation_view(batch.pixels, Augmentation("none", dataset.normalisation))
    names, parameters = zip(*model.named_parameters(), strict=True)
    rows = []
    for x, y in zip(inputs, batch.labels, strict=True):
        gradient = torch.autograd.grad(functional.cross_entropy(model(x[None]), y[None]), parameters)
        rows.append(torch.cat([(g * masks[n] if n in masks else g).flatten() for n, g in zip(names, gradient, strict=True)]))
    own = torch.stack(rows).double()
    norms = own.norm(dim=1)
    clipped = own * (CLIP / norms).clamp(max=1)[:, None]
    dimensions = sum(int(masks[n].sum()) if n in masks else p.numel() for n, p in zip(names, parameters, strict=True))
    assert found.examples == UNITS
    assert 0 < found.clipped_fraction == pytest.approx(float((norms > CLIP).double().mean()))
    assert found.median_norm == pytest.approx(float(norms.median()), rel=1e-4)
    assert found.signal == pytest.approx(float(clipped.mean(0).norm()), rel=1e-4)
    assert found.noise == pytest.approx(1.0 * CLIP / 16 * math.sqrt(dimensions))
    assert found.train_accuracy == pytest.approx(float((model(inputs).argmax(1) == batch.labels).double().mean()))
    summary = json.loads((tmp_path / "run" / "public" / "summary.json").read_text())
    assert found.evaluation_accuracy == summary["accuracy"]
    written = tmp_path / "run" / "private" / "doctor.json"
    assert json.loads(written.read_text()) == json.loads(json.dumps(found.to_json())) and written.stat().st_mode & 0o077 == 0
    assert found.to_json()["stamp"].startswith("NOT PRIVATE") and found.text().startswith("NOT PRIVATE")


def seen(**changes: Any) -> Findings:
    usual: dict[str, Any] = {
        "examples": 9, "clipped_fraction": 0.7, "median_norm": 1.5, "signal": 0.2, "noise": 1.0, "train_accuracy": 0.5,
        "evaluation_accuracy": 0.5, "advice": (),
    }  # fmt: skip
    return Findings(**{**usual, **changes})


@pytest.mark.parametrize(("changes", "words"), [
    ({}, "nothing stands out"),
    ({"clipped_fraction": 0.1}, "a smaller clip (about 1.5)"),
    ({"signal": 0.01}, "noise drowns the signal"),
    ({"signal": 0.8}, "a learning rate above 0.5"),
    ({"noise": 0.0}, "a learning rate above 0.5"),
    ({"train_accuracy": 0.9}, "training images are known better than others"),
    ({"train_accuracy": 0.9, "evaluation_accuracy": None}, "nothing stands out"),
])  # fmt: skip
def test_it_advises(changes: dict[str, Any], words: str) -> None:
    said = _advice(seen(**changes), lr=0.5)
    assert len(said) == 1 and words in said[0]
    assert words in seen(**changes, advice=said).text()


def test_a_sample_of_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="examples is 1, but a sample has at least two"):
        examine(tmp_path, None, 1)
