"""CIFAR-10 and CIFAR-100 in their binary and python formats, as an archive or a folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from sparsedp.data.files import broken, existing, read_bytes, read_members
from sparsedp.data.restricted import field_of, restricted_loads
from sparsedp.data.values import ArrayImages
from sparsedp.errors import wrong

Arrays = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]
PIXELS = 3 * 32 * 32

CLASSES10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# fmt: off
CLASSES100 = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy", "bridge",
    "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock", "cloud", "cockroach",
    "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish", "forest", "fox", "girl", "hamster",
    "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion", "lizard", "lobster", "man", "maple_tree",
    "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange", "orchid", "otter", "palm_tree", "pear",
    "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine", "possum", "rabbit", "raccoon", "ray", "road",
    "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper", "snail", "snake", "spider", "squirrel",
    "streetcar", "sunflower", "sweet_pepper", "table", "tank", "telephone", "television", "tiger", "tractor", "train",
    "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf", "woman", "worm",
)
# fmt: on


@dataclass(frozen=True)
class Layout:
    """Where one of the two sets keeps its splits, in either format."""

    classes: tuple[str, ...]
    binary: dict[str, tuple[str, ...]]
    python: dict[str, tuple[str, ...]]
    folders: tuple[str, str]  # binary, python
    archives: tuple[str, str]
    coarse: bool  # a coarse label before the fine one in every binary record
    key: str  # of the labels in the python format


BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
LAYOUTS = {
    "cifar10": Layout(
        CLASSES10, {"train": tuple(f"{name}.bin" for name in BATCHES), "test": ("test_batch.bin",)},
        {"train": BATCHES, "test": ("test_batch",)}, ("cifar-10-batches-bin", "cifar-10-batches-py"),
        ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"), False, "labels",
    ),
    "cifar100": Layout(
        CLASSES100, {"train": ("train.bin",), "test": ("test.bin",)}, {"train": ("train",), "test": ("test",)},
        ("cifar-100-binary", "cifar-100-python"), ("cifar-100-binary.tar.gz", "cifar-100-python.tar.gz"), True, "fine_labels",
    ),
}  # fmt: skip


def parse_binary(content: bytes, classes: int, coarse: bool, source: str | Path = "CIFAR data") -> Arrays:
    """Pixels [n, 3, 32, 32] and fine labels of a binary batch: records of one or two label bytes and 3072 pixel bytes."""
    record = PIXELS + 1 + coarse
    if not content or len(content) % record:
        raise broken(source, f"its {len(content)} bytes are not a whole number of {record}-byte records")
    rows = np.frombuffer(content, np.uint8).reshape(-1, record)
    return _checked(rows[:, 1 + coarse :], rows[:, int(coarse)].astype(np.int64), classes, source)


def parse_python(content: bytes, classes: int, key: str, source: str | Path = "CIFAR data") -> Arrays:
    """The same from a pickled batch, a dictionary with `data` [n, 3072] and a list of labels; nothing in it is executed."""
    batch = restricted_loads(content, source)
    data, labels = field_of(batch, "data", source), field_of(batch, key, source)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != PIXELS or not len(data):
        raise broken(source, f"its data are not rows of {PIXELS} unsigned bytes")
    if not isinstance(labels, list) or len(labels) != len(data) or not all(type(label) is int for label in labels):
        raise broken(source, f"its labels are not a list of {len(data)} whole numbers, one per image")
    if not all(0 <= label < classes for label in labels):
        raise broken(source, f"it holds a label outside 0 to {classes - 1}")
    return _checked(data, np.array(labels, np.int64), classes, source)


def _checked(data: npt.NDArray[np.uint8], labels: npt.NDArray[np.int64], classes: int, source: str | Path) -> Arrays:
    if labels.max() >= classes:
        raise broken(source, f"it holds a label outside 0 to {classes - 1}")
    return data.reshape(-1, 3, 32, 32), labels


def read_split(name: str, place: Path, split: str) -> ArrayImages:
    """One split of `name` from `place`: a folder with the batches, a folder above it or above an archive, or an archive."""
    layout = LAYOUTS[name]
    wanted = layout.binary[split] + layout.python[split]
    parsed = {}
    for source, member, content in _batches(layout, _located(layout, place, wanted), split):
        if member in layout.binary[split]:
            parsed[member] = parse_binary(content, len(layout.classes), layout.coarse, source)
        else:
            parsed[member] = parse_python(content, len(layout.classes), layout.key, source)
    arrays = [parsed[member] for member in wanted if member in parsed]
    pixels, labels = (np.concatenate(parts) for parts in zip(*arrays, strict=True))
    return ArrayImages(torch.from_numpy(pixels), torch.from_numpy(labels), len(layout.classes))


def _located(layout: Layout, place: Path, wanted: tuple[str, ...]) -> Path:
    if place.is_file() or any((place / name).is_file() for name in wanted):
        return place
    for name in layout.folders + layout.archives:
        if (place / name).exists():
            return place / name
    raise wrong(
        "the folder", str(place), f"it holds none of {', '.join(layout.folders + layout.archives)}",
        "give the folder or archive as --data.dir",
    )  # fmt: skip


def _batches(layout: Layout, place: Path, split: str) -> Iterator[tuple[str, str, bytes]]:
    """(where it came from, batch name, content) of every batch of the split."""
    if place.is_file():
        python = "python" in place.name or place.name.endswith("-py.tar.gz")
        names = (layout.python if python else layout.binary)[split]
        for name, content in read_members(place, names):
            yield f"{place}:{name}", name, content
        return
    python = not (place / layout.binary[split][0]).is_file() and (place / layout.python[split][0]).is_file()
    for name in (layout.python if python else layout.binary)[split]:
        path = existing(place, [name])
        yield str(path), name, read_bytes(path)
