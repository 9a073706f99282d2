"""kill -9: at random moments, inside the writes of checkpoints, and again and again."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.faults import decoders, operations
from tests.faults.children import Child, Ended
from tests.faults.operations import Operations
from tests.faults.worlds import Outcome, World, charged, finish, under_counted

RANDOM, INSIDE = "kill -9 at a random moment", "kill -9 inside a checkpoint's write"
AGAIN = "kill -9 at random moments, up to five times in the same run"


def at_random(worlds: dict[str, World], count: int, seed: int = 1) -> Iterator[Outcome]:
    """Killed by the parent after a random part of the time that the run takes."""
    own, names = random.Random(seed), list(worlds)
    for number in range(count):
        world = worlds[names[number % len(names)]]
        folder, ended = _killed(world, own)
        yield _judged(world, folder, ended, RANDOM)


def with_workers(world: World, count: int, seed: int = 18) -> Iterator[Outcome]:
    """A run that decodes in worker processes; none of them outlives it."""
    own = random.Random(seed)
    for _ in range(count):
        folder, ended = _killed(world, own)
        alive = decoders.alive(folder)
        outcome = _judged(world, folder, ended, RANDOM)
        wrong = f"{alive} of its workers are still there" if alive else outcome.wrong
        yield replace(outcome, came=f"{outcome.came}; its workers ended with it", wrong=wrong)


def _killed(world: World, own: random.Random) -> tuple[Path, Ended]:
    """One that was killed, or ended otherwise than it should."""
    while True:
        folder = world.folder()
        child = Child(world.train(folder))
        time.sleep(own.uniform(0.02, 1.0) * world.seconds)
        child.kill()
        ended = child.ended()
        if ended.how != "done":
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
        if ended.how == "done" or (ended.how == "killed" and not ended.inside_checkpoint):
            world.forget(folder)  # it was written by then
        else:
            done += 1
            yield _judged(world, folder, ended, INSIDE)


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
        noised, kills, wrong = ended.noised, 1, ""
        for _ in range(times - 1):
            before = charged(folder)
            child = Child(world.train(folder))
            time.sleep(own.uniform(0.02, 1.0) * world.seconds)
            child.kill()
            ended = child.ended()
            noised += ended.noised
            wrong = under_counted(folder, noised) or ("the ledger shrank" if charged(folder) < before else "")
            if wrong or ended.how != "killed":
                break
            kills += 1
        over = ended.how in ("killed", "done") or (ended.how == "said" and "is finished" in ended.text)
        wrong = wrong or ("" if over else f"it {ended.how}: {ended.text}") or finish(world, folder, noised)
        if not wrong:
            world.forget(folder)
        yield Outcome(AGAIN, f"{kills} kills", "resumed to the same bytes", wrong and f"{world.name}, {folder}: {wrong}")


def _judged(world: World, folder: Path, ended: Ended, kind: str) -> Outcome:
    sums = len(ended.noised)
    wrong = "" if ended.how == "killed" else f"it {ended.how}: {ended.text}"
    if wrong := wrong or finish(world, folder, ended.noised):
        wrong = f"{world.name}, after {sums} sums, {folder}: {wrong}"
    else:
        world.forget(folder)
    when = "before a sum was noised" if not sums else "after the last sum" if sums == len(world.noised) else "between the sums"
    return Outcome(
        kind, f"{world.name}, after {sums} sums", f"{when}; resumed to the same bytes", wrong, ended.inside_checkpoint
    )
