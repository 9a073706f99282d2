"""Named streams of random numbers, each a function of (key, name, where), from SHAKE-256 in counter mode.

Nothing here has state: the same key, name and place give the same numbers, whoever asks and in whatever order. So any
step can be recomputed, a rank can draw its own part, and two neighbouring data sets see the same coins. Keys are made
outside this folder (`sparsedp.keys`); a key that a user chose makes the run reproducible, and therefore not private.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparsedp.errors import require

Words = npt.NDArray[np.uint64]
BLOCK = 1 << 15  # words hashed at one go: 256 KiB, the least that is drawn again for a part of a tensor


@dataclass(frozen=True, repr=False)
class Key:
    """The secret behind every stream of a run. `given` keys came from a user or a test, not from the operating system."""

    secret: bytes
    given: bool

    def __post_init__(self) -> None:
        require(len(self.secret) >= 32, "a key's length", len(self.secret), "keys have at least 32 bytes", "use sparsedp.keys")

    def __repr__(self) -> str:
        return f"Key(hidden, given={self.given})"


def raw(key: Key, count: int, name: str, *where: int | str) -> bytes:
    """The first `count` bytes of the stream `name` at the place `where`."""
    hasher = hashlib.shake_256(len(key.secret).to_bytes(8, "big") + key.secret)
    for part in (name, *where):
        coded = part.encode() if isinstance(part, str) else int(part).to_bytes(16, "big", signed=True)
        hasher.update(bytes([isinstance(part, str)]) + len(coded).to_bytes(8, "big") + coded)
    return hasher.digest(count)


def words(key: Key, start: int, stop: int, name: str, *where: int | str) -> Words:
    """Words [start, stop) of the stream: independent uniform 64-bit integers."""
    first, last = start // BLOCK, -(-stop // BLOCK)
    parts = []
    for block in range(first, last):
        end = min(stop - block * BLOCK, BLOCK)
        parts.append(np.frombuffer(raw(key, 8 * end, name, *where, block), dtype="<u8")[max(start - block * BLOCK, 0) :])
    return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


def uniform(key: Key, count: int, name: str, *where: int | str) -> Tensor:
    """`count` float64 numbers, uniform on (0, 1]."""
    return torch.from_numpy(_unit_interval(words(key, 0, count, name, *where)))


def normal(key: Key, start: int, stop: int, name: str, *where: int | str) -> Tensor:
    """Standard normal numbers [start, stop) of the stream, in float64, by Box and Muller.

    Number i comes from words 2 * (i // 2) and the one after it, so a part is the same whether drawn alone or with others.
    """
    aligned = start - start % 2
    pairs = torch.from_numpy(_unit_interval(words(key, aligned, stop + stop % 2, name, *where))).reshape(-1, 2)
    radius = pairs[:, 0].log_().mul_(-2).sqrt_()
    angle = pairs[:, 1].mul_(2 * torch.pi)
    both = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1).reshape(-1)
    return both[start - aligned : stop - aligned]


def _unit_interval(drawn: Words) -> npt.NDArray[np.float64]:
    return ((drawn >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53
