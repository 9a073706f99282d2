"""The files of data sets: idx, CIFAR in both formats and as archives, ImageNet32, manifests."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import torch

from sparsedp.data import cifar, folder, idx, imagenet32
from sparsedp.data.values import ArrayImages
from tests.data.pictures import idx as idx_bytes
from tests.fuzz import pickles
from tests.fuzz.containers import BOMB, npy, odd_npy, tarred, zipped
from tests.fuzz.harness import Target
from tests.fuzz.mutation import EXTREME, damaged

PIXELS = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072)
IMAGES, LABELS = idx_bytes(np.arange(75).reshape(3, 5, 5)), idx_bytes(np.array([3, 0, 9]))


def make_idx(rng: Random) -> tuple[bytes, bytes]:
    """A pair of idx files. Some headers name many sides, of which one may be zero."""
    images, labels = damaged(rng, (IMAGES, LABELS), head=16), LABELS
    if rng.random() < 0.2:
        count = rng.choice((0, 1, 2, 3, 8, 32, 33, 64, 255))
        sides = [rng.choice((0, 1, 1, 1, 2, 3, *EXTREME)) % 2**32 for _ in range(count)]
        images = b"\x00\x00\x08" + bytes([count]) + struct.pack(f">{count}I", *sides) + IMAGES[16 : 16 + rng.randrange(80)]
    if rng.random() < 0.4:
        images, labels = (IMAGES, damaged(rng, (LABELS, IMAGES), head=8))
    return images, labels


def read_idx(given: tuple[bytes, bytes], place: Path) -> None:
    sound(idx.images_from(*given, ("images", "labels")))


def sound(found: ArrayImages) -> None:
    """What any set of images is: one label per image, each the number of a class."""
    shape = tuple(found.pixels.shape)
    assert len(shape) == 4 and found.pixels.dtype == torch.uint8 and 0 not in shape
    assert found.labels.shape == shape[:1] and int(found.labels.min()) >= 0 and int(found.labels.max()) < found.num_classes


NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")


def make_gzip(rng: Random) -> tuple[bytes, bytes]:
    """The same, compressed; what is inside may be whole while the compression is not, or far larger than it looks."""
    images, labels = (gzip.compress(part, 1) for part in (make_idx(rng) if rng.random() < 0.3 else (IMAGES, LABELS)))
    if rng.random() < 0.001:
        return BOMB, labels
    return damaged(rng, (images, images + labels), head=20), labels


def read_gzip(given: tuple[bytes, bytes], place: Path) -> None:
    for name, content in zip(NAMES, given, strict=True):
        (place / f"{name}.gz").write_bytes(content)
    sound(idx.read_folder(place, "train"))


BINARY = {coarse: b"".join(bytes([7] * (1 + coarse)) + row.tobytes() for row in PIXELS) for coarse in (False, True)}


def make_binary(rng: Random) -> tuple[bytes, bool]:
    coarse = rng.random() < 0.5
    content = damaged(rng, (BINARY[coarse], BINARY[coarse][:1] * (3073 + coarse), BINARY[not coarse]), head=4)
    if rng.random() < 0.4:  # a whole number of records again
        content += bytes(-len(content) % (3073 + coarse))
    return content, coarse


def read_binary(given: tuple[bytes, bool], place: Path) -> None:
    content, coarse = given
    checked(*cifar.parse_binary(content, 100 if coarse else 10, coarse), 100 if coarse else 10)


def checked(pixels: np.ndarray, labels: np.ndarray, classes: int) -> None:
    """What every reader of 32 by 32 images returns."""
    assert pixels.dtype == np.uint8 and pixels.shape[1:] == (3, 32, 32) and labels.dtype == np.int64
    assert labels.shape == pixels.shape[:1] and len(labels) > 0 and labels.min() >= 0 and labels.max() < classes
    assert int(pixels.astype(np.int64).sum()) >= 0  # every pixel is there to be read


CIFAR, IMAGENET = pickles.arrays(), pickles.arrays(low=1)


def read_pickled(content: bytes, place: Path) -> None:
    checked(*cifar.parse_python(content, 10, "labels"), 10)


def make_archive(rng: Random) -> bytes:
    """The CIFAR-10 archive of the python format: one batch is enough to test on."""
    batch = damaged(rng, CIFAR, pickles.WORDS, head=200) if rng.random() < 0.2 else rng.choice(CIFAR)
    return tarred(rng, {"cifar-10-batches-py/test_batch": batch, "cifar-10-batches-py/batches.meta": b"x"})


def read_archive(content: bytes, place: Path) -> None:
    path = place / "cifar-10-python.tar.gz"
    path.write_bytes(content)
    sound(cifar.read_split("cifar10", path, "test"))


def warm_archive(place: Path) -> None:
    """A whole archive: everything that is imported late."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        info = tarfile.TarInfo("cifar-10-batches-py/test_batch")
        info.size = len(CIFAR[0])
        tar.addfile(info, io.BytesIO(CIFAR[0]))
    read_archive(out.getvalue(), place)


def make_imagenet(rng: Random) -> bytes:
    """A batch, pickled or as npz."""
    if rng.random() < 0.4:
        return pickles.hostile(rng, IMAGENET)
    labels = np.array(rng.choice(([1, 1000], [1, 2], [0, 1], [1], [1.0, 2.0], [1, 1001])))
    arrays = {"data": PIXELS, "labels": labels, "mean": PIXELS[0]}
    odd = rng.choice((*arrays, None))
    members = {f"{name}.npy": odd_npy(rng, value) if name == odd else npy(value) for name, value in arrays.items()}
    content = zipped(rng, members)
    return (
        damaged(rng, (content, content[-200:]), (b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"))
        if rng.random() < 0.4
        else content
    )


def read_imagenet(content: bytes, place: Path) -> None:
    checked(*imagenet32.parse_batch(content), 1000)


def warm_imagenet(place: Path) -> None:
    read_imagenet(IMAGENET[0], place)
    read_imagenet(zipped(None, {"data.npy": npy(PIXELS), "labels.npy": npy(np.array([1, 1000]))}), place)


MANIFESTS = (
    b"path,label,unit,split\na.png,cat,1,train\nb.png,dog,2,test\n", b"path,label\na.png,cat;dog\nb.png,\n", b"label,path\r\ncat,a.png\r\n",
    'path,label\n"a,\n"".png",\u00e9\n'.encode("utf-8-sig"),
)  # fmt: skip
WORDS = (
    b",",
    b"\n",
    b"\r",
    b'"',
    b'""',
    b";",
    b"\0",
    b"\xff",
    b"path",
    b"label",
    b"unit",
    b"split",
    b"../../x",
    b"/etc/passwd",
    b"=1+1",
    b"a" * 140_000,
)


def make_manifest(rng: Random) -> tuple[bytes, bytes | None, bool]:
    classes = damaged(rng, (b"cat\ndog\n",), WORDS) if rng.random() < 0.3 else None
    return damaged(rng, MANIFESTS, WORDS), classes, rng.random() < 0.5


def read_manifest(given: tuple[bytes, bytes | None, bool], place: Path) -> None:
    content, classes, multilabel = given
    (place / "manifest.csv").write_bytes(content)
    declared = place / "classes.txt"
    declared.unlink(missing_ok=True) if classes is None else declared.write_bytes(classes)
    found = folder.list_manifest(place, multilabel)
    assert found.entries and all(entry.path and set(entry.labels) <= set(found.classes) for entry in found.entries)
    labels = folder.label_tensor([entry.labels for entry in found.entries], found.classes, multilabel)
    assert len(labels) == len(found.entries)


def pickled(seeds: list[bytes]) -> Callable[[Random], bytes]:
    return lambda rng: pickles.hostile(rng, seeds)


TARGETS = (
    Target("idx", "MNIST's idx files", make_idx, read_idx, warm=lambda place: read_idx((IMAGES, LABELS), place)),
    Target(
        "idx-gzip", "the same, compressed, from a folder", make_gzip, read_gzip,
        warm=lambda place: read_gzip((gzip.compress(IMAGES), gzip.compress(LABELS)), place),
    ),
    Target(
        "cifar-binary", "CIFAR's binary batches", make_binary, read_binary, warm=lambda place: read_binary((BINARY[True], True), place)
    ),
    Target("cifar-pickle", "CIFAR's pickled batches", pickled(CIFAR), read_pickled, warm=lambda place: read_pickled(CIFAR[0], place)),
    Target("cifar-archive", "CIFAR's archive (tar.gz)", make_archive, read_archive, warm=warm_archive),
    Target("imagenet32", "ImageNet32's batches, pickled or npz", make_imagenet, read_imagenet, warm=warm_imagenet),
    Target(
        "manifest", "CSV manifests and classes.txt", make_manifest, read_manifest,
        warm=lambda place: read_manifest((MANIFESTS[0], None, False), place),
    ),
)  # fmt: skip
