"""All faults in their order: how many of each kind in the reduced set and in the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.faults import clocks, damage, datasets, decoders, disks, kills, memory, worlds
from tests.faults.worlds import Outcome, World

Worlds = dict[str, World]
Seeded = Callable[[Worlds, int, int], Iterable[Outcome]]
"""Faults in these runs, so many, by a seed."""


@dataclass(frozen=True)
class Part:
    """One kind of fault; `cases` says how it is injected into the runs, in the whole set or in the reduced one."""

    name: str
    what: str
    cases: Callable[[Worlds, World, bool], Iterable[Outcome]]
    """In these runs, or in the run that decodes image files in worker processes, which only some of them need."""

    @property
    def title(self) -> str:
        return f"{self.name}: {self.what}"


def _in_turns(name: str, what: str, turns: int, cases: Seeded, each: int, few: int) -> Iterator[Part]:
    """A long part in several, each with another seed; the reduced set is a few cases of the first."""

    def one(turn: int) -> Part:
        return Part(
            name, f"{what}, {turn} of {turns}",
            lambda w, f, whole: cases(w, each if whole else few, turn) if whole or turn == 1 else (),
        )  # fmt: skip

    return map(one, range(1, turns + 1))


PARTS = (
    *_in_turns("kill -9", "at random moments", 2, kills.at_random, 67, 6),
    Part("kill -9", "inside the writes of checkpoints", lambda w, f, whole: kills.inside_checkpoints(w, 60 if whole else 4)),
    Part("kill -9", "at disk operations", lambda w, f, whole: kills.at_operations(_first(w), 4 if whole else 40)),
    Part("kill -9", "again and again", lambda w, f, whole: kills.again_and_again(w, 12 if whole else 1)),
    Part("kill -9", "with workers", lambda w, f, whole: kills.with_workers(f, 20 if whole else 1)),
    Part("disk", "full", lambda w, f, whole: disks.at_operations(w, 8 if whole else 50, 40 if whole else 100)),
    Part("disk", "of other kinds", lambda w, f, whole: disks.of_other_kinds(w, 24 if whole else 3)),
    Part("disk", "by the kernel", lambda w, f, whole: disks.by_the_kernel(w, 16 if whole else 1)),
    *_in_turns("checkpoint", "damaged", 3, damage.checkpoints, 120, 12),
    Part("checkpoint", "with another ledger", lambda w, f, whole: damage.ledgers(w if whole else _first(w))),
    Part("worker", "at random moments", lambda w, f, whole: decoders.at_random(f, 16 if whole else 1)),
    Part("worker", "in mid-answer", lambda w, f, whole: decoders.in_mid_answer(f, 16 if whole else 1)),
    Part("worker", "without successors", lambda w, f, whole: decoders.without_successors(f, 6 if whole else 1)),
    Part("worker", "by one image", lambda w, f, whole: decoders.by_one_image(f, 12 if whole else 2)),
    Part("memory", "in mid-step", lambda w, f, whole: memory.mid_step(w, 5 if whole else 37)),
    Part("memory", "then kill -9", lambda w, f, whole: memory.then_killed(w) if whole else ()),
    Part("memory", "elsewhere", lambda w, f, whole: memory.elsewhere(w, 7 if whole else 33)),
    Part("clock", "jumping", lambda w, f, whole: clocks.jumping(w, 24 if whole else 3)),
    Part("clock", "of files", lambda w, f, whole: clocks.of_the_system(w) if whole else ()),
    Part("stop", "asked to", lambda w, f, whole: clocks.asked_to_stop(w, 24 if whole else 3)),
    Part("data", "files", lambda w, f, whole: datasets.files(_one(w), 120 if whole else 8)),
    Part("data", "folders", lambda w, f, whole: datasets.folders(_one(w), 40 if whole else 8)),
    Part("data", "records", lambda w, f, whole: datasets.records(48 if whole else 16)),
)
REDUCED = ("random", "exact")


def runs(place: Path, whole: bool, parts: Iterable[Part] = PARTS) -> tuple[Worlds, World]:
    """What the cases of these parts need: runs, and the run with workers (or another, where no part needs it)."""
    made = worlds.worlds(place, worlds.KINDS if whole else REDUCED)
    return made, worlds.of_files(place) if any("worker" in part.title for part in parts) else _one(made)


def _one(made: Worlds) -> World:
    return next(iter(made.values()))


def _first(made: Worlds) -> Worlds:
    return dict(list(made.items())[:1])
