"""Disks that are full, once or for good, at every call that needs room; quotas, broken disks, and a limit that the kernel keeps."""

from __future__ import annotations

import errno
import os
import random
import resource
from collections.abc import Iterator
from pathlib import Path

from tests.faults import children, operations
from tests.faults.children import Ended
from tests.faults.operations import ALLOWED, Operations
from tests.faults.worlds import Outcome, World, finish, unclear

WORDS = {errno.ENOSPC: "full", errno.EDQUOT: "over its quota", errno.EIO: "broken", errno.EROFS: "read-only"}


def at_operations(worlds: dict[str, World], every: int, others_every: int) -> Iterator[Outcome]:
    """Every `every`th call of the first world's run finds no room, once and from then on; in the other worlds fewer."""
    for place, world in enumerate(worlds.values()):
        step = every if place == 0 else others_every
        found = operations.of_a_run(world)
        for number, (name, path) in enumerate(found, start=1):
            if name in ALLOWED[errno.ENOSPC] or number % step:
                continue
            for stays in (False, True):
                folder = world.folder()
                ended = operations.disturbed(world, folder, Operations(at=number, error=errno.ENOSPC, stays=stays))
                kind = "the disk is full from some moment on" if stays else "the disk is full for one call"
                yield judged(world, folder, ended, kind, f"{world.name}, {name} {path}", errno.ENOSPC)


def of_other_kinds(worlds: dict[str, World], count: int, seed: int = 5) -> Iterator[Outcome]:
    """The disk is over its quota, or fails, or takes no more writes, from a random call on."""
    own, names = random.Random(seed), list(worlds)
    found = {name: operations.of_a_run(world) for name, world in worlds.items()}
    for number in range(count):
        world, error = worlds[names[number % len(names)]], (errno.EDQUOT, errno.EIO, errno.EROFS)[number % 3]
        refused = [at for at, (name, _) in enumerate(found[world.name], start=1) if name not in ALLOWED[error]]
        at, folder = own.choice(refused), world.folder()
        ended = operations.disturbed(world, folder, Operations(at=at, error=error, stays=True))
        yield judged(world, folder, ended, f"the disk is {WORDS[error]} from some moment on", f"{world.name}, call {at}", error)


def by_the_kernel(worlds: dict[str, World], count: int, seed: int = 6) -> Iterator[Outcome]:
    """No file may grow over a random size: what cannot be written is refused by the kernel itself."""
    own, names = random.Random(seed), list(worlds)
    for number in range(count):
        world = worlds[names[number % len(names)]]
        largest = max(path.stat().st_size for path in world.whole.rglob("*") if path.is_file())
        most = int(largest ** own.uniform(0.3, 1.0))
        folder = world.folder()
        ended = children.run(lambda world=world, folder=folder, most=most: _limited(world, folder, most))  # type: ignore[misc]
        yield judged(
            world, folder, ended, "the kernel lets no file grow over a size", f"{world.name}, {most} bytes", errno.EFBIG
        )


def _limited(world: World, folder: Path, most: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    world.train(folder)()


def judged(world: World, folder: Path, ended: Ended, kind: str, injected: str, error: int) -> Outcome:
    """One that ended early said so and why in a sentence; whatever it did, the run comes to its own end."""
    if ended.how == "done":
        came = "the run went on without that file"
        wrong = "" if ended.text not in ("", "0") else "nothing was refused"
    else:
        came, wrong = "a sentence, then resumed to the same bytes", unclear(ended, world.place, os.strerror(error))
    wrong = wrong or finish(world, folder, ended.noised)
    if not wrong:
        world.forget(folder)
    return Outcome(kind, injected, came, wrong and f"{injected}, {folder}: {wrong}")
