"""Clocks that jump, and being asked to stop: neither changes a byte of what a run ends with."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from sparsedp import cli
from sparsedp.errors import UsageError
from tests.faults.children import Child, Ended
from tests.faults.worlds import Outcome, World, finish, unclear

YEAR = 365.25 * 86400


def jumping(worlds: dict[str, World], count: int, seed: int = 13) -> Iterator[Outcome]:
    """Every reading of the wall clock and of the monotonic one is moved, by seconds or by years; half the runs are also killed."""
    own, names = random.Random(seed), list(worlds)
    for number in range(count):
        world, most = worlds[names[number % len(names)]], (2.0, 3600.0, 20 * YEAR)[number % 3]
        folder, killed = world.folder(), number % 2 == 1
        child = Child(_with_clocks(world.train(folder), most, own.randrange(10**9)))
        if killed:
            time.sleep(own.uniform(0.3, 0.9) * world.seconds)
            child.kill()
        ended = child.ended()
        wrong = "" if ended.how in ("done", "killed") else f"it {ended.how}: {ended.text}"
        wrong = wrong or ("no clock was read" if ended.text == "0" else "")
        kind = "clocks jump back and forth" + (", then kill -9" if ended.how == "killed" else "")
        wrong = wrong or finish(world, folder, ended.noised) or _odd_seconds(folder)
        yield _outcome(world, folder, kind, f"{world.name}, by up to {most:g} s", "the same bytes", wrong)


def _with_clocks(work: Callable[[], object], most: float, seed: int) -> Callable[[], int]:
    """The work, which ends with how often a clock was read."""

    def disturbed() -> int:
        own, read = random.Random(seed), 0

        def moved(real: Callable[[], float]) -> float:
            nonlocal read
            read += 1
            return real() + own.uniform(-most, most)

        for name in ("time", "monotonic", "perf_counter"):
            setattr(time, name, partial(moved, getattr(time, name)))
        work()
        return read

    return disturbed


def _odd_seconds(folder: Path) -> str:
    """How long a run says it took: whatever the clocks said, a number, and not under nothing."""
    summary = json.loads((folder / "public" / "summary.json").read_text())
    numbers = [summary["seconds"], summary["throughput"]]
    return "" if all(isinstance(n, int | float) and math.isfinite(n) and n >= 0 for n in numbers) else f"it took {numbers}"


def asked_to_stop(worlds: dict[str, World], count: int, seed: int = 14) -> Iterator[Outcome]:
    """SIGTERM or SIGINT at a random moment of the command `sparsedp train`, from its first line on."""
    own, names = random.Random(seed), list(worlds)
    for number in range(count):
        world, number_of = worlds[names[number % len(names)]], (signal.SIGTERM, signal.SIGTERM, signal.SIGINT)[number % 3]
        folder, name = world.folder(), signal.Signals(number_of).name
        child = Child(_command(world, folder))
        time.sleep(own.uniform(0.02, 0.9) * world.seconds)
        os.kill(child.process, number_of)
        ended = child.ended()
        wrong = _unclear_stop(ended, world) or finish(world, folder, ended.noised)
        came = {"said": "it stopped", "done": "it was at its end"}.get(ended.how, "it ended where it was")
        yield _outcome(world, folder, f"{name} at a random moment", world.name, f"{came}; resumed to the same bytes", wrong)


def _command(world: World, folder: Path) -> Callable[[], None]:
    def command() -> None:
        os.environ["SPARSEDP_HOME"] = f"{folder}-home"
        if cli._stoppable("train", cli.Train(run=world.run, run_dir=folder), "") == cli.STOPPED:
            raise UsageError("The run was stopped.")

    return command


def _unclear_stop(ended: Ended, world: World) -> str:
    """Where nothing listens yet a signal ends the process as any other; an interrupt is `cli.main`'s to put in words."""
    if ended.how in ("done", "killed") or (ended.how == "raised" and ended.text.rstrip().endswith("KeyboardInterrupt")):
        return ""
    return unclear(ended, world.place)


def of_the_system(worlds: dict[str, World]) -> Iterator[Outcome]:
    """The files of a run are older than its begin, or from the future, when it is taken up again."""
    for world in worlds.values():
        for moved in (-20 * YEAR, 20 * YEAR):
            folder = world.folder()
            child = Child(world.train(folder))
            child.wait_for(b"checkpoint ends", 2)
            child.kill()
            ended = child.ended()
            wrong = "" if ended.how == "killed" else f"it {ended.how}: {ended.text}"
            for path in folder.rglob("*"):
                os.utime(path, (time.time() + moved,) * 2)
            wrong = wrong or finish(world, folder, ended.noised)
            said = f"{world.name}, {moved / YEAR:+g} years"
            yield _outcome(world, folder, "files of another time", said, "resumed to the same bytes", wrong)


def _outcome(world: World, folder: Path, kind: str, said: str, came: str, wrong: str) -> Outcome:
    if not wrong:
        world.forget(folder)
    return Outcome(kind, said, came, wrong and f"{said}, {folder}: {wrong}")
