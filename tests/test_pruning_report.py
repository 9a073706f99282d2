"""The table, the JSON and the plot of densities."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sparsedp.config import Sparsity
from sparsedp.models.wrn import WideResNet
from sparsedp.pruning import Pruned, prune
from tests.made_up import KEY, build


def pruned(granularity: str = "weight") -> Pruned:
    torch.manual_seed(0)
    settings = Sparsity(prune="random", prune_rate=0.75, granularity=granularity)  # type: ignore[arg-type]
    return prune(WideResNet(10, 1, 10), settings, KEY)


def test_the_table_has_a_line_per_layer_and_the_total() -> None:
    text = pruned().report.text()
    assert "random, prune rate 0.75 by weight" in text and "NOT PRIVATE" not in text
    assert "stem.weight" in text and "16x3x3x3" in text and "108" in text and "432" in text and "0.2500" in text
    assert f"{sum(int(m.sum()) for m in pruned().masks.values()):,}" in text.splitlines()[-2] + text.splitlines()[-3]
    assert "(channels)" in pruned("filter").report.text()


def test_the_json_is_json_and_adds_up() -> None:
    report = json.loads(json.dumps(pruned("filter").report.to_json()))
    assert report["criterion"] == "random" and report["private"] is True and report["granularity"] == "filter"
    assert report["ledger"] == [{"what": "pruning by random", "event": {"type": "NoOpDpEvent"}, "count": 1}]
    by_name = {row["name"]: row for row in report["layers"]}
    assert by_name["stem.weight"] == {
        "name": "stem.weight", "shape": [16, 3, 3, 3], "unit": "channels", "kept": 4, "total": 16, "fraction": 0.25,
    }  # fmt: skip
    assert by_name["classifier.weight"]["unit"] == "weights" and by_name["classifier.weight"]["total"] == 640


def test_without_pruning_everything_is_kept() -> None:
    report = prune(build("mlp", 0), Sparsity(), KEY).report
    assert all(row["fraction"] == 1.0 for row in report.to_json()["layers"])


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("PIL.Image")
    path = pruned().report.plot(tmp_path / "densities.png")
    with image.open(path) as picture:
        assert picture.width > 300 and len(picture.convert("L").getcolors()) > 5
