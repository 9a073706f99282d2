"""All targets, and what is asked of each of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from tests.fuzz import harness, pixels, runs, sets, tensors, words
from tests.fuzz.harness import Failure, Report, Target

GROUPS: dict[str, tuple[Target, ...]] = {
    "runs": runs.TARGETS, "tensors": tensors.TARGETS, "sets": sets.TARGETS, "pixels": pixels.TARGETS, "words": words.TARGETS,
}  # fmt: skip
TARGETS = tuple(target for targets in GROUPS.values() for target in targets)
FEW = 100
"""From so many inputs on, some must be accepted and some refused."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def begin_with_one_thread() -> None:
    """Begin this process anew if its libraries may have started threads when they were loaded."""
    if any(os.environ.get(name) != value for name, value in ONE_THREAD.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **ONE_THREAD})


def tried(targets: Iterable[Target], inputs: int, seed: int) -> Iterator[Report]:
    """What becomes of each target's share of the inputs, one target after the other."""
    tasks = Path("/proc/self/task")
    if tasks.is_dir() and len(list(tasks.iterdir())) > 1:
        raise RuntimeError("this process has more than one thread, and a copy of it might wait for ever")
    for target in targets:
        yield judged(target, harness.run(target, max(1, round(inputs * target.share)), seed))


def judged(target: Target, report: Report) -> Report:
    """Inputs of which all are accepted, or all refused, are no test: that is a failure too."""
    if not target.both or report.inputs < FEW or (report.accepted and report.refused):
        return report
    one_sided = Failure(-1, "inputs", "not one was refused" if report.accepted else "not one was accepted")
    return replace(report, failures=[*report.failures, one_sided])
