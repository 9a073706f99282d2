"""MNIST and Fashion-MNIST: the idx format, plain or gzipped, and the copy of MNIST that the package carries."""

from __future__ import annotations

import functools
import hashlib
import lzma
import math
import struct
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from sparsedp.data.files import broken, existing, read_bytes
from sparsedp.data.values import ArrayImages

DIGITS = tuple(str(digit) for digit in range(10))
GARMENTS = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
FILES = {"train": "train", "test": "t10k"}
MD5 = {  # of the original files, uncompressed
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


def parse_idx(content: bytes, source: str | Path = "idx data") -> npt.NDArray[np.uint8]:
    """The array of unsigned bytes in an idx file. The header is believed only where the length agrees with it."""
    if len(content) < 4 or content[:3] != b"\x00\x00\x08" or content[3] == 0:
        raise broken(source, "it does not start as an idx file of unsigned bytes does")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise broken(source, "it ends within its header")
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    promised = math.prod(shape)
    if len(content) - start != promised:
        raise broken(source, f"its header promises {promised} bytes of data but it holds {len(content) - start}")
    try:
        return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)
    except ValueError as error:  # more dimensions than an array can have
        raise broken(source, f"its header names {len(shape)} dimensions") from error


def images_from(images: bytes, labels: bytes, names: tuple[str | Path, str | Path]) -> ArrayImages:
    """A pair of idx files as images of ten classes."""
    pixels, numbers = parse_idx(images, names[0]), parse_idx(labels, names[1])
    if pixels.ndim != 3 or 0 in pixels.shape:
        raise broken(names[0], f"it holds an array of shape {pixels.shape} where images (count, height, width) belong")
    if numbers.shape != pixels.shape[:1]:
        raise broken(names[1], f"it holds labels of shape {numbers.shape} for {len(pixels)} images")
    if numbers.max() >= len(DIGITS):
        raise broken(names[1], "it holds a label outside 0 to 9")
    return ArrayImages(torch.from_numpy(pixels[:, None].copy()), torch.from_numpy(numbers.astype(np.int64)), len(DIGITS))


def read_folder(folder: Path, split: str) -> ArrayImages:
    """One split from a folder with the four usual files, each plain or .gz, with '-' or '.' before 'idx'."""
    images, labels = (existing(folder, _spellings(f"{FILES[split]}-{kind}")) for kind in ("images-idx3", "labels-idx1"))
    return images_from(read_bytes(images), read_bytes(labels), (images, labels))


@functools.cache
def embedded(split: str) -> ArrayImages:
    """The original MNIST images that the package carries, decoded once per process and checked by the published md5."""
    names = tuple(f"{FILES[split]}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1"))
    folder = resources.files("sparsedp.data") / "embedded"
    contents = [_unpacked((folder / f"{name}.xz").read_bytes(), name) for name in names]
    return images_from(contents[0], contents[1], (names[0], names[1]))


def _unpacked(compressed: bytes, name: str) -> bytes:
    try:
        content = lzma.decompress(compressed)
    except lzma.LZMAError as error:
        raise broken(f"{name}.xz", "the package's copy is damaged", "install sparsedp again") from error
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != MD5[name]:
        raise broken(f"{name}.xz", "its checksum is not the published one", "install sparsedp again")
    return content


def _spellings(stem: str) -> list[str]:
    dotted = stem.replace("-idx", ".idx")
    return [f"{name}-ubyte{end}" for name in (stem, dotted) for end in ("", ".gz")]
