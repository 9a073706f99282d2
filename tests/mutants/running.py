"""Runs mutants: each in a forked process whose `sparsedp` is the wrong copy.

The parent has imported the heavy libraries but never sparsedp, so a child starts in no time and imports the wrong one.
"""

from __future__ import annotations

import contextlib
import importlib
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
class Outcome:
    """What the tests said of a mutant: `killer` is the first test that failed, None when they all passed."""

    mutant: Mutant | None
    code: int
    killer: str | None
    seconds: float
    output: str

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


def outcomes(mutants: Sequence[Mutant | None], workers: int = 2) -> Iterator[Outcome]:
    """One outcome after the other, in the order given. `None` is the code as it is, against every killer."""
    for name in PRELOADED:
        importlib.import_module(name)
    if "sparsedp" in sys.modules:
        raise AssertionError("sparsedp was imported before its wrong copies were made")
    killers = sorted({killer for mutant in mutants if mutant for killer in mutant.killers})
    tasks = [(mutant, list(mutant.killers) if mutant else killers) for mutant in mutants]
    with multiprocessing.get_context("fork").Pool(workers, maxtasksperchild=1) as pool:
        yield from pool.imap(_one, tasks, chunksize=1)


def _one(task: tuple[Mutant | None, list[str]]) -> Outcome:
    mutant, killers = task
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        write_copy(Path(folder), mutant)
        sys.path.insert(0, folder)
        os.chdir(ROOT)
        watcher, log = _FirstFailure(folder), Path(folder) / "output"
        with log.open("w") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = _run_pytest(killers, watcher)
        if watcher.foreign:
            code = 70
        return Outcome(mutant, code, watcher.killer, time.monotonic() - started, log.read_text("utf-8")[-4000:])


def _run_pytest(killers: list[str], watcher: _FirstFailure) -> int:
    def late(*_: object) -> None:
        raise KeyboardInterrupt  # pytest ends at once, with a code of its own: a mutant that hangs is not a mutant that was caught

    signal.signal(signal.SIGALRM, late)
    signal.alarm(TIME_LIMIT)
    sys.path.insert(1, str(ROOT))
    os.environ["SPARSEDP_TEST_PROFILE"] = "mutants"  # a failure need not be made small
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plugins that happen to be installed cost a second each time
    return int(pytest.main(["-x", "-q", "--tb=short", "-p", "no:cacheprovider", *killers], plugins=[watcher]))
