"""What all runs on one data set have spent together: one file per data set, kept by the operator, outside every run.

Two runs on the same images cost more than either says. Each run is entered before its first step with what it is going
to spend, and corrected when it ends. A published data set is known by its name, another one by the folder that it is read
from: by nothing that its records hold, so that what a run says of the file (how many runs, what they spent) tells nothing
about them. Part of a data set counts as all of it; a copy in another folder is the operator's to count.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import pooch
from dp_accounting import NonPrivateDpEvent

from sparsedp import disk
from sparsedp.config import Data
from sparsedp.data.check import PUBLISHED
from sparsedp.dp.accounting import epsilon, parts_of
from sparsedp.dp.ledger import Ledger
from sparsedp.errors import UsageError
from sparsedp.planning import Budget


class Notes(Protocol):
    def note(self, text: str) -> None: ...


class Account(Protocol):
    """Where a run enters what it spends; used as a context around the run."""

    def __enter__(self) -> Any: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...
    def spent(self, ledger: Ledger, finished: bool = True) -> None: ...
    def together(self) -> dict[str, Any]: ...


class EnteredAlready:
    """The account of a run that is part of something entered as a whole, before it began."""

    def __enter__(self) -> EnteredAlready:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def spent(self, ledger: Ledger, finished: bool = True) -> None: ...

    def together(self) -> dict[str, Any]:
        return {}


def home() -> Path:
    """Where budget files are: SPARSEDP_HOME, or the user's data folder."""
    return Path(os.environ.get("SPARSEDP_HOME") or pooch.os_cache("sparsedp")) / "budgets"


def place(data: Data) -> Path:
    """The file of a data set."""
    source = "" if data.name in PUBLISHED else str(Path(data.dir or "").expanduser().resolve())
    return home() / f"{data.name}{'-' + hashlib.sha256(source.encode()).hexdigest()[:16] if source else ''}.json"


class BudgetFile:
    """One run's entry in its data set's file; used as a context around the run."""

    def __init__(self, path: Path, data: str, run: str, plan: Budget, delta: float, notes: Notes, private: bool = True) -> None:
        self.path, self._data, self._run, self._plan, self._delta, self._notes = path, data, run, plan, delta, notes
        self._private = private

    def __enter__(self) -> BudgetFile:
        self.spent(self._plan.at_end, finished=False)
        others = [r for name, r in self.runs().items() if name != self._run]
        if others:
            self._notes.note(self._told(len(others)))
        return self

    def _told(self, others: int) -> str:
        """What the operator reads who goes on with data that were used before."""
        found = self.together()
        private, naked = found["runs"] - found["not_private"], found["not_private"]
        used = "1 other run has" if others == 1 else f"{others} other runs have"
        spent = f"epsilon {found['epsilon']:.3f} at delta {self._delta:g}"
        if math.isinf(found["epsilon"]):
            spent = "more than any epsilon can tell"
        said = [f"{_among(private, self._private)} {spent}"] if private else []
        if naked:
            said.append(f"{naked} of all {'is' if naked == 1 else 'are'} not private, so that no epsilon holds there")
        return f"{used} used {self._data}: {'; '.join(said)} (see {self.path})."

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """A run that did not end stays entered with all that it may still spend."""

    def runs(self) -> dict[str, Any]:
        """All entries by run folder."""
        if not self.path.exists():
            return {}
        found = disk.read_json(self.path, "the data set's budget file")
        runs = found.get("runs") if isinstance(found, dict) else None
        if not isinstance(runs, dict) or not all(isinstance(run, dict) and "ledger" in run for run in runs.values()):
            raise UsageError(f"The data set's budget file {self.path} does not hold runs with their ledgers; restore it.")
        return runs

    def spent(self, ledger: Ledger, finished: bool = True) -> None:
        """Enter, or correct, what this run spends."""
        disk.make_folder(self.path.parent, 0o700)
        with disk.one_at_a_time(self.path.with_suffix(".lock")):
            runs = self.runs()
            runs[self._run] = {"finished": finished, "private": self._private, "ledger": ledger.to_json()}
            disk.write_json(self.path, {"data": self._data, "runs": runs}, mode=0o600)

    def together(self) -> dict[str, Any]:
        """How many runs there were, how many of them are not private, and what the others spent."""
        runs = self.runs()
        return {"runs": len(runs), "not_private": sum(not _private(run) for run in runs.values()), "epsilon": self.total()}

    def total(self) -> float:
        """Epsilon of everything private that was done with this data set, composed jointly. A run that is not private has none."""
        everything = Ledger()
        for entry in self.runs().values():
            for part in Ledger.from_json(entry["ledger"]).entries if _private(entry) else ():
                everything = everything.append(part.what, part.event, part.count)
        return epsilon(everything, self._delta).epsilon


def _private(entry: Mapping[str, Any]) -> bool:
    """Whether an epsilon holds for a run: nobody chose its key, and it released nothing without noise."""
    return bool(entry.get("private", True)) and NonPrivateDpEvent() not in parts_of(Ledger.from_json(entry["ledger"]))


def _among(private: int, this_one: bool) -> str:
    """Those of the runs that are private."""
    if this_one:
        return "together with this one they spend" if private > 1 else "this one spends"
    return "those that are private spend"
