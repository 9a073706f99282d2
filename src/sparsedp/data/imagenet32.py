"""ImageNet at 32 x 32 pixels: its published batches, ten to train and one to validate, pickled or as npz."""

from __future__ import annotations

import io
import math
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from sparsedp.data.files import MIB, broken, existing, read_bytes
from sparsedp.data.restricted import field_of, restricted_loads
from sparsedp.data.values import ArrayImages

CLASSES = 1000
NAMES = {"train": tuple(f"train_data_batch_{number}" for number in range(1, 11)), "test": ("val_data",)}
PIXELS = 3 * 32 * 32
LIMIT = 768 * MIB  # a batch has 128,116 images, 394 MB
FOLDERS = {"train": ("Imagenet32_train", "Imagenet32_train_npz"), "test": ("Imagenet32_val", "Imagenet32_val_npz")}


def parse_npz(content: bytes, source: str | Path = "npz data") -> dict[str, npt.NDArray[np.generic]]:
    """The numeric arrays of an npz archive. Sizes come from what is there, not from what a header claims."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > LIMIT or len(members) > 16:
                raise broken(source, f"it unpacks to more than the {LIMIT // MIB} MiB that such a file can need")
            return {member.filename.removesuffix(".npy"): _parse_npy(archive.read(member), source) for member in members}
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError, ValueError, OverflowError) as error:
        if type(error) is not ValueError and isinstance(error, ValueError):  # a sentence of ours
            raise
        raise broken(source, "it is not a complete npz archive") from error
    except Exception as error:  # noqa: BLE001 - zlib.error, lzma.LZMAError and what a header's text makes numpy raise
        raise broken(source, "it is not a complete npz archive") from error


def _parse_npy(content: bytes, source: str | Path) -> npt.NDArray[np.generic]:
    stream = io.BytesIO(content)
    version = np.lib.format.read_magic(stream)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read_header(stream)
    body = memoryview(content)[stream.tell() :]
    if dtype.kind not in "uif" or any(side < 0 for side in shape):
        raise broken(source, "it holds something other than arrays of numbers")
    if len(body) != math.prod(shape) * dtype.itemsize:
        raise broken(source, "an array in it is not as long as its header says")
    return np.frombuffer(body, dtype).reshape(shape, order="F" if fortran else "C")


def parse_batch(content: bytes, source: str | Path = "ImageNet data") -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Pixels [n, 3, 32, 32] and labels 0 to 999 of one batch, npz if it starts as a zip archive does, else pickled."""
    values = parse_npz(content, source) if content[:2] == b"PK" else restricted_loads(content, source)
    data, published = field_of(values, "data", source), field_of(values, "labels", source)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != PIXELS or not len(data):
        raise broken(source, f"its data are not rows of {PIXELS} unsigned bytes")
    if isinstance(published, list) and not all(type(label) is int and 1 <= label <= CLASSES for label in published):
        raise broken(source, f"it holds a label outside 1 to {CLASSES}")
    labels = np.asarray(published) if isinstance(published, list | np.ndarray) else np.zeros(0)
    if labels.shape != (len(data),) or labels.dtype.kind not in "ui":
        raise broken(source, f"its labels are not {len(data)} whole numbers, one per image")
    if labels.min() < 1 or labels.max() > CLASSES:
        raise broken(source, f"it holds a label outside 1 to {CLASSES}")
    return data.reshape(-1, 3, 32, 32), labels.astype(np.int64) - 1


def read_split(place: Path, split: str) -> ArrayImages:
    """One split from the folder that holds its batches, or from the folder above it; one batch in memory beside the result."""
    paths = [_batch_path(place, split, name) for name in NAMES[split]]
    labels, filled = [], 0
    pixels = torch.empty(0, 3, 32, 32, dtype=torch.uint8)
    for number, path in enumerate(paths):
        data, part = parse_batch(read_bytes(path, LIMIT), path)
        if filled + len(data) > len(pixels):  # room for all batches if the rest are as long as this one; touched when filled
            room = torch.empty(filled + len(data) * (len(paths) - number), 3, 32, 32, dtype=torch.uint8)
            room[:filled] = pixels[:filled]
            pixels = room
        pixels[filled : filled + len(data)] = torch.from_numpy(data.copy())
        filled += len(data)
        labels.append(torch.from_numpy(part))
    return ArrayImages(pixels[:filled], torch.cat(labels), CLASSES)


def _batch_path(place: Path, split: str, name: str) -> Path:
    for folder in FOLDERS[split]:
        if (place / folder).is_dir():
            place = place / folder
            break
    return existing(place, [name, f"{name}.npz"])
