"""Data that is cut, of another shape, mislabelled, empty or not a number: a sentence, or a contribution of zero; no data in words."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import random
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

import sparsedp
from sparsedp import keys
from sparsedp.config import Data
from tests import whole_runs
from tests.data.pictures import idx, made_up, png, save_folder
from tests.faults import children
from tests.faults.children import Ended
from tests.faults.worlds import Outcome, World, charged, entered, unclear

Own = random.Random
IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
CLASSES = ("ant", "bee", "cow")
SAME = "two files of one form are swapped, which nobody can tell"


def _cut(own: Own, place: Path) -> str:
    path = _any_file(own, place)
    content = path.read_bytes()
    path.write_bytes(content[: own.choice((0, own.randrange(20), own.randrange(len(content)), len(content) - 1))])
    return "a file is cut short"


def _head(own: Own, place: Path) -> str:
    path = _any_file(own, place)
    content = bytearray(path.read_bytes())
    at = own.randrange(16 if "images" in path.name else 8)
    content[at] = (content[at] + own.randint(1, 255)) % 256
    path.write_bytes(content)
    return "a file's head claims another type or shape"


def _of_another_shape(own: Own, place: Path) -> str:
    shape = own.choice(((60, 28), (60, 28, 28, 1), (59, 28, 28), (60, 0, 28), (60, 5, 5), (784,), (60, 28, 29)))
    (place / IMAGES).write_bytes(idx(np.zeros(shape, np.uint8)))
    return "pixels of another shape"


def _labels_out_of_range(own: Own, place: Path) -> str:
    content = bytearray((place / LABELS).read_bytes())
    for row in own.sample(range(60), own.randint(1, 5)):
        content[8 + row] = own.randint(10, 255)
    (place / LABELS).write_bytes(content)
    return "labels out of range"


def _few(own: Own, place: Path) -> str:
    count = own.choice((0, 0, 1, 1, 2, 9))
    pixels, labels = made_up(count, 28, 1)
    (place / IMAGES).write_bytes(idx(pixels[:, 0]))
    (place / LABELS).write_bytes(idx(labels))
    return f"{count} examples" if count != 1 else "one example"


def _one_class(own: Own, place: Path) -> str:
    (place / LABELS).write_bytes(idx(np.full(60, own.randrange(10))))
    return "one class alone"


def _missing(own: Own, place: Path) -> str:
    path = _any_file(own, place)
    path.unlink()
    if own.random() < 0.5:
        path.mkdir()
    return "a file is missing, or a folder"


def _swapped(own: Own, place: Path) -> str:
    one, two = own.sample(sorted(place.iterdir()), 2)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    return SAME if ("images" in one.name) == ("images" in two.name) else "pixels and labels are swapped"


def _any_file(own: Own, place: Path) -> Path:
    return own.choice(sorted(place.iterdir()))


FILES = (_cut, _head, _of_another_shape, _labels_out_of_range, _few, _one_class, _missing, _swapped)


def files(world: World, count: int, seed: int = 15) -> Iterator[Outcome]:
    """Faults in the four files of a set of MNIST's kind."""
    own, sound = random.Random(seed), Path(world.run.data.dir or "")
    for number in range(count):
        place = world.place / f"data-{number}"
        shutil.copytree(sound, place)
        said = FILES[number % len(FILES)](own, place)
        yield _trained(
            world, dataclasses.replace(world.run, data=dataclasses.replace(world.run.data, dir=str(place))), place, said
        )


def _empty_image(own: Own, place: Path) -> str:
    _image(own, place).write_bytes(b"")
    return "an empty image"


def _cut_image(own: Own, place: Path) -> str:
    path = _image(own, place)
    path.write_bytes(path.read_bytes()[: own.randint(1, 150)])
    return "an image cut short"


def _no_image(own: Own, place: Path) -> str:
    _image(own, place).write_bytes(own.randbytes(300))
    return "an image that is none"


def _deep_image(own: Own, place: Path) -> str:
    _image(own, place).write_bytes(
        png(np.random.default_rng(own.randrange(99)).integers(0, 65536, (1, 14, 14), dtype=np.uint16))
    )
    return "an image of 16 bits among those of 8"


def _empty_class(own: Own, place: Path) -> str:
    for path in (place / "train" / own.choice(CLASSES)).iterdir():
        path.unlink()
    return "a class without images"


def _one_folder(own: Own, place: Path) -> str:
    for name in own.sample(CLASSES, 2):
        shutil.rmtree(place / "train" / name)
    return "one class alone"


def _stranger(own: Own, place: Path) -> str:
    (place / "train" / own.choice(CLASSES) / own.choice(("notes.txt", "a.npy", "Thumbs.db"))).write_bytes(b"x")
    return "a file that is no image"


def _no_train(own: Own, place: Path) -> str:
    shutil.rmtree(place / own.choice(("train", "test")))
    return "a split is missing"


FOLDERS = (_empty_image, _cut_image, _no_image, _deep_image, _empty_class, _one_folder, _stranger, _no_train)


def folders(world: World, count: int, seed: int = 16) -> Iterator[Outcome]:
    """Faults in a folder of images."""
    own = random.Random(seed)
    pixels, labels = made_up(48, 14, 1, classes=3)
    for number in range(count):
        place = world.place / f"images-{number}"
        for split, part in (("train", slice(0, 36)), ("test", slice(36, 48))):
            save_folder(place / split, pixels[part], labels[part], CLASSES)
        said = FOLDERS[number % len(FOLDERS)](own, place)
        run = dataclasses.replace(world.run, data=Data(name="folder", dir=str(place), channels=1, size=14))
        yield _trained(world, run, place, said)


def _image(own: Own, place: Path) -> Path:
    return own.choice(sorted((place / "train").rglob("*.png")))


def _trained(world: World, run: Any, place: Path, said: str) -> Outcome:
    folder = world.folder()
    ended = children.run(lambda: whole_runs.go(run, folder))
    if said == SAME:
        came, whole = "it trains, and its ledger is whole", charged(folder) == len(ended.noised) == len(world.noised)
        wrong = f"it {ended.how}: {ended.text}" if ended.how != "done" else "" if whole else "the ledger is not whole"
    else:
        came, wrong = "a sentence without data, and nothing spent", _unclear(ended, place) or _quoted(ended, place)
        wrong = wrong or ("it left a folder, or spent something" if folder.exists() or entered(folder) or ended.noised else "")
    world.forget(folder)
    shutil.rmtree(place)
    return Outcome(f"data: {said}", run.data.name, came, wrong and f"{said}: {wrong}")


def _quoted(ended: Ended, place: Path) -> str:
    """What a sentence quotes of the labels that are out of range."""
    path = place / LABELS
    odd = {str(label) for label in path.read_bytes()[8:] if label > 9} if path.is_file() else set()
    quoted = sorted(odd & set(re.findall(r"\b\d+\b", ended.text.replace(str(place), ""))))
    return f"it quotes {quoted}: {ended.text}" if quoted and "outside" in ended.text else ""


def _unclear(ended: Ended, place: Path) -> str:
    """Several problems are told in several lines, a sentence each."""
    if "\n  - " not in ended.text:
        return unclear(ended, place)
    return (
        ""
        if ended.how == "said" and all(line.rstrip().endswith((".", ":")) for line in ended.text.splitlines())
        else f"not clear: {ended.text}"
    )


class Records(Dataset[Any]):
    """Records of four numbers, some of which are broken: from the start, or once training has begun."""

    def __init__(self, how: str, broken: frozenset[int], count: int = 30, begun: bool = False) -> None:
        self.how, self.broken, self.begun = how, broken, begun
        self.inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, place: int) -> Any:
        sound = self.inputs[place], place % 3
        if place not in self.broken or not self.begun:
            return sound
        if self.how == "raises":
            raise ValueError(f"the record of {sound[0].tolist()} is truncated")
        odd = {
            "not a number": torch.full((4,), torch.nan), "infinite": torch.tensor([0.0, torch.inf, 1.0, 2.0]),
            "huge": torch.full((4,), 3e38), "of another shape": torch.zeros(5), "of another type": torch.zeros(4, dtype=torch.float64),
        }  # fmt: skip
        return (sound[0], 9) if self.how == "labelled out of range" else (odd[self.how], sound[1])


HOW = (
    "not a number", "infinite", "huge", "of another shape", "of another type", "raises", "labelled out of range", "alone",
)  # fmt: skip
UNLIKE = ("of another shape", "of another type", "raises")
"""What is seen when a data set is read before the first event."""


def records(count: int, seed: int = 17) -> Iterator[Outcome]:
    """Records of a data set of the user's own that break while a private loop reads them: they count as zero, in silence. Or
    there is one record only."""
    own = random.Random(seed)
    for number in range(count):
        how = HOW[number % len(HOW)]
        broken = frozenset(own.sample(range(1, 30), own.choice((1, 3, 28, 29)))) if how != "alone" else frozenset()
        from_start = number // len(HOW) % 2 == 1
        data = Records(how, broken, 1 if how == "alone" else 30, from_start)
        ended = children.run(lambda data=data: _loop(data))  # type: ignore[misc]
        said = {"raises": "records that raise when they are read", "alone": "one record alone"}.get(
            how, f"records that are {how}"
        )
        if from_start and how in UNLIKE:
            came, wrong = "a sentence without data, before any sum was noised", unclear(ended, Path("/"))
            wrong = wrong or (f"it quotes data: {ended.text}" if re.search(r"\d\.\d", ended.text) else "")
            wrong = wrong or ("something was spent" if ended.noised else "")
        else:
            came = "it trains; the ledger is whole" if how == "alone" else "they count as zero, in silence; the ledger is whole"
            wrong = "" if (ended.how, ended.text, len(ended.noised)) == ("done", "3", 3) else f"it {ended.how}: {ended.text}"
        when = "" if how == "alone" else ", from the start" if from_start else ", once training has begun"
        yield Outcome(f"data: {said}{when}", f"{len(broken)} of {len(data)}", came, wrong)


def _loop(data: Records) -> str:
    """Three steps; how many the ledger counts, and all that was printed or warned of."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        warnings.simplefilter("always")
        private = sparsedp.attach(
            model, optimizer, nn.CrossEntropyLoss(reduction="none"), num_examples=len(data), batch_size=len(data),
            noise_multiplier=1.0, steps=3, delta=1e-3, key=keys.chosen("a"),
        )  # fmt: skip
        for batch in private.batches(data):
            data.begun = True
            private.backward(batch)
            optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters()), "the model is not finite"
    return f"{sum(entry.count for entry in private.ledger.entries)}{printed.getvalue()}"
