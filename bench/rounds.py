"""Contenders in alternation: every round asks each for one step, so that noise in the machine hits all alike."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bench.contender import Contender, Failed, Worker

Say = Callable[[str], None]


@dataclass
class Result:
    """What a contender did, step by step; or why it did nothing."""

    name: str
    spec: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None

    @property
    def per_row(self) -> float:
        """Seconds per row, the median over rounds."""
        return median(s["seconds"] / max(s["rows"], 1) for s in self.steps)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def play(contenders: Sequence[Contender], rounds: int, threads: int, say: Say) -> list[Result]:
    """Start all, one after the other; then `rounds` rounds. A contender that fails leaves, the others go on."""
    results = [Result(c.name, c.spec) for c in contenders]
    with tempfile.TemporaryDirectory() as folder:
        workers = [Worker(c, threads, Path(folder) / f"{number}.txt") for number, c in enumerate(contenders)]
        _play(workers, results, rounds, say)
    return results


def _play(workers: Sequence[Worker], results: Sequence[Result], rounds: int, say: Say) -> None:
    try:
        for worker, result in zip(workers, results, strict=True):
            _begin(worker, result, say)
        for number in range(rounds):
            say(f"  round {number + 1} of {rounds}: {_round(workers, results, number)}")
    finally:
        for worker in workers:
            worker.close()


def _begin(worker: Worker, result: Result, say: Say) -> None:
    began = time.perf_counter()
    try:
        worker.start()
        result.versions, result.notes = worker.ready["versions"], worker.ready["notes"]
        say(f"  {result.name}: ready after {time.perf_counter() - began:.0f} s")
    except Failed as failure:
        result.failure = str(failure)
        say(f"  {result.name}: left out, {failure}")
        worker.close()


def _round(workers: Sequence[Worker], results: Sequence[Result], number: int) -> str:
    """Every other round goes backwards, so that nobody always follows the same neighbour."""
    pairs = list(zip(workers, results, strict=True))
    for worker, result in pairs[:: -1 if number % 2 else 1]:
        if result.failure is None:
            try:
                result.steps.append(worker.step())
            except Failed as failure:
                result.failure = str(failure)
    taken = [(r.name, r.steps[-1]["seconds"]) for r in results if r.failure is None]
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in taken)


def fastest(results: Iterable[Result]) -> Result | None:
    """The one with the fewest seconds per row, of those that ran."""
    ran = [r for r in results if r.failure is None and r.steps]
    return min(ran, key=lambda r: r.per_row, default=None)
