"""The examples run as they stand, and the README's snippet is code that runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
NUMBERED = ("01_own_loop", "02_whole_run", "03_patients", "04_own_pruning_criterion")


def said_by(name: str, *arguments: str) -> str:
    """What an example prints; it may warn of nothing, but for what dp_accounting logs of the orders that it leaves out."""
    program = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert not [line for line in done.stderr.splitlines() if not re.match("WARNING:absl:.* Excluding this order", line)]
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    """The numbers that the groups of a pattern find in a text."""
    found = re.search(pattern, text)
    assert found, text
    return [float(group) for group in found.groups()]


def test_every_example_is_numbered_and_run_here() -> None:
    """The script that recomputes epsilon is known by its name to every statement; tests/test_statement.py runs it."""
    assert sorted(p.stem for p in EXAMPLES.glob("*.py")) == sorted([*NUMBERED, "recompute_epsilon"])
    assert [name[:2] for name in NUMBERED] == [f"{i:02}" for i in range(1, len(NUMBERED) + 1)]


def test_an_own_loop_learns_and_keeps_its_target() -> None:
    accuracy, epsilon, delta = numbers(r"accuracy ([\d.]+) %, epsilon ([\d.]+) at delta ([\d.e-]+)", said_by("01_own_loop"))
    assert accuracy > 80, "of three classes"
    assert 2.95 < epsilon <= 3.0 and delta == 1e-5


def test_a_whole_run_learns_and_publishes() -> None:
    said = said_by("02_whole_run")
    accuracy, epsilon = numbers(r"accuracy ([\d.]+) %, epsilon ([\d.]+)", said)
    assert accuracy > 20, "of ten classes, after a minute's training"
    assert 2.95 < epsilon <= 3.0
    assert all(
        f"'{name}'" in said for name in ("model.safetensors", "privacy.md", "privacy.json", "ledger.json", "summary.json")
    )


def test_patients_are_what_is_counted() -> None:
    patients, epsilon = numbers(r"(\d+) patients, epsilon ([\d.]+) for each", said_by("03_patients"))
    generator = torch.Generator().manual_seed(0)
    assert patients == len(torch.randint(0, 500, (2000,), generator=generator).unique()) < 500
    assert 3.95 < epsilon <= 4.0


def test_an_own_criterion_keeps_a_tenth() -> None:
    said = said_by("04_own_pruning_criterion")
    kept = [[int(n.replace(",", "")) for n in row] for row in re.findall(r"\d\.weight +[\dx]+ +([\d,]+) +([\d,]+)", said)]
    assert [of for _, of in kept] == [400, 12_800, 20_480] and sum(k for k, _ in kept) == 3368
    assert kept[0][0] / 400 > 0.5 > kept[2][0] / 20_480, "layer-adaptive: the small layer keeps most"


def test_the_snippet_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """To the letter, but for three numbers, on made-up data."""
    snippet = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert len(snippet) == 1
    code = snippet[0]
    for whole, small in (("50_000", "2_000"), ("batch_size=1024", "batch_size=400"), ("steps=1000", "steps=20")):
        assert code.count(whole) == 1
        code = code.replace(whole, small)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(2000, 12, generator=generator)
    labels = (images[:, 0] > 0).long()
    model = nn.Linear(12, 2)
    before = model.weight.detach().clone()
    names: dict[str, Any] = {"nn": nn, "model": model, "images": images, "labels": labels}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=1.0)
    exec(compile(code, "README.md", "exec"), names)
    assert 2.9 < float(capsys.readouterr().out) <= 3.0
    assert names["private"].taken == 20 and not torch.equal(model.weight, before)
    assert float((model(images).argmax(1) == labels).float().mean()) > 0.8
