"""The runs that faults are injected into, how they end undisturbed, and what is asked of one that was disturbed."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from sparsedp import disk
from sparsedp.config import Data, Mechanism, Model, Run, Sparsity
from sparsedp.dp.ledger import Ledger
from tests import whole_runs
from tests.data.pictures import made_up, save_folder
from tests.faults import children
from tests.faults.children import Ended, Noised

SNIP = Sparsity(prune="dp-snip", prune_rate=0.4, snip_noise_multiplier=2.0, drop="random", drop_rate=0.3)
KINDS: dict[str, dict[str, Any]] = {
    "random": {"sparsity": SNIP, "optim": {"momentum": 0.9, "weight_decay": 0.01}, "runtime": {"evaluate_every": 2}},
    "magnitude": {
        "sparsity": dataclasses.replace(SNIP, drop="magnitude", drop_rate=0.5, pruned_weights="zero"),
        "optim": {"name": "Adam", "lr": 0.01, "schedule": "cosine"}, "runtime": {"evaluate_every": 3, "checkpoint_every": 1},
    },
    "views": {
        "sparsity": dataclasses.replace(SNIP, snip_batch_size=20, granularity="filter"),
        "optim": {"momentum": 0.5}, "data": {"augment": "crop-flip", "views": 2, "pad": 2},
        "runtime": {"unsafe_metrics": True, "evaluate_every": 2},
    },
    "exact": {
        "sparsity": SNIP, "model": Model(train="head"), "mechanism": Mechanism(arithmetic="exact", noise_multiplier=1.0, steps=5, batch_size=6, delta=1e-3),
        "optim": {"momentum": 0.9}, "runtime": {"evaluate_every": 2},
    },
}  # fmt: skip
"""All of them release DP-SNIP's scores, drop at every step, and keep an average."""


@dataclass(frozen=True)
class Outcome:
    """One injected fault."""

    kind: str
    injected: str
    came: str
    """What came of it, in the words of the table."""
    wrong: str = ""
    """What should not have been; nothing where all is well."""
    inside: bool = False


@dataclass
class World:
    """One configuration, its data, its undisturbed end, and folders for disturbed runs."""

    name: str
    run: Run
    place: Path
    seconds: float = 0.0
    noised: tuple[Noised, ...] = ()
    _number: Iterator[int] = field(default_factory=lambda: iter(range(10**9)))

    @property
    def whole(self) -> Path:
        return self.place / "whole"

    def folder(self) -> Path:
        """A folder that nothing has used."""
        return self.place / f"run-{next(self._number)}"

    def train(self, folder: Path, **more: Any) -> Callable[[], Any]:
        return lambda: whole_runs.go(self.run, folder, **more)

    def forget(self, folder: Path) -> None:
        """Remove a run, and its budget file."""
        for path in (folder, Path(f"{folder}-home")):
            shutil.rmtree(path, ignore_errors=True)


def worlds(place: Path, names: Iterable[str] = KINDS) -> dict[str, World]:
    """The runs by name, each trained once in this process, which warms it up, and once in a child, which is timed."""
    made = {
        name: World(name, whole_runs.tiny(whole_runs.images(place / "data"), **KINDS[name]), place / name) for name in names
    }
    for world in made.values():
        prepare(world)
    return made


def of_files(place: Path, workers: int = 2) -> World:
    """A run on a folder of image files, decoded in worker processes."""
    pixels, labels = made_up(48, 12, 1, classes=3)
    for split, part in (("train", slice(0, 36)), ("test", slice(36, 48))):
        save_folder(place / "files" / split, pixels[part], labels[part], ("ant", "bee", "cow"))
    changed = {**KINDS["random"], "data": Data(name="folder", dir=str(place / "files"), channels=1, size=12)}
    run = whole_runs.tiny(place, **changed)
    run = dataclasses.replace(run, runtime=dataclasses.replace(run.runtime, workers=workers))
    world = World("files", run, place / "of-files")
    prepare(world)
    return world


def prepare(world: World) -> None:
    world.place.mkdir(parents=True, exist_ok=True)
    whole_runs.go(world.run, world.whole)
    began = time.monotonic()
    folder = world.folder()
    ended = children.run(world.train(folder))
    world.seconds, world.noised = time.monotonic() - began, ended.noised
    assert ended.how == "done", ended.text
    assert not (problem := different(world, folder)), problem
    world.forget(folder)


def charged(folder: Path) -> int:
    """How many noised sums the ledger of a run counts; 0 where it has none yet."""
    path = folder / "public" / "ledger.json"
    if not path.exists():
        return 0
    ledger = Ledger.from_json(json.loads(path.read_text()))
    return sum(e.count for e in ledger.entries if type(e.event).__name__ != "NoOpDpEvent")


def different(world: World, folder: Path) -> str:
    """What of a finished run is not as in the undisturbed one; weights, average, masks, ledger, epsilon, everything public."""
    if not (folder / "public" / "summary.json").exists():
        return "it is not finished"
    try:
        whole_runs.same_public(world.whole, folder)
    except AssertionError as error:
        return str(error).splitlines()[0]
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob(f".*{disk.UNFINISHED}"))
    kept = sorted(p.name for p in (folder / "private").iterdir())
    expected = sorted(p.name for p in (world.whole / "private").iterdir())
    return f"left behind: {left}" if left else f"private/ holds {kept}" if kept != expected else ""


def close(world: World, folder: Path, most: float) -> str:
    """`different`, but weights and averages may be apart by `most`, and what is computed from them is not looked at."""
    if not (folder / "public" / "summary.json").exists():
        return "it is not finished"
    for name in ("mask.safetensors", "ledger.json", "config.json"):
        if (folder / "public" / name).read_bytes() != (world.whole / "public" / name).read_bytes():
            return f"not the same to the byte: {name}"
    for name in ("model.safetensors", "average.safetensors"):
        one, other = load_file(world.whole / "public" / name), load_file(folder / "public" / name)
        apart = max(float(abs(one[key].astype("f8") - other[key]).max()) for key in one)
        if apart > most:
            return f"{name} is {apart:g} apart"
    return ""


def under_counted(folder: Path, noised: Iterable[Noised]) -> str:
    """Whether the ledger counts fewer sums than were noised, or the same noise met two different sums."""
    truth: dict[tuple[str, str, int], str] = {}
    for one in noised:
        if truth.setdefault(one.place, one.total) != one.total:
            return f"the noise of {one.purpose} step {one.step} met two different sums"
    counted = charged(folder)
    return f"the ledger counts {counted} of {len(truth)} noised sums" if counted < len(truth) else ""


def finish(world: World, folder: Path, before: tuple[Noised, ...], same: Callable[[World, Path], str] = different) -> str:
    """Take a disturbed run up again with nothing in its way; what is wrong about its end, or nothing."""
    if wrong := under_counted(folder, before):
        return wrong
    if (folder / "public" / "summary.json").exists():
        return finished_already(world, folder, before, same)
    ended = children.run(world.train(folder))
    if ended.how != "done":
        return f"taken up again it {ended.how}: {ended.text}"
    noised = (*before, *ended.noised)
    exact = same is different and {n.place for n in noised} != {n.place for n in world.noised}
    return under_counted(folder, noised) or ("other noise than undisturbed" if exact else "") or same(world, folder)


def finished_already(world: World, folder: Path, before: tuple[Noised, ...], same: Callable[[World, Path], str]) -> str:
    """A run whose summary is written is finished: the next command says so, and erases the key if that was not done."""
    ended = children.run(world.train(folder))
    if ended.how != "said" or "is finished" not in ended.text:
        return f"a finished run, called again, {ended.how}: {ended.text}"
    return under_counted(folder, before) or same(world, folder)


def unclear(ended: Ended, place: Path) -> str:
    """What is wrong with how a run that could not go on said so: one sentence, no traceback."""
    if ended.how != "said":
        return f"it {ended.how}: {ended.text}"
    sentence = ended.text.replace(str(place), "PLACE")
    wrong = "Traceback" in sentence or not sentence.rstrip().endswith((".", ")")) or "\n" in sentence.strip()
    return f"not one clear sentence: {sentence}" if wrong else ""
