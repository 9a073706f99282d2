"""Runs mutants: each in a forked process whose `sparsedp` is the wrong copy.

The parent has imported the heavy libraries but never sparsedp, so a child starts in no time and imports the wrong one.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mutants.values import ROOT, Mutant, write_copy

TIME_LIMIT = 300
PRELOADED = ("torch", "torch.func", "numpy", "scipy.stats", "dp_accounting", "pytest", "hypothesis", "hypothesis.strategies")


@dataclass(frozen=True)
class Task:
    """Tests to be run against a mutant, or against the code as it is (None); `key` changes the random numbers of the tests."""

    mutant: Mutant | None
    tests: tuple[str, ...]
    key: str = ""


@dataclass(frozen=True)
class Outcome:
    """What the tests said: `killer` is the first test that failed, None when they all passed. `processor` is seconds, with children."""

    mutant: Mutant | None
    tests: tuple[str, ...]
    code: int
    killer: str | None
    seconds: float
    processor: float
    output: str = ""

    @property
    def killed(self) -> bool:
        """A test ran and failed. A copy that cannot even be imported, or a test that does not exist, does not count."""
        return self.code == 1 and self.killer is not None


class _FirstFailure:
    """A pytest plugin: which test failed first, in its body, and that the package under test is the copy."""

    def __init__(self, folder: str) -> None:
        self.folder, self.killer, self.foreign = folder, None, False

    def pytest_runtest_logreport(self, report: object) -> None:
        if report.failed and report.when == "call" and self.killer is None:  # type: ignore[attr-defined]
            self.killer = report.nodeid  # type: ignore[attr-defined]

    def pytest_collection_finish(self) -> None:
        package = sys.modules.get("sparsedp")
        self.foreign = package is None or not str(package.__file__).startswith(self.folder)


STATISTICAL = tuple(
    f"tests/dp/test_{name}.py" for name in ("randomness", "sampling", "discrete", "noise", "selection", "mechanism")
)
"""Where a test looks at random numbers, so that right code could fail it under an unlucky key."""


def against(mutants: Sequence[Mutant]) -> list[Task]:
    """Every mutant against its own killers."""
    return [Task(mutant, tuple(mutant.killers)) for mutant in mutants]


def clean(mutants: Sequence[Mutant]) -> list[Task]:
    """The code as it is against every killer of these mutants, file by file: whoever fails here cries wolf."""
    killers = sorted({killer for mutant in mutants for killer in mutant.killers})
    return [Task(None, tuple(tests)) for _, tests in itertools.groupby(killers, key=lambda killer: killer.split("::")[0])]


def repeats(times: int) -> list[Task]:
    """The code as it is against the statistical tests, so often, each time under a key of its own."""
    return [Task(None, STATISTICAL, f"{number}") for number in range(1, times + 1)]


def outcomes(tasks: Sequence[Task], workers: int = 2) -> Iterator[Outcome]:
    """One outcome after the other, in the order given."""
    for name in PRELOADED:
        importlib.import_module(name)
    if "sparsedp" in sys.modules:
        raise AssertionError("sparsedp was imported before its wrong copies were made")
    with multiprocessing.get_context("fork").Pool(workers, maxtasksperchild=1) as pool:
        yield from pool.imap(_one, tasks, chunksize=1)


def _one(task: Task) -> Outcome:
    os.environ["SPARSEDP_TEST_KEY"] = task.key
    started, worked = time.monotonic(), _processor()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        write_copy(Path(folder), task.mutant)
        sys.path.insert(0, folder)
        os.chdir(ROOT)
        watcher, log = _FirstFailure(folder), Path(folder) / "output"
        with log.open("w") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = _run_pytest(list(task.tests), watcher)
        if watcher.foreign:
            code = 70
        took, worked = time.monotonic() - started, _processor() - worked
        return Outcome(task.mutant, task.tests, code, watcher.killer, took, worked, log.read_text("utf-8")[-4000:])


def _processor() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _run_pytest(killers: list[str], watcher: _FirstFailure) -> int:
    def late(*_: object) -> None:
        raise KeyboardInterrupt  # pytest ends at once, with a code of its own: a mutant that hangs is not a mutant that was caught

    signal.signal(signal.SIGALRM, late)
    signal.alarm(TIME_LIMIT)
    sys.path.insert(1, str(ROOT))
    os.environ["SPARSEDP_TEST_PROFILE"] = "mutants"  # a failure need not be made small
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plugins that happen to be installed cost a second each time
    return int(pytest.main(["-x", "-q", "--tb=short", "-p", "no:cacheprovider", *killers], plugins=[watcher]))
