"""Files made of parts: safetensors, zip, npy, tar and idx, each part of which may be at odds with the others, checksums right."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zipfile
from collections.abc import Mapping
from random import Random
from typing import Any

import numpy as np

from tests.fuzz.mutation import EXTREME, damaged
from tests.fuzz.trees import RAW, changed, written

KINDS = ("BOOL", "U8", "I8", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "F64", "I64", "U64", "F8_E4M3", "C64", "F4", "")
NAMES = {"float32": "F32", "float64": "F64", "int64": "I64", "uint8": "U8", "bool": "BOOL"}
HEADER_WORDS: tuple[Any, ...] = (
    *KINDS, [], [0], [1], [2**32, 2**32], [2**63], [-1], [0, 2**40], [1.5], [0, 0], [0, 8], [8, 0], [0, 2**64], {}, {"__metadata__": {}},
    {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]},
)  # fmt: skip


def header_of(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> tuple[dict[str, Any], bytes]:
    """The header and the body of a safetensors file."""
    rows: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    body = b""
    for name, value in tensors.items():
        raw = value.tobytes()
        rows[name] = {
            "dtype": NAMES[str(value.dtype)],
            "shape": list(value.shape),
            "data_offsets": [len(body), len(body) + len(raw)],
        }
        body += raw
    return rows, body


def block(header: bytes, body: bytes) -> bytes:
    """A safetensors file of these two."""
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + body


def odd_block(rng: Random, header: Mapping[str, Any], body: bytes) -> bytes:
    """A safetensors file whose header says other things than the body holds, or is no header at all."""
    kind = rng.randrange(12)
    if kind == 0:
        return block(rng.choice(RAW), body)
    if kind == 1:
        good = block(json.dumps(header).encode(), body)
        return rng.choice(EXTREME).to_bytes(9, "little")[:8] + good[8:]
    if kind < 5:
        return damaged(rng, [block(json.dumps(header).encode(), body)], RAW[:9], head=200)
    told = written(rng, changed(rng, json.dumps(header), HEADER_WORDS))
    if rng.random() < 0.2:
        body = damaged(rng, [body]) if body else rng.randbytes(8)
    return block(told, body)


def zipped(rng: Random | None, members: Mapping[str, bytes]) -> bytes:
    """A zip archive, its checksums right; with `rng`, members may be missing, doubled, renamed or compressed in another way."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in members.items():
            how, times = zipfile.ZIP_STORED, 1
            if rng is not None and rng.random() < 0.15:
                times = rng.choice((0, 1, 2))
                how = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2))
                name = rng.choice((name, f"../{name}", f"/{name}", name.upper(), "archive/data.pkl", "data.npy", "x" * 300, ""))
            for _ in range(times):
                info = zipfile.ZipInfo(name)
                info.compress_type = how
                archive.writestr(info, content)
    return out.getvalue()


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, array, allow_pickle=True)
    return out.getvalue()


def odd_npy(rng: Random, array: np.ndarray) -> bytes:
    """An npy file whose header's text is odd."""
    if rng.random() < 0.4:
        return damaged(rng, [npy(array)], head=128)
    kind = rng.choice(("|u1", "<i8", "<f8", "|O", "|O8", "V4", "<U8", "i1000", "", "|b1", "<M8[s]", "<c16"))
    shape = rng.choice(
        (
            str(array.shape),
            "()",
            "(2**70,)",
            f"({10**20},)",
            "(-1,)",
            "(1,)*40",
            "[1]",
            "'x'",
            f"({2**31}, {2**31})",
            "(0, 3072)",
        )
    )
    told = rng.choice((
        f"{{'descr': '{kind}', 'fortran_order': {rng.choice(('False', 'True', '2', 'None'))}, 'shape': {shape}, }}",
        "__import__('os').system('touch marker')", "{" * 500, "(" * 3000, "'" * 9, "[lambda: 0]", "{'descr': [('a', '<f8', (2**30,))]}",
        f"{{'descr': [('a', '|O')], 'fortran_order': False, 'shape': {shape}}}", "9**9**9", "b'" + "\\x00" * 50 + "'",
    ))  # fmt: skip
    version = rng.choice((1, 1, 1, 2, 3, 4, 255))
    width = 2 if version == 1 else 4
    return b"\x93NUMPY" + bytes([version, 0]) + len(told).to_bytes(width, "little") + told.encode() + array.tobytes()


BOMB = gzip.compress(bytes(40 << 20), 9)
"""Forty megabytes of nothing in forty kilobytes."""


def tarred(rng: Random, members: Mapping[str, bytes]) -> bytes:
    """A tar.gz; members may be missing, doubled, links, devices, sparse, elsewhere, or claim another size."""
    out = io.BytesIO()
    with tarfile.open(
        fileobj=out, mode="w", format=rng.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT))
    ) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            if rng.random() < 0.2:
                info.type = rng.choice((b"0", b"1", b"2", b"3", b"5", b"6", b"7", b"L", b"x", b"g", b"S", b"V"))
                info.linkname = rng.choice(("/etc/passwd", "../../x", name))
                info.name = rng.choice((name, f"../../{name}", f"/{name}", "x/" * 40 + name))
            tar.addfile(info, io.BytesIO(content))
    plain = damaged(rng, [out.getvalue()], head=2048) if rng.random() < 0.5 else out.getvalue()
    packed = gzip.compress(plain, 1)
    return damaged(rng, [packed], head=32) if rng.random() < 0.3 else packed
