"""Many inputs for one parser, in a process of their own that is watched from outside.

Input `number` of a target is a function of (seed, target, number), so what is seen once can be seen again. The worker
says in shared memory which input it has; when it dies or does not move on, that input is to blame, and a new worker
goes on with the next one.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from sparsedp.errors import UsageError
from tests.fuzz.watch import (
    MIB,
    Escape,
    Watch,
    children_seconds,
    lift_limit,
    limit_memory,
    no_sentence,
    peak,
    ran_out,
    resident,
)

ENOUGH = 25
"""So many inputs of one target that end badly, and the rest is not tried."""
DONE, AGAIN = 0, 77  # exit codes of a worker; the second: a new one is wanted
_STATE = struct.Struct("<6q")  # input in hand, accepted, refused, failed, bytes above the start, inputs begun


@dataclass(frozen=True)
class Target:
    """One parser, and how to make inputs for it."""

    name: str
    what: str
    """What is read, in words for the table."""
    make: Callable[[random.Random], Any]
    read: Callable[[Any, Path], object]
    """Parses the input, perhaps by way of the folder, and asserts what must hold of a value that is accepted."""
    megabytes: int = 160
    """How much more memory than before it may ever have resident."""
    seconds: float = 10.0
    share: float = 1.0
    """The part of the inputs asked for that is tried, where one input takes long."""
    refusals: tuple[type[BaseException], ...] = (UsageError,)
    warm: Callable[[Path], object] | None = None
    """Run once before memory is measured: late imports, models."""
    both: bool = True
    """Some inputs must be accepted and some refused, or the inputs are no good."""


@dataclass(frozen=True)
class Failure:
    """One input that ended neither in an accepted value nor in a sentence."""

    number: int
    kind: str
    said: str


@dataclass
class Report:
    """What became of the inputs of one target."""

    target: str
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0
    """Of the processor, in all workers."""
    megabytes: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(row: dict[str, Any]) -> Report:
        return Report(**{**row, "failures": [Failure(**failure) for failure in row["failures"]]})


def random_of(seed: int, target: Target, number: int) -> random.Random:
    """The randomness of one input."""
    return random.Random(f"{seed} {target.name} {number}")


def run(target: Target, inputs: int, seed: int, start: int = 0) -> Report:
    """Try the inputs `start` to `start + inputs`. One worker at a time; this process must have one thread only."""
    report, began = Report(target.name), children_seconds()
    home = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)).resolve()
    shared = mmap.mmap(-1, _STATE.size)
    state = [start, 0, 0, 0, 0, 0]
    shared[:] = _STATE.pack(*state)
    try:
        while state[0] < start + inputs and len(report.failures) < ENOUGH:
            ended = _one_worker(target, seed, start + inputs, shared, home)
            state = list(_STATE.unpack(shared[:]))
            report.failures += _told(home)
            if ended is not None:
                report.failures.append(Failure(state[0], *ended))
                state[3] += 1
            if state[0] < start + inputs:
                state[0] += ended is not None
                shared[:] = _STATE.pack(*state)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    _, report.accepted, report.refused, failed, above, _ = state
    report.inputs, report.megabytes = report.accepted + report.refused + failed, round(above / MIB, 1)
    report.seconds = round(children_seconds() - began, 2)
    return report


def _one_worker(target: Target, seed: int, stop: int, shared: mmap.mmap, home: Path) -> tuple[str, str] | None:
    """None if the worker came to its end or asked for another; else how it ended, in a word and in a few."""
    first = begun = _STATE.unpack(shared[:])[5]
    since = time.monotonic()
    child = os.fork()
    if child == 0:
        _work(target, seed, stop, shared, home)
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code, state = os.waitstatus_to_exitcode(status), _STATE.unpack(shared[:])
            if code in (DONE, AGAIN) and state[5] == sum(state[1:4]):  # every input that was begun was judged
                return None
            if state[5] == first:
                raise RuntimeError(f"the worker for {target.name} could not begin: code {code}")
            return ("crash", signal.Signals(-code).name) if code < 0 else ("exit", f"the process ended with code {code}")
        now = _STATE.unpack(shared[:])[5]
        if now != begun:
            begun, since = now, time.monotonic()
        elif time.monotonic() - since > target.seconds + (30 if begun == first else 0):  # at first, imports
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "hang", f"more than {target.seconds:g} s"
        time.sleep(0.01)


def _work(target: Target, seed: int, stop: int, shared: mmap.mmap, home: Path) -> NoReturn:
    """The worker: never returns into the code of the process that it was forked from."""
    screen = os.dup(2)
    try:
        _Worker(target, seed, shared, home).work(stop)
        os._exit(DONE)
    except BaseException:  # noqa: BLE001 - a fault of this harness: said on the screen, seen as an exit
        os.write(screen, traceback.format_exc().encode())
    finally:
        os._exit(1)


class _Worker:
    def __init__(self, target: Target, seed: int, shared: mmap.mmap, home: Path) -> None:
        self.target, self.seed, self.shared, self.home = target, seed, shared, home
        self.folder = home / "place"
        self.folder.mkdir(exist_ok=True)
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        os.chdir(self.folder)
        sys.dont_write_bytecode = True
        warnings.simplefilter("ignore")
        self.watch = Watch(self.folder)
        if target.warm is not None:
            target.warm(self.folder)
        self.before = peak()
        limit_memory(2 * target.megabytes * MIB + 64 * MIB)
        self.state = list(_STATE.unpack(shared[:]))

    def work(self, stop: int) -> None:
        while self.state[0] < stop:
            self.state[5] += 1
            self._tell()
            outcome = self._outcome(self.state[0])
            above = max(peak() - self.before, 0)
            if outcome in ("accepted", "refused") and above > self.target.megabytes * MIB:
                outcome = f"memory\n{above // MIB} MiB above the start, {self.target.megabytes} allowed"
            self.state[4] = max(self.state[4], above)
            place = {"accepted": 1, "refused": 2}.get(outcome, 3)
            self.state[place] += 1
            if place == 3:
                self._note(outcome)
            self.state[0] += 1
            self._tell()
            if outcome.startswith("memory"):
                os._exit(AGAIN)  # the peak of this process says nothing more

    def _tell(self) -> None:
        self.shared[:] = _STATE.pack(*self.state)

    def _note(self, outcome: str) -> None:
        kind, _, said = outcome.partition("\n")
        with (self.home / "failures").open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(Failure(self.state[0], kind, said))) + "\n")

    def _outcome(self, number: int) -> str:
        """accepted, refused, or a word for what is wrong, a line break, and more about it."""
        given = self.target.make(random_of(self.seed, self.target, number))
        self.watch.armed = True
        try:
            self.target.read(given, self.folder)
            outcome = "accepted"
        except BaseException as error:  # noqa: BLE001 - judging them is what this is for
            self.watch.armed = False
            outcome = self._judged(error, given)
        self.watch.armed = False
        if self.watch.seen:
            outcome, self.watch.seen = f"escape\n{self.watch.seen[0]}", []
        return outcome

    def _without_limit(self, given: Any, error: BaseException) -> str:
        """The same input in a child that may map what it likes: memory that is asked for and never touched harms nobody."""
        allowed = resident(os.getpid()) + self.target.megabytes * MIB
        child = os.fork()
        if child == 0:
            code = 3
            try:
                lift_limit()
                self.watch.armed = True
                self.target.read(given, self.folder)
                code = 0
            except self.target.refusals as refusal:
                code = 1 if not isinstance(refusal, UsageError) or no_sentence(str(refusal)) is None else 2
            finally:
                os._exit(3 if self.watch.seen else code)
        most, since = 0, time.monotonic()
        while not (status := os.waitpid(child, os.WNOHANG))[0]:
            most = max(most, resident(child))
            if most > allowed or time.monotonic() - since > self.target.seconds:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.0005)
        code = os.waitstatus_to_exitcode(status[1])
        return {0: "accepted", 1: "refused"}.get(code, f"memory\n{most // MIB} MiB resident, then code {code}; {_where(error)}")

    def _judged(self, error: BaseException, given: Any) -> str:
        if ran_out(error):
            return self._without_limit(given, error)
        if isinstance(error, self.target.refusals):
            bad = no_sentence(str(error)) if isinstance(error, UsageError) else None
            return "refused" if bad is None else f"message\n{bad}: {str(error)!r:.500}"
        kinds: dict[type[BaseException], str] = {Escape: "escape", AssertionError: "invariant"}
        return f"{kinds.get(type(error), 'exception')}\n{_where(error)}"


def _where(error: BaseException) -> str:
    """The error and the last few places that it came through."""
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    places = " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))
    return f"{type(error).__name__}: {str(error)[:300]!r} at {places}"


def _told(home: Path) -> list[Failure]:
    path = home / "failures"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    path.unlink()
    return [Failure(**json.loads(line)) for line in lines]
