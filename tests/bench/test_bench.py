"""The comparison at a toy size: workers, rounds, tables, figures; and the peers' rules against ours."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.contender import Contender
from bench.parts import DEFAULT, GPU, Part, contenders, plain
from bench.rounds import Result, fastest, play
from bench.targets import targets
from torch import nn

from bench import __main__ as command
from bench import environments, measuring, ratios, report
from sparsedp.dp.clipping import Rows, reference
from sparsedp.models.wrn import WideResNet

TOY = Part(
    name="toy", model="small_cnn", shape=(1, 16, 16), batch=2, views=2, rounds=2, baselines=(("channels_last", 4),),
    private=((2, "weight", 0.5),),
)  # fmt: skip


def made_up(name: str, seconds: list[float], memory: int, **spec: Any) -> dict[str, Any]:
    steps = [{"seconds": s, "processor": s, "rows": 10, "phases": {}, "memory": memory} for s in seconds]
    return Result(name, {"batch": 10, **spec}, {"torch": "1"}, {}, steps).to_json()


def measured(part: Part, results: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "part": measuring.plain_values(part), "threads": 1, "machine": measuring.machine(), "sources": "", "began": 0.0, "seconds": 1.0,
        "load": [0.0, 0.0], "layouts": [], "results": results,
    }  # fmt: skip


def test_a_round_with_our_own_workers(tmp_path: Path) -> None:
    said: list[str] = []
    found = measuring.measure(TOY, 1, said.append)
    names = [r["name"] for r in found["results"]]
    assert names == ["plain SGD", "fast, dense", "private step, expected batch 2, weight 0.5"]
    for result in found["results"]:
        assert result["failure"] is None
        assert len(result["steps"]) == TOY.rounds
        assert all(s["rows"] == 4 and s["seconds"] > 0 and s["memory"] > 0 for s in result["steps"])
        assert result["versions"]["torch"] == torch.__version__
    measuring.save(tmp_path / "toy.json", found)
    again = measuring.load(tmp_path / "toy.json")
    assert again == json.loads(json.dumps(found))
    assert measuring.is_done(again, TOY, 1)
    assert not measuring.is_done(again, TOY, 2)
    assert not measuring.is_done(again, replace(TOY, rounds=3), 1)
    assert not measuring.is_done(None, TOY, 1)
    assert len([line for line in report.table(found).splitlines() if "x |" in line]) == 3


def test_who_fails_is_left_out_and_said_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environments, "python", partial(python_or_not, environments.python))
    spec = TOY.spec(layout="channels_last")
    some = [
        Contender(name="absent", worker="plain", spec=spec, environment="peer"),
        Contender(name="broken", worker="plain", spec={**spec, "model": "no_such_model"}),
        Contender(name="whole", worker="operations", spec={**spec, "drop": "random", "granularity": "filter", "rate": 0.5}),
    ]
    results = play(some, 1, 1, lambda text: None)
    assert results[0].failure == "no network"
    assert "no_such_model" in (results[1].failure or "")
    assert results[2].failure is None
    assert set(results[2].steps[0]["phases"]) == {"selection", "noise", "update", "average"}
    assert fastest(results[:2]) is None
    assert "not measured: ended with 1" in report.table(measured(TOY, [r.to_json() for r in results]))


def python_or_not(known: Callable[[str], Path], name: str) -> Path:
    if name == "peer":
        raise environments.NoEnvironment("no network")
    return known(name)


def test_an_environment_that_cannot_be_made_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environments, "HOME", tmp_path)
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'ERROR: no such version' >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(environments.NoEnvironment, match="-m venv --clear failed: ERROR: no such version"):
        environments.python("jax")


def test_ratios_are_within_a_round_and_medians_over_rounds() -> None:
    found = measured(TOY, [made_up("plain SGD", [1.0, 2.0, 4.0], 100), made_up("fast, dense", [2.0, 6.0, 4.0], 150)])
    assert ratios.ratio(found, "fast, dense") == 2.0
    assert ratios.memory_ratio(found, "fast, dense") == 1.5
    assert ratios.ratio(found, "nobody") is None
    assert "| fast, dense | 400 | 200 to 600 | 2.00x | 1.50x | 0 |" in report.table(found)


def test_targets_are_judged() -> None:
    by = {p.name: p for p in DEFAULT}
    names = ["fast, dense", "fast, weight 0.5", "fast, weight 0.9", "fast, filter 0.9"]
    k1 = measured(by["k1"], [made_up("plain SGD", [1.0], 100), *(made_up(n, [1.3], 120) for n in names)])
    verdicts = {line.split("|")[1].strip(): line.split("|")[4].strip() for line in targets({"k1": k1}).splitlines()[2:]}
    assert verdicts["K = 1, dense DP-SGD"] == "**missed**"
    assert verdicts["K = 1, weight-granular DP-SSGD (the worse of 0.5, 0.9)"] == "met"
    assert verdicts["K = 1, filter-granular, drop 0.9"] == "**missed**"
    assert verdicts["peak memory over plain SGD's, WRN-16-4, dense"] == "met"
    assert verdicts["O(parameters) work of a step of 1024, WRN-28-10 (the worst)"] == "not measured"


def test_page_and_figures_from_any_part_of_the_numbers(tmp_path: Path) -> None:
    results, docs = tmp_path / "results", tmp_path / "docs"
    report.write(results, docs)
    page = (docs / "performance.md").read_text()
    assert "fill:" not in page
    assert page.count("Not measured yet") == len(DEFAULT) + len(GPU)
    for part in (*DEFAULT, *GPU):
        made = [made_up(c.name, [1.0, 1.1], 100, **c.spec) for c in contenders(part)]
        for result in made if part.operations else []:
            for step in result["steps"]:
                step["phases"] = dict.fromkeys(("selection", "noise", "update", "average"), 0.5)
        made += [made_up("plain SGD", [1.0, 1.0], 100)] if part.baselines else []
        measuring.save(results / f"{part.name}.json", measured(part, made))
    assert command.main(command.Options(parts=("report",), results=results, docs=docs)) == 0
    page = (docs / "performance.md").read_text()
    assert "Not measured yet" not in page
    assert "A step of 1024 examples is 108 s" in page
    assert "| 2.00 | 1.86% |" in page
    for figure in ("k1", "k16", "curve", "scaling"):
        assert (docs / "figures" / f"speed_{figure}.png").stat().st_size > 5000


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert command.main(command.Options(parts=("k2",), results=tmp_path, docs=tmp_path)) == 2
    assert "k1, k16" in capsys.readouterr().err


def test_every_default_part_is_what_the_targets_read() -> None:
    by = {p.name: {c.name for c in contenders(p)} for p in DEFAULT}
    assert len(by) == len(DEFAULT)
    for name in ("k1", "k16"):
        assert {"fast, dense", "fast, weight 0.5", "fast, weight 0.9", "fast, filter 0.9", "Opacus, hooks"} <= by[name]
    assert len(plain(next(p for p in DEFAULT if p.name == "k1"))) == 6
    assert all(p.rounds >= 5 for p in DEFAULT if p.baselines)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("mode", "views"), [("hooks", 1), ("hooks", 2), ("ghost", 1), ("functorch", 1)])
def test_opacus_computes_what_the_reference_computes(mode: str, views: int) -> None:
    pytest.importorskip("opacus")
    from bench.workers import common, opacus_peer

    spec: dict[str, Any] = {"model": "wrn_10_1", "shape": (3, 8, 8), "batch": 3, "views": views, "device": "cpu", "mode": mode}
    images, labels = opacus_peer.load(spec)
    model = common.shipped_model(spec)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = reference(model, common.cross_entropy, Rows.make(images, labels, views=views), {}, 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opacus_peer, "shipped_model", lambda spec: model)
        opacus_peer.build(spec, (images, labels))()
    for name, p in model.named_parameters():
        moved = (before[name] - p.detach()) / common.LEARNING_RATE * spec["batch"]
        torch.testing.assert_close(moved, expected[name], rtol=2e-2, atol=2e-3)


def test_the_independent_network_is_the_same_network() -> None:
    from bench.workers.independent import network

    ours, theirs = WideResNet(16, 1, 10), network(16, 1, 3, 10)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    images = torch.randn(2, 3, 32, 32)
    copy_in_order(ours, theirs)
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-4, atol=1e-4)


def copy_in_order(source: nn.Module, target: nn.Module) -> None:
    """Ours has (norm1, conv1, norm2, conv2, skip_norm, skip_conv) in a block, the other (convolutions, norms, skip)."""
    given, taken = [], []
    for block in (m for m in source.modules() if type(m).__name__ == "Block"):
        skip = [] if block.skip_conv is None else [block.skip_norm, block.skip_conv]
        given += [block.conv1, block.conv2, block.norm1, block.norm2, *skip]
    for block in (m for m in target.modules() if type(m).__name__ == "Block"):
        skip = list(block.skip)[1:] if isinstance(block.skip, nn.Sequential) else []
        taken += [block.first, block.second, *block.norms, *skip]
    layers = list(target.children())
    given += [source.stem, source.norm, source.classifier]
    taken += [layers[0], layers[-4], layers[-1]]
    with torch.no_grad():
        for one, other in zip(given, taken, strict=True):
            for name, p in one.named_parameters():
                q = getattr(other, name)
                q.copy_(p.reshape(q.shape))
