"""kill -9: at random moments, inside the writes of checkpoints, and again and again."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

from tests.faults import operations
from tests.faults.children import Child, Ended
from tests.faults.operations import Operations
from tests.faults.worlds import Outcome, World, charged, finish, under_counted


def at_random(worlds: dict[str, World], count: int, seed: int = 1) -> Iterator[Outcome]:
    """Killed by the parent after a random part of the time that the run takes."""
    own, names = random.Random(seed), list(worlds)
    for number in range(count):
        world = worlds[names[number % len(names)]]
        folder, ended = _killed(world, own)
        yield _judged(world, folder, ended, "kill -9 at a random moment")


def _killed(world: World, own: random.Random) -> tuple[Path, Ended]:
    while True:
        folder = world.folder()
        child = Child(world.train(folder))
        time.sleep(own.uniform(0.02, 1.0) * world.seconds)
        child.kill()
        ended = child.ended()
        if ended.how == "killed":
            return folder, ended
        world.forget(folder)  # it had ended before


def inside_checkpoints(worlds: dict[str, World], count: int, seed: int = 2) -> Iterator[Outcome]:
    """Killed by the parent while a checkpoint, any one of the run's, is being written: at a random moment of that."""
    own, names, done = random.Random(seed), list(worlds), 0
    while done < count:
        world = worlds[names[done % len(names)]]
        folder = world.folder()
        child = Child(world.train(folder))
        if child.wait_for(b"checkpoint begins", own.randint(1, 4)):
            time.sleep(own.uniform(0, 0.004))
            child.kill()
        ended = child.ended()
        if ended.how == "killed" and ended.inside_checkpoint:
            done += 1
            yield _judged(world, folder, ended, "kill -9 inside a checkpoint's write")
        else:
            world.forget(folder)  # it was written by then


def at_operations(worlds: dict[str, World], every: int, seed: int = 3) -> Iterator[Outcome]:
    """Killed right before a call that changes the disk; a write has then written half. Calls inside checkpoints: all of them."""
    own = random.Random(seed)
    for world in worlds.values():
        found = operations.of_a_run(world)
        offset = own.randrange(every)
        for number, (name, path) in enumerate(found, start=1):
            state = ".state" in path
            if (number % every == offset) or (state and every <= 4):
                folder = world.folder()
                ended = operations.disturbed(world, folder, Operations(at=number))
                if ended.how != "killed":
                    yield Outcome("kill -9 at a disk operation", f"{name} {path}", "", f"it {ended.how}: {ended.text}")
                    continue
                kind = "kill -9 at an operation of a checkpoint's write" if state else "kill -9 at a disk operation"
                yield _judged(world, folder, ended, kind)


def again_and_again(worlds: dict[str, World], count: int, times: int = 5, seed: int = 4) -> Iterator[Outcome]:
    """The same run killed at random moments up to five times, then left alone."""
    own, names = random.Random(seed), list(worlds)
    for number in range(count):
        world = worlds[names[number % len(names)]]
        folder, ended = _killed(world, own)
        noised, kills = ended.noised, 1
        for _ in range(times - 1):
            before = charged(folder)
            child = Child(world.train(folder))
            time.sleep(own.uniform(0.02, 1.0) * world.seconds)
            child.kill()
            ended = child.ended()
            noised += ended.noised
            if ended.how != "killed":
                break
            kills += 1
            wrong = under_counted(folder, noised) or ("the ledger shrank" if charged(folder) < before else "")
            if wrong:
                yield Outcome("the same run killed up to five times", f"{kills} kills", "", wrong)
        wrong = finish(world, folder, noised)
        world.forget(folder)
        yield Outcome("the same run killed up to five times", f"{kills} kills", "resumed to the same bytes", wrong)


def _judged(world: World, folder: Path, ended: Ended, kind: str) -> Outcome:
    steps = len({n.step for n in ended.noised if n.purpose == "train"})
    wrong = finish(world, folder, ended.noised)
    if wrong:
        wrong = f"{world.name}, after {steps} steps, {folder}: {wrong}"
    else:
        world.forget(folder)
    return Outcome(kind, f"{world.name}, after {steps} steps", "resumed to the same bytes", wrong, ended.inside_checkpoint)
