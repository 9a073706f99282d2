"""Outcomes in a file, so that the mutants can be tried in slices. One whose code or test has changed since does not count."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.mutants.running import Outcome, Task
from tests.mutants.values import ROOT, SOURCE, patched


def by_fingerprint(tasks: Sequence[Task]) -> dict[str, Task]:
    """Tasks by what their outcome depends on: the tests, and the patched files; of the code as it is, all of it."""
    right = [path.read_text("utf-8") for path in sorted(SOURCE.rglob("*.py"))]
    found = {}
    for task in tasks:
        texts = patched(task.mutant).values() if task.mutant else right
        files = sorted({test.split("::")[0] for test in task.tests})
        parts = [task.key, *task.tests, *texts, *((ROOT / name).read_text("utf-8") for name in files)]
        found[hashlib.sha256("\0".join(parts).encode()).hexdigest()] = task
    return found


class Kept:
    """The outcomes in a JSON file; without a file, those of this run. Only what went as it should is kept."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._entries = json.loads(path.read_text("utf-8")) if path is not None and path.exists() else {}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def outcome(self, name: str, task: Task) -> Outcome:
        """What became of this task."""
        return Outcome(task.mutant, task.tests, **self._entries[name])

    def put(self, name: str, outcome: Outcome) -> None:
        """Add one."""
        values = asdict(outcome)
        self._entries[name] = {field: values[field] for field in ("code", "killer", "seconds", "processor")}
        if self.path is not None:
            self.path.write_text(json.dumps(self._entries, indent=1), "utf-8")
