"""Whole training runs of a second, on made-up images: to be compared byte by byte, stopped, killed and taken up again."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsedp import statement, training
from sparsedp.config import Data, Mechanism, Optim, Run, Runtime, Sparsity
from sparsedp.dp import accounting
from sparsedp.training import Result, Stopped
from tests.data.pictures import save_idx

UNITS, STEPS = 60, 6
VOLATILE = ("seconds", "throughput")
_known: dict[Any, Any] = {}


def quick_accounting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same events cost the same: ask the accountant once for all tests. What it answers has tests of its own."""

    def remembered(method: Callable[..., Any]) -> Callable[..., Any]:
        def ask(parts: Any, delta: float, relation: str) -> Any:
            asked = (method, frozenset(parts.items()), delta, relation)
            if asked not in _known:
                _known[asked] = method(parts, delta, relation)
            return _known[asked]

        return ask

    def profile(ledger: Any, relation: str, ask: Callable[..., Any] = statement.profile) -> Any:
        if (ledger, relation) not in _known:
            _known[ledger, relation] = ask(ledger, relation)
        return _known[ledger, relation]

    monkeypatch.setattr(accounting, "_METHODS", {name: remembered(method) for name, method in accounting._METHODS.items()})
    monkeypatch.setattr(statement, "profile", profile)


def images(place: Path, seed: int | None = None, row: int = 7) -> Path:
    """A data set of MNIST's kind. A seed changes one training image for another: a neighbouring data set."""
    save_idx(place, UNITS)
    if seed is not None:
        path = place / "train-images-idx3-ubyte"
        content = bytearray(path.read_bytes())
        start = 16 + row * 28 * 28
        content[start : start + 28 * 28] = np.random.default_rng(seed).integers(0, 256, 28 * 28, dtype=np.uint8).tobytes()
        path.write_bytes(content)
    return place


def relabelled(place: Path, row: int = 7) -> Path:
    """A neighbouring data set: one label is another."""
    images(place)
    path = place / "train-labels-idx1-ubyte"
    content = bytearray(path.read_bytes())
    content[8 + row] = (content[8 + row] + 1) % 10
    path.write_bytes(content)
    return place


def tiny(place: Path, **changes: Any) -> Run:
    """A run of a few steps. A change is a whole section, or a dict of fields of one."""
    run = Run(
        data=Data(name="mnist", dir=str(place)),
        mechanism=Mechanism(noise_multiplier=1.0, steps=STEPS, batch_size=16, delta=1e-3),
        optim=Optim(lr=0.5, average_decay=0.9),
        runtime=Runtime(engine="functional", checkpoint_every=2, key="known to all", device="cpu"),
    )
    for section, value in changes.items():
        value = dataclasses.replace(getattr(run, section), **value) if isinstance(value, dict) else value
        run = dataclasses.replace(run, **{section: value})
    return run


SPARSE = Sparsity(prune="random", prune_rate=0.3, drop="random", drop_rate=0.4)


def go(run: Run, folder: Path, stop: Callable[[], bool] = lambda: False, **more: Any) -> Result:
    """Train into a folder, with a budget file of its own beside it."""
    before = os.environ.get("SPARSEDP_HOME")
    os.environ["SPARSEDP_HOME"] = f"{folder}-home"
    try:
        return training.train(run, folder, stop=stop, **more)
    finally:
        if before is not None:
            os.environ["SPARSEDP_HOME"] = before


class Heard(training.Silence):
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps: list[int] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, taken: int) -> None:
        self.steps.append(taken)


def after(steps: int) -> Callable[[], bool]:
    """A `stop` that says yes after so many steps."""
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked == steps

    return stop


def die_after(steps: int) -> Callable[[], bool]:
    """A `stop` that ends the process after so many steps, as if the power failed."""
    asked = after(steps)

    def stop() -> bool:
        if asked():
            die()
        return False

    return stop


def stopped(run: Run, folder: Path, steps: int) -> None:
    """Train so many steps and stop."""
    with pytest.raises(Stopped, match="the same command takes the run up again"):
        go(run, folder, after(steps))


def published(folder: Path) -> dict[str, bytes]:
    """All files of public/, but for the declared exceptions: how long it took."""
    found = {str(p.relative_to(folder)): p.read_bytes() for p in sorted((folder / "public").rglob("*")) if p.is_file()}
    summary = json.loads(found["public/summary.json"])
    found["public/summary.json"] = json.dumps({k: v for k, v in summary.items() if k not in VOLATILE}).encode()
    return found


def same_public(one: Path, other: Path) -> None:
    first, second = published(one), published(other)
    assert first.keys() == second.keys(), f"not the same files: {sorted(first.keys() ^ second.keys())}"
    differing = [name for name in first if first[name] != second[name]]
    assert not differing, f"not the same to the byte: {differing}"


def in_a_child(work: Callable[[], Any]) -> int:
    """Do it in a forked process; returns how that ended, as `os.waitpid` says."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def die() -> None:
    """As if the power failed."""
    os.kill(os.getpid(), signal.SIGKILL)
