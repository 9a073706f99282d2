"""Made-up images, and the files that hold them in every format that is read."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np


def made_up(count: int, side: int = 32, channels: int = 3, classes: int = 10, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 [count, channels, side, side] and labels that go round the classes."""
    pixels = np.random.default_rng(seed).integers(0, 256, (count, channels, side, side), dtype=np.uint8)
    return pixels, np.arange(count) % classes


def png(pixels: np.ndarray) -> bytes:
    """A PNG file of one image [C, H, W], 8 bits or (one channel) 16."""
    from PIL import Image

    array = pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)
    out = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(array)).save(out, "PNG")
    return out.getvalue()


def save_folder(root: Path, pixels: np.ndarray, labels: np.ndarray, classes: tuple[str, ...]) -> None:
    """root/CLASS/NUMBER.png for every image."""
    for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        folder = root / classes[label]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:05d}.png").write_bytes(png(image))


def idx(array: np.ndarray) -> bytes:
    return (
        b"\x00\x00\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()
    )


def save_idx(root: Path, count: int = 30, ending: str = "", stem: str = "-idx") -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The four files of an MNIST-like set, and what they hold."""
    root.mkdir(parents=True, exist_ok=True)
    held = {}
    for seed, (split, name) in enumerate((("train", "train"), ("test", "t10k"))):
        pixels, labels = made_up(count, 28, 1, seed=seed)
        held[split] = (pixels, labels)
        for kind, array in ((f"images{stem}3", pixels[:, 0]), (f"labels{stem}1", labels)):
            content = gzip.compress(idx(array)) if ending else idx(array)
            (root / f"{name}-{kind}-ubyte{ending}").write_bytes(content)
    return held


def cifar_binary(pixels: np.ndarray, labels: np.ndarray, coarse: bool = False) -> bytes:
    columns = [np.zeros_like(labels)[:, None]] * coarse + [labels[:, None], pixels.reshape(len(pixels), -1)]
    return np.concatenate(columns, axis=1).astype(np.uint8).tobytes()


def cifar_python(pixels: np.ndarray, labels: np.ndarray, key: str = "labels", protocol: int = 2) -> bytes:
    batch = {"data": pixels.reshape(len(pixels), -1), key: labels.tolist(), "batch_label": "made up", "filenames": ["x.png"]}
    return pickle.dumps(batch, protocol=protocol)


def save_cifar10(root: Path, python: bool = False, per_batch: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """The six batches of a CIFAR-10-like set; returns what the training split holds."""
    root.mkdir(parents=True, exist_ok=True)
    held = []
    for number in range(6):
        pixels, labels = made_up(per_batch, seed=number)
        name = "test_batch" if number == 5 else f"data_batch_{number + 1}"
        content = cifar_python(pixels, labels) if python else cifar_binary(pixels, labels)
        (root / (name if python else f"{name}.bin")).write_bytes(content)
        held.append((pixels, labels))
    return np.concatenate([p for p, _ in held[:5]]), np.concatenate([n for _, n in held[:5]])


def archive(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
