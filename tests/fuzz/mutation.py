"""Damage to bytes: what a bad disk, a cut transfer or an enemy does to a valid file."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random

EXTREME = (
    0, 1, 2, 3, 7, 8, 9, 127, 128, 255, 256, 1023, 4096, 32767, 32768, 65535, 65536, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32,
    2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip
"""Numbers at which counts and lengths overflow, or claim what is not there."""
LONGEST = 1 << 18
NUMBER = re.compile(rb"-?\d+(\.\d+)?(e-?\d+)?")


def damaged(rng: Random, seeds: Sequence[bytes], words: Sequence[bytes] = (), head: int = 64) -> bytes:
    """One of the seeds with one or a few faults, half of them near its beginning, where lengths are. Now and then none."""
    blob = bytearray(rng.choice(seeds))
    if rng.random() < 0.02:
        return bytes(blob)
    while True:
        place = rng.randrange(min(head, len(blob)) if rng.random() < 0.5 and blob else len(blob) + 1) if blob else 0
        rng.choice(FAULTS)(rng, blob, place, seeds, words)
        del blob[LONGEST:]
        if rng.random() < 0.5:
            return bytes(blob)


Fault = Callable[[Random, bytearray, int, Sequence[bytes], Sequence[bytes]], None]


def _flip(rng: Random, blob: bytearray, place: int, seeds: Sequence[bytes], words: Sequence[bytes]) -> None:
    if place < len(blob):
        blob[place] ^= 1 << rng.randrange(8)


def _overwrite(rng: Random, blob: bytearray, place: int, seeds: Sequence[bytes], words: Sequence[bytes]) -> None:
    count = 1 << rng.randrange(5)
    blob[place : place + count] = rng.randbytes(count)


def _truncate(rng: Random, blob: bytearray, place: int, seeds: Sequence[bytes], words: Sequence[bytes]) -> None:
    del blob[rng.randrange(len(blob) + 1) :]


def _behead(rng: Random, blob: bytearray, place: int, seeds: Sequence[bytes], words: Sequence[bytes]) -> None:
    del blob[: 1 << rng.randrange(6)]


def _cut_out(rng: Random, blob: bytearray, place: int, seeds: Sequence[bytes], words: Sequence[bytes]) -> None:
    del blob[place : place + (1 << rng.randrange(8))]


def _insert(rng: Random, blob: bytearray, place: int, seeds: Sequence[bytes], words: Sequence[bytes]) -> None:
    blob[place:place] = rng.choice(words) if words and rng.random() < 0.7 else rng.randbytes(1 << rng.randrange(6))


def _duplicate(rng: Random, blob: bytearray, place: int, seeds: Sequence[bytes], words: Sequence[bytes]) -> None:
    piece = blob[place : place + (1 << rng.randrange(9))]
    blob[place:place] = piece * rng.choice((1, 1, 1, 2, 3, 100))


def _splice(rng: Random, blob: bytearray, place: int, seeds: Sequence[bytes], words: Sequence[bytes]) -> None:
    other = rng.choice(seeds)
    blob[place:] = other[rng.randrange(len(other) + 1) if rng.random() < 0.5 else place :]


def _swap(rng: Random, blob: bytearray, place: int, seeds: Sequence[bytes], words: Sequence[bytes]) -> None:
    count, other = 1 << rng.randrange(7), rng.randrange(len(blob) + 1)
    first, last = min(place, other), max(place, other)
    blob[first:] = blob[last : last + count] + blob[first + count : last] + blob[first : first + count] + blob[last + count :]


def _number(rng: Random, blob: bytearray, place: int, seeds: Sequence[bytes], words: Sequence[bytes]) -> None:
    """A length or a count that lies, in any of the usual widths and orders."""
    width = rng.choice((1, 2, 4, 4, 8))
    value = (rng.choice(EXTREME) + rng.choice((0, 0, 0, -1, 1))) % (1 << 8 * width)
    blob[place : place + width] = value.to_bytes(width, rng.choice(("little", "big")))


def _digits(rng: Random, blob: bytearray, place: int, seeds: Sequence[bytes], words: Sequence[bytes]) -> None:
    """The same for a number that is written out."""
    found = NUMBER.search(blob, place) or NUMBER.search(blob)
    if found:
        blob[found.start() : found.end()] = rng.choice((
            str(rng.choice(EXTREME)).encode(), b"-%d" % rng.choice(EXTREME), b"", b"1e400", b"nan", b"-inf", b"0x10", b"9" * 5000,
            b"1_0", b"0.5", b"00", "\u0663".encode(),
        ))  # fmt: skip


FAULTS: tuple[Fault, ...] = (
    _flip, _flip, _overwrite, _truncate, _behead, _cut_out, _insert, _duplicate, _splice, _swap, _number, _number, _number, _digits,
)  # fmt: skip
