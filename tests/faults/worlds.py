"""The runs that faults are injected into, how they end undisturbed, and what is asked of one that was disturbed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from sparsedp import disk, keys
from sparsedp.config import Data, Mechanism, Model, Run, Sparsity
from sparsedp.dp.randomness import Key
from sparsedp.engines import choice
from sparsedp.engines.self_check import engine_name
from tests import whole_runs
from tests.data.pictures import made_up, save_folder
from tests.faults import children
from tests.faults.children import Ended, Noised

HOME = "-home"
"""Ends the name of the folder with the budget file of a run (see `whole_runs.go`)."""
SNIP = Sparsity(prune="dp-snip", prune_rate=0.4, snip_noise_multiplier=2.0, drop="random", drop_rate=0.3)
KINDS: dict[str, dict[str, Any]] = {
    "random": {"sparsity": SNIP, "optim": {"momentum": 0.9, "weight_decay": 0.01}, "runtime": {"evaluate_every": 2}},
    "magnitude": {
        "sparsity": dataclasses.replace(SNIP, drop="magnitude", drop_rate=0.5, pruned_weights="zero"),
        "optim": {"name": "Adam", "lr": 0.01, "schedule": "cosine"}, "runtime": {"evaluate_every": 3, "checkpoint_every": 1, "key": None},
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
"""All of them release DP-SNIP's scores, drop at every step, and keep an average. One has its key from the system."""


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
        for path in (folder, Path(f"{folder}{HOME}")):
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
    pixels, labels = made_up(48, 14, 1, classes=3)
    for split, part in (("train", slice(0, 36)), ("test", slice(36, 48))):
        save_folder(place / "files" / split, pixels[part], labels[part], ("ant", "bee", "cow"))
    changed = {**KINDS["random"], "data": Data(name="folder", dir=str(place / "files"), channels=1, size=14)}
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
    sums = 1 + (world.run.mechanism.steps or 0)
    assert len(set(ended.noised)) == len(ended.noised) == charged(folder) == entered(folder) == sums, ended.noised
    world.forget(folder)


def quick(patch: pytest.MonkeyPatch) -> None:
    """What has tests of its own is done once: an engine is checked once for a model, the same events are accounted for once."""
    whole_runs.quick_accounting(patch)
    keys_of_the_system(patch)
    check, passed = choice.check_engine, set()

    def checked(engine: Any, model: Any, *given: Any) -> None:
        model_and_engine = engine_name(engine), type(model), tuple((name, p.shape) for name, p in model.named_parameters())
        if model_and_engine not in passed:
            check(engine, model, *given)
            passed.add(model_and_engine)

    patch.setattr(choice, "check_engine", checked)


def keys_of_the_system(patch: pytest.MonkeyPatch) -> None:
    """A key that a run does not choose is the same for all, so that they can be compared, but another one if the first was lost
    after something was spent."""

    def fresh() -> Key:
        ledger = Path(os.environ["SPARSEDP_HOME"].removesuffix(HOME)) / "public" / "ledger.json"
        return Key(hashlib.sha256(b"once more" if ledger.exists() else b"first").digest(), given=False)

    patch.setattr(keys, "fresh", fresh)


def charged(folder: Path) -> int:
    """How many noised sums the ledger of a run counts; 0 where it has none yet, or none that can be read."""
    try:
        return _counted(json.loads((folder / "public" / "ledger.json").read_text()))
    except (FileNotFoundError, ValueError):
        return 0


def entered(folder: Path) -> int:
    """How many noised sums the data set's budget file counts for a run; before the first one that is all that it may spend."""
    return sum(_counted(entry["ledger"]) for entry in _entries(folder))


def _counted(entries: list[dict[str, Any]]) -> int:
    return sum(entry["count"] for entry in entries if entry["event"]["type"] != "NoOpDpEvent")


def _entries(folder: Path) -> list[dict[str, Any]]:
    """A run's entries in the budget files of its home, which no other run has."""
    files = sorted(Path(f"{folder}{HOME}", "budgets").glob("*.json"))
    return [entry for file in files for entry in json.loads(file.read_text())["runs"].values()]


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
    if left or kept != expected:
        return f"left behind: {left}" if left else f"private/ holds {kept}"
    return "" if _entries(folder) == _entries(world.whole) else "the budget file has another entry"


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
    for what, counted in (("ledger", charged(folder)), ("budget file", entered(folder))):
        if counted < len(truth):
            return f"the {what} counts {counted} of {len(truth)} noised sums"
    return ""


def finish(world: World, folder: Path, before: tuple[Noised, ...], same: Callable[[World, Path], str] = different) -> str:
    """Take a disturbed run up again with nothing in its way; what is wrong about its end, or nothing. One whose summary is
    written is finished: the next command says so, and erases the key if that was not done."""
    if wrong := under_counted(folder, before):
        return wrong
    finished, counted = (folder / "public" / "summary.json").exists(), charged(folder)
    ended = children.run(world.train(folder))
    if finished and (ended.how != "said" or "is finished" not in ended.text):
        return f"a finished run, called again, {ended.how}: {ended.text}"
    if not finished and ended.how != "done":
        return f"taken up again it {ended.how}: {ended.text}"
    if charged(folder) < counted:
        return "the ledger shrank"
    noised = (*before, *ended.noised)
    return under_counted(folder, noised) or other_sums(world, noised, same is different) or same(world, folder)


def other_sums(world: World, noised: Iterable[Noised], to_the_bit: bool = True) -> str:
    """Whether other noise was drawn than undisturbed, or for other sums."""
    found, expected = set(noised), set(world.noised)
    if {n.place for n in found} != {n.place for n in expected}:
        return "other noise than undisturbed"
    return "other sums than undisturbed" if to_the_bit and found != expected else ""


def unclear(ended: Ended, place: Path, *words: str) -> str:
    """What is wrong with how a run that could not go on said so: one sentence with these words in it, no traceback."""
    if ended.how != "said":
        return f"it {ended.how}: {ended.text}"
    sentence = ended.text.replace(str(place), "PLACE")
    wrong = re.search(r"Traceback|Errno|<.* object at ", sentence) or not re.fullmatch(r"[^\n]{15,}[.)]", sentence)
    missing = [word for word in words if word not in sentence]
    return f"not one clear sentence: {sentence}" if wrong else f"nothing of {missing}: {sentence}" if missing else ""
