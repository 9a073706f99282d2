"""Worker processes that die while they decode: one, all of them, ever again, or so that no new one can be started."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sparsedp.data import workers
from tests.faults import children
from tests.faults.worlds import HOME, Outcome, World, charged, entered, finish, unclear

Worker = Any


def at_random(world: World, count: int, seed: int = 9) -> Iterator[Outcome]:
    """Another thread kills a random worker at a random moment; the run notices nothing."""
    for number in range(count):
        own = random.Random(f"{seed} {number}")
        kind, said = "a decoding worker is killed at a random moment", "another took its place; the same bytes"
        yield _undisturbed(world, kind, lambda own=own: _killing_once(own, world.seconds), said)  # type: ignore[misc]


def in_mid_answer(world: World, count: int, seed: int = 10) -> Iterator[Outcome]:
    """A worker dies between the request and the answer: that one, or all of them."""
    own = random.Random(seed)
    for number in range(count):
        call, everyone = own.randint(1, 150), number % 2 == 0
        kind = f"{'all workers are' if everyone else 'a worker is'} killed in the middle of a request"
        yield _undisturbed(world, kind, lambda c=call, e=everyone: _kill_at(c, e), "others took their place; the same bytes")  # type: ignore[misc]


def without_successors(world: World, count: int, seed: int = 11) -> Iterator[Outcome]:
    """A worker dies and the system starts no other process: the run ends in a sentence."""
    own = random.Random(seed)
    for number in range(count):
        call, error = own.randint(1, 150), (errno.EAGAIN, errno.ENOMEM)[number % 2]
        folder = world.folder()

        def work(call: int = call, error: int = error, folder: Any = folder) -> None:
            _kill_at(call, False, lambda: _no_more_processes(error))
            world.train(folder)()

        ended = children.run(work)
        wrong = unclear(ended, world.place, os.strerror(error)) or finish(world, folder, ended.noised)
        if not wrong:
            world.forget(folder)
        kind = "a worker is killed and no other can be started"
        yield Outcome(
            kind,
            f"request {call}",
            "a sentence, then resumed to the same bytes",
            wrong and f"request {call}, {folder}: {wrong}",
        )


def by_one_image(world: World, count: int, seed: int = 12) -> Iterator[Outcome]:
    """One image kills every worker that opens it: before the run begins that is said with its name, afterwards without."""
    own = random.Random(seed)
    for number in range(count):
        folder, from_step = world.folder(), (number % 4) - 1
        victim = f"{own.randrange(36):05d}.png"

        def work(victim: str = victim, from_step: int = from_step, folder: Any = folder) -> None:
            steps = _steps_begun()
            _killed_by(lambda encoded: str(encoded).endswith(victim) and "train" in str(encoded) and steps() > from_step)
            world.train(folder)()

        ended = children.run(work)
        if from_step < 0:
            kind, came = "an image kills every worker, from the start", "a sentence that names the file; nothing was spent"
            wrong = unclear(ended, world.place) or ("" if victim in ended.text else "the file is not named")
            wrong = wrong or ("something was spent" if charged(folder) or entered(folder) else "")
        else:
            kind, came = (
                "an image kills every worker, once training has begun",
                "a sentence that names no file, then resumed to the same bytes",
            )
            wrong = "" if ended.how == "done" else unclear(ended, world.place)
            came = "no later batch had it; the same bytes" if ended.how == "done" else came
            wrong = wrong or ("the file is named" if victim in ended.text else "") or finish(world, folder, ended.noised)
        world.forget(folder)
        yield Outcome(kind, victim, came, wrong)


def _undisturbed(world: World, kind: str, disturb: Callable[[], Any], came: str) -> Outcome:
    folder = world.folder()

    def work() -> int:
        killed = disturb()
        world.train(folder)()
        return int(killed())

    ended = children.run(work)
    wrong = f"it {ended.how}: {ended.text}" if ended.how != "done" else "no worker was killed" if ended.text == "0" else ""
    wrong = wrong or finish(world, folder, ended.noised)
    if not wrong:
        world.forget(folder)
    return Outcome(kind, f"{ended.text} killed", came, wrong and f"{folder}: {wrong}")


def _killing_once(own: random.Random, seconds: float) -> Callable[[], int]:
    workers_, killed = _started(), 0

    def reap() -> None:
        nonlocal killed
        time.sleep(own.uniform(0.05, 0.9) * seconds)
        while not workers_:
            time.sleep(0.01)
        killed += _kill(own.choice(workers_))

    threading.Thread(target=reap, daemon=True).start()
    return lambda: killed


def _kill_at(call: int, everyone: bool, then: Callable[[], None] = lambda: None) -> Callable[[], int]:
    workers_, calls, killed, asking = _started(), 0, 0, workers._Worker.decode

    def decode(self: Worker, *given: Any) -> Any:
        nonlocal calls, killed
        calls += 1
        if calls == call:
            then()
            killed += sum(_kill(worker) for worker in (workers_ if everyone else [self]))
        return asking(self, *given)

    workers._Worker.decode = decode  # type: ignore[method-assign]
    return lambda: killed


def _killed_by(deadly: Callable[[Any], bool]) -> None:
    asking = workers._Worker.decode

    def decode(self: Worker, encoded: Any, *given: Any) -> Any:
        if deadly(encoded):
            _kill(self)
            self._child.wait()
        return asking(self, encoded, *given)

    workers._Worker.decode = decode  # type: ignore[method-assign]


def _started() -> list[Worker]:
    """All workers that are started from now on."""
    found: list[Worker] = []
    start = workers._Worker.__init__

    def started(self: Worker) -> None:
        start(self)
        found.append(self)

    workers._Worker.__init__ = started  # type: ignore[method-assign]
    return found


def _no_more_processes(error: int) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(error, os.strerror(error))

    subprocess.Popen = refuse  # type: ignore[misc,assignment]


def _steps_begun() -> Callable[[], int]:
    from sparsedp.private import Private

    begun, step = 0, Private.backward

    def backward(self: Private, batch: Any) -> None:
        nonlocal begun
        begun += 1
        step(self, batch)

    Private.backward = backward  # type: ignore[method-assign]
    return lambda: begun


def _kill(worker: Worker) -> int:
    """1 if it was there to be killed."""
    if worker._child.poll() is not None:
        return 0
    worker._child.send_signal(signal.SIGKILL)
    return 1


def alive(folder: Path, patience: float = 5.0) -> int:
    """How many workers of a run that is dead are still there after a while; they are known by their environment."""
    mark, until = f"SPARSEDP_HOME={folder}{HOME}\0".encode(), time.monotonic() + patience
    while True:
        count = sum(mark in _environment(place) for place in Path("/proc").glob("[0-9]*"))
        if not count or time.monotonic() > until:
            return count
        time.sleep(0.02)


def _environment(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes() + b"\0"
    except OSError:  # it is gone, or another user's
        return b""
