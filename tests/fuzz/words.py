"""Command lines: every command's options with values that do not belong there. What is asked for is read, and not done."""

from __future__ import annotations

from pathlib import Path
from random import Random
from unittest import mock

from sparsedp import cli
from tests.fuzz.harness import Target
from tests.fuzz.trees import NUMBERS, TEXTS

LINES = (
    ("train", "smoke", "--mechanism.steps", "3", "--run-dir", "x"), ("train", "mnist", "--sparsity.drop", "random", "--sparsity.drop-rate", "0.5"),
    ("train", "cifar10", "--optim.lr", "1", "--runtime.export", "onnx", "--data.dir", "x", "--dry-run"), ("evaluate", "run", "--average", "--json"),
    ("predict", "run", "a.png", "b.png"), ("account", "--num-examples", "100", "--batch-size", "10", "--steps", "5", "--noise-multiplier", "1"),
    ("prune", "smoke", "--criterion", "random", "--rate", "0.5", "--out", "m"), ("explain", "smoke", "--json"), ("doctor", "run", "--examples", "5"),
    ("audit", "smoke", "--runs", "5", "--no-real-job"), ("--help",), ("--version",), ("train", "--help"),
)  # fmt: skip
WORDS = (
    *TEXTS,
    *map(str, NUMBERS),
    *(word for line in LINES for word in line),
    "--",
    "-",
    "--=",
    "--mechanism",
    "--json=5",
    "True",
    "None",
    "@x",
    "-h",
)


def make(rng: Random) -> list[str]:
    words = list(rng.choice(LINES))
    while rng.random() < 0.8:
        place = rng.randrange(len(words) + 1)
        words[place : place + rng.choice((0, 1, 1, 1, 2))] = [rng.choice(WORDS)] * rng.choice((0, 1, 1, 1, 1))
    return words


def read(words: list[str], place: Path) -> None:
    """0 where the line was read; a sentence and 2 where it was not."""
    said: list[str] = []
    with mock.patch.object(cli, "_do", lambda *options: 0), mock.patch("sys.stderr.write", said.append):
        try:
            code = cli.main(words)
        except SystemExit as stop:
            code = stop.code  # type: ignore[assignment]
    assert code in (0, None, cli.SAID), code
    assert code != cli.SAID or not words or not "".join(said).startswith("Traceback")
    if code == cli.SAID:
        raise SystemExit(code)


TARGETS = (
    Target(
        "command-line",
        "command lines",
        make,
        read,
        share=0.05,
        refusals=(SystemExit,),
        warm=lambda place: read(list(LINES[0]), place),
    ),
)
