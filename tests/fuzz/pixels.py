"""Image files, in every format that is decoded."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from pathlib import Path
from random import Random

import numpy as np

from sparsedp.data.decoding import Undecodable, decode_image
from tests.fuzz.harness import Target
from tests.fuzz.mutation import EXTREME, damaged

SIDE = 8
WORDS = (
    b"IHDR", b"IDAT", b"PLTE", b"tRNS", b"acTL", b"fcTL", b"iCCP", b"zTXt", b"IEND", b"\xff\xd8", b"\xff\xd9", b"\xff\xda", b"\xff\xc0", b"\xff\xc2",
    b"\xff\xe1\x00\x10Exif\x00\x00", b"II*\x00", b"MM\x00*", b"RIFF", b"WEBPVP8 ", b"VP8L", b"VP8X", b"ANIM", b"BM", b"P5\n", b"P6\n", b"P7\n", b"GIF89a",
    b"9999999 9999999 65535\n", b"\x00\x21\xf9\x04", b"Pf\n",
)  # fmt: skip


def _seeds() -> tuple[bytes, ...]:
    from PIL import Image

    values = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 4), dtype=np.uint8)
    deep = values[:, :, :2].copy().view(np.uint16)[:, :, 0]
    whole, colour, grey = (
        Image.fromarray(values, "RGBA"),
        Image.fromarray(values[:, :, :3].copy()),
        Image.fromarray(values[:, :, 0].copy()),
    )
    made = [
        (colour, "PNG", {}), (whole, "PNG", {}), (grey, "PNG", {}), (Image.fromarray(deep), "PNG", {}), (colour.quantize(8), "PNG", {"transparency": 0}),
        (grey.convert("1"), "PNG", {}), (colour, "JPEG", {}), (colour, "JPEG", {"progressive": True}), (grey, "JPEG", {}),
        (colour.convert("CMYK"), "JPEG", {}), (colour, "TIFF", {}), (colour, "TIFF", {"compression": "tiff_lzw"}),
        (Image.fromarray(deep.astype(np.int32)), "TIFF", {}), (Image.fromarray(deep.astype(np.float32)), "TIFF", {}), (Image.fromarray(deep), "TIFF", {}),
        (colour, "WEBP", {}), (whole, "WEBP", {"lossless": True}), (colour, "BMP", {}), (grey, "BMP", {}), (colour, "PPM", {}), (Image.fromarray(deep), "PPM", {}),
        (colour, "GIF", {}), (colour, "GIF", {"save_all": True, "append_images": [grey, colour]}),
    ]  # fmt: skip
    contents = []
    for image, kind, how in made:
        out = io.BytesIO()
        image.save(out, kind, **how)
        contents.append(out.getvalue())
    plain = (b"P2\n2 2\n255\n1 2 3 4\n", b"P1\n2 2\n1 0 0 1\n", b"P3\n1 1\n9\n1 2 3\n", b"Pf\n1 1\n-1.0\n" + bytes(4))
    return (*contents, *plain)


SEEDS: list[bytes] = []


def seeds() -> list[bytes]:
    """Made when first wanted: the decoder is an extra."""
    if not SEEDS:
        SEEDS.extend(_seeds())
    return SEEDS


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def odd_png(rng: Random) -> bytes:
    """A PNG whose checksums are right and whose header claims what it likes."""
    sides = [rng.choice((1, 7, SIDE, SIDE, *EXTREME)) % 2**32 for _ in range(2)]
    head = struct.pack(
        ">II5B", *sides, rng.choice((1, 2, 4, 8, 16, 32)), rng.choice((0, 2, 3, 4, 6, 5)), 0, 0, rng.choice((0, 0, 1, 2))
    )
    body = zlib.compress(rng.randbytes(rng.choice((0, 9, 80, 400))), 1) if rng.random() < 0.8 else rng.randbytes(40)
    extra = (
        b"", _chunk(b"PLTE", rng.randbytes(rng.choice((3, 24, 7)))), _chunk(b"tRNS", rng.randbytes(rng.choice((1, 6, 300)))),
        _chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(1 << 16))), _chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(1 << 16))),
        _chunk(b"acTL", struct.pack(">II", rng.choice(EXTREME) % 2**32, 0)), _chunk(b"eXIf", rng.randbytes(30)),
    )  # fmt: skip
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + rng.choice(extra) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def make(rng: Random) -> tuple[bytes, int, int]:
    content = odd_png(rng) if rng.random() < 0.15 else damaged(rng, seeds(), WORDS, head=100)
    return content, rng.choice((1, 3)), rng.choice((SIDE, SIDE, 5))


def read(given: tuple[bytes, int, int], place: Path) -> None:
    content, channels, size = given
    found = decode_image(content, channels, size)
    assert found.shape == (channels, size, size) and found.dtype in (np.uint8, np.uint16)


def warm(place: Path) -> None:
    """All decoders are loaded once, before memory is measured."""
    for content in seeds():
        with contextlib.suppress(Undecodable):
            decode_image(content, 3, SIDE)


TARGETS = (Target("images", "image files of seven formats", make, read, megabytes=600, refusals=(Undecodable,), warm=warm),)
