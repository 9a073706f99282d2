"""Checkpoints that are flipped, cut, swapped, of another run or of a version to come: refused, or the last good one is used."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from sparsedp import checkpoint
from sparsedp.training import Silence
from tests import whole_runs
from tests.faults import children
from tests.faults.children import Ended, Noised
from tests.faults.worlds import Outcome, World, different, finish, other_sums, unclear, under_counted

Own = random.Random
Damage = Callable[[Own, Path, Path], str]
"""Damages the newer of two checkpoints, or the folder; says what it did, in a word. The second path is another run's folder."""


def flipped(own: Own, path: Path, other: Path) -> str:
    content = bytearray(path.read_bytes())
    for _ in range(own.choice((1, 1, 2, 9))):
        content[own.choice((own.randrange(len(content)), own.randrange(600)))] ^= 1 << own.randrange(8)
    path.write_bytes(content)
    return "bits flipped"


def cut(own: Own, path: Path, other: Path) -> str:
    content = path.read_bytes()
    path.write_bytes(content[: own.choice((0, own.randrange(60), own.randrange(len(content)), len(content) - 1))])
    return "truncated"


def lengthened(own: Own, path: Path, other: Path) -> str:
    path.write_bytes(path.read_bytes() + own.randbytes(own.randint(1, 5000)))
    return "bytes appended"


def zeroed(own: Own, path: Path, other: Path) -> str:
    """A block that never reached the disk."""
    content = bytearray(path.read_bytes())
    start = own.randrange(len(content)) // 4096 * 4096
    content[start : start + 4096] = bytes(len(content[start : start + 4096]))
    path.write_bytes(content)
    return "a block of zeros"


def garbage(own: Own, path: Path, other: Path) -> str:
    path.write_bytes(own.randbytes(own.randint(0, 9000)))
    return "garbage"


def of_a_future_version(own: Own, path: Path, other: Path) -> str:
    """Another number at its head; or a kind of value that is not known yet, under a right checksum."""
    content = path.read_bytes()
    if own.random() < 0.5:
        version = str(own.randint(2, 9)).encode()
        path.write_bytes(checkpoint.MAGIC.replace(b"1", version) + content[len(checkpoint.MAGIC) :])
    else:
        block = content[len(checkpoint.MAGIC) + 32 :].replace(
            *own.choice(((b'\\"dict\\"', b'\\"data\\"'), (b'\\"list\\"', b'\\"sets\\"')))
        )
        path.write_bytes(checkpoint.MAGIC + hashlib.sha256(block).digest() + block)
    return "of a future version"


def swapped(own: Own, path: Path, other: Path) -> str:
    """The two have each other's names."""
    older = _older(path)
    one, two = path.read_bytes(), older.read_bytes()
    path.write_bytes(two)
    older.write_bytes(one)
    return "swapped with the one before"


def rolled_back(own: Own, path: Path, other: Path) -> str:
    path.unlink()
    return "the newest is gone"


def of_another_run(own: Own, path: Path, other: Path) -> str:
    shutil.copy(own.choice(_states(other)), path)
    return "of another run"


def a_folder(own: Own, path: Path, other: Path) -> str:
    path.unlink()
    path.mkdir()
    return "a folder in its place"


BYTES = (flipped, cut, of_another_run, of_a_future_version, zeroed, lengthened, garbage)
"""What makes a checkpoint one that must be refused."""
KINDS: tuple[Damage, ...] = (
    *BYTES, flipped, cut, swapped, rolled_back, a_folder, *BYTES, flipped, cut, of_another_run, flipped, cut,
)  # fmt: skip


BOTH = 0.8
"""How often both checkpoints are damaged."""
HARMLESS = (swapped, rolled_back)
"""These leave whole checkpoints of the run: the older one is taken, whatever its name."""


def checkpoints(worlds: dict[str, World], count: int, seed: int = 7) -> Iterator[Outcome]:
    """Runs killed between two checkpoints, one or both of which are then damaged."""
    own, names = random.Random(seed), list(worlds)
    cuts = {name: _cut(world, world.run) for name, world in worlds.items()}
    twins = {name: _cut(world, _with_another_key(world))[0] for name, world in worlds.items()}
    for number in range(count):
        kind, world = KINDS[number % len(KINDS)], worlds[names[number // len(KINDS) % len(names)]]
        stopped, noised = cuts[world.name]
        twin, stranger = own.random() < 0.5, names[(names.index(world.name) + 1) % len(names)]
        other = twins[world.name] if twin or stranger == world.name else cuts[stranger][0]
        folder = world.folder()
        shutil.copytree(stopped, folder)
        newest = _states(folder)[-1]
        damaged = [newest]
        if own.random() < BOTH and kind is not swapped:
            damaged.append(_older(newest))
        said = [damage(kind, own, path, other) for path in reversed(damaged)][-1]
        yield _judged(world, folder, noised, kind, said, [path.name for path in damaged])


def damage(kind: Damage, own: Own, path: Path, other: Path) -> str:
    """Damage a file so that it is not as it was."""
    before = path.read_bytes()
    while True:
        said = kind(own, path, other)
        if not path.is_file() or path.read_bytes() != before:
            return said
        path.write_bytes(before)


def ledgers(worlds: dict[str, World], seed: int = 8) -> Iterator[Outcome]:
    """Checkpoints that the ledger knows nothing of: it was put back to an older one, cut, emptied, or is gone."""
    for world in worlds.values():
        stopped, noised = _cut(world, world.run)
        for said in ("put back to an older one", "cut", "empty", "gone"):
            folder = world.folder()
            shutil.copytree(stopped, folder)
            path = folder / "public" / "ledger.json"
            right = path.read_bytes()
            path.unlink()
            if said != "gone":
                path.write_bytes({"cut": right[: len(right) // 2], "empty": b""}.get(said) or _older_ledger(right, folder))
            before = _content(folder)
            ended = children.run(world.train(folder))
            wrong = unclear(ended, world.place, "ledger") or ("it went on" if ended.noised else "")
            wrong = wrong or ("something was changed" if _content(folder) != before else "")
            path.write_bytes(right)
            wrong = wrong or finish(world, folder, noised)
            came = "refused in a sentence; with the right ledger it went on to the same bytes"
            yield Outcome(f"the ledger beside the checkpoints is {said}", world.name, came, wrong and f"{folder}: {wrong}")
            world.forget(folder)


def _older_ledger(content: bytes, folder: Path) -> bytes:
    """The ledger as it was a step before the newest checkpoint."""
    entries = json.loads(content)
    entries[-1]["count"] = int(_states(folder)[-1].stem.removeprefix("step-")) - 1
    return json.dumps(entries).encode()


class _Notes(Silence):
    """Keeps what a run notes for its operator."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


def _judged(world: World, folder: Path, noised: tuple[Noised, ...], kind: Damage, said: str, names: list[str]) -> Outcome:
    before, notes = _content(folder), _Notes()

    def work() -> str:
        world.train(folder, reporter=notes)()
        return "\n".join(notes.said)

    ended = children.run(work)
    came, wrong = _outcome(world, folder, noised, ended, kind, names)
    if not wrong and len(names) > 1 and _content(folder) != before:
        wrong = "something was changed"
    if not wrong:
        world.forget(folder)
    which = "both" if len(names) > 1 else "the newer"
    injected = f"{world.name}, {which}"
    return Outcome(f"a checkpoint is damaged: {said}", injected, came, wrong and f"{injected}, {folder}: {wrong}")


def _outcome(
    world: World, folder: Path, before: tuple[Noised, ...], ended: Ended, kind: Damage, names: list[str]
) -> tuple[str, str]:
    """What came of it, and what is wrong. Every damaged checkpoint is named in a note, or in the sentence that ends the run."""
    noised, gone = (*before, *ended.noised), kind is rolled_back and len(names) > 1
    if len(names) > 1:
        came = "both are gone: refused in a sentence" if gone else "both refused, in a sentence; nothing was changed"
        wrong = unclear(ended, world.place, *([] if gone else names), "start a new run" if gone else "Start a new run")
        return came, wrong or under_counted(folder, noised)
    if kind is a_folder:  # where the next checkpoint belongs
        wrong = unclear(ended, world.place, names[0], "remove the folder")
        shutil.rmtree(folder / "private" / "state" / names[0], ignore_errors=True)
        came = "the one before taken, then a sentence; without the folder to the same bytes"
        return came, wrong or finish(world, folder, noised)
    wrong = "" if ended.how == "done" else f"it {ended.how}: {ended.text}"
    wrong = wrong or under_counted(folder, noised) or other_sums(world, noised) or different(world, folder)
    if kind in HARMLESS:
        return "the older one taken, to the same bytes", wrong
    named = [line for line in ended.text.splitlines() if names[0] in line]
    if not wrong and not (len(named) == 1 and re.fullmatch(rf"{re.escape(names[0])} .{{8,}}\.", named[0])):
        wrong = f"it is not said in a sentence that it was refused: {ended.text}"
    return "refused; the one before taken, to the same bytes", wrong


def _content(folder: Path) -> dict[str, bytes]:
    """All files but the notes for the operator, which every start may add to."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "notes.txt"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _cut(world: World, run: object) -> tuple[Path, tuple[Noised, ...]]:
    """A run that died between two checkpoints."""
    folder = world.folder()
    steps = (world.run.mechanism.steps or 0) // 2 * 2 - 1
    asked = whole_runs.after(steps)

    def stop() -> bool:
        if asked():
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    ended = children.run(lambda: whole_runs.go(run, folder, stop=stop))  # type: ignore[arg-type]
    assert ended.how == "killed" and len(_states(folder)) == 2, ended
    return folder, ended.noised


def _with_another_key(world: World) -> object:
    return replace(world.run, runtime=replace(world.run.runtime, key="another that is known to all"))


def _states(folder: Path) -> list[Path]:
    return sorted((folder / "private" / "state").glob("*.state"))


def _older(path: Path) -> Path:
    return _states(path.parents[2])[0]
