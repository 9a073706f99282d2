"""Pickles that try to run something, to fill the memory, or to confuse a reader of arrays."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from random import Random

import numpy as np

from tests.fuzz.mutation import EXTREME, damaged

RUNS = (
    ("os", "system"), ("posix", "system"), ("os", "abort"), ("os", "mkdir"), ("subprocess", "check_call"), ("subprocess", "Popen"),
    ("builtins", "eval"), ("builtins", "exec"), ("__builtin__", "eval"), ("builtins", "getattr"), ("builtins", "__import__"),
    ("builtins", "open"), ("builtins", "bytearray"), ("builtins", "print"), ("pty", "spawn"), ("socket", "create_connection"),
    ("shutil", "rmtree"), ("sys", "exit"), ("runpy", "run_path"), ("importlib", "import_module"), ("numpy", "load"),
    ("numpy.core.multiarray", "os.system"), ("numpy", "ndarray.tofile"), ("numpy.f2py", "compile"), ("numpy.testing", "rundocs"),
    ("numpy", "dtype.__class__"), ("torch", "load"), ("torch.hub", "load"), ("torch.jit", "load"), ("torch", "classes.load_library"),
    ("torch.serialization", "load"), ("torch.utils.cpp_extension", "load"), ("code", "interact"), ("time", "sleep"), ("signal", "pause"),
    ("ctypes", "string_at"), ("operator", "attrgetter"), ("functools", "partial"), ("_codecs", "decode"), ("copyreg", "_reconstructor"),
    ("collections", "OrderedDict"), ("collections", "Counter"), ("builtins", "set"), ("builtins", "complex"), ("builtins", "bytes"),
)  # fmt: skip
ARGUMENTS = (
    b"X\x0c\x00\x00\x00touch marker", b"U\x0ctouch marker", b"K\x00", b"J\xff\xff\xff\x7f", b"\x8a\x05\x00\x00\x00\x00\x10", b"N", b"]", b"}",
    b"X\x01\x00\x00\x00.", b"(K\x01K\x02l", b"G\x7f\xf0\x00\x00\x00\x00\x00\x00",
)  # fmt: skip


def call(rng: Random, module: str, name: str, argument: bytes) -> bytes:
    """Opcodes that call module.name(argument), in one of the ways that pickle has."""
    told = f"{module}\n{name}\n".encode()
    stacked = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name)) + b"\x93"
    ways = (
        b"c" + told + argument + b"\x85R", stacked + argument + b"\x85R", b"(" + argument + b"i" + told, b"(c" + told + argument + b"o",
        b"c" + told + b")\x81", b"c" + told + b")" + argument + b"}\x92", b"c" + told + b"}" + argument + b"b",
        argument + b"c" + told + b"b", b"c" + told + b")R" + argument + b"b", b"\x82\x01" + argument, b"P1\n", argument + b"Q",
    )  # fmt: skip
    return rng.choice(ways)


def collisions(count: int) -> bytes:
    """Whole numbers of one hash as the keys of a dictionary: every insertion looks at all that came before."""
    prime = 2**61 - 1
    numbers = ((place + 1) * prime for place in range(count))
    return b"\x80\x02}(" + b"".join(b"\x8a\x0a" + n.to_bytes(10, "little") + b"N" for n in numbers) + b"u."


def laughs() -> bytes:
    """A billion laughs: lists of lists that hold each other ten times, small in memory, endless for whoever walks or prints them."""
    levels = b"".join(b"](" + b"h" + bytes([n]) + (b"h" + bytes([n])) * 9 + b"eq" + bytes([n + 1]) for n in range(30))
    return b"\x80\x02}U\x04dataU\x04lolaq\x00" + levels + b"s."


def copies(count: int, size: int = 1 << 18) -> bytes:
    """One long text, encoded again and again: each time a copy of it."""
    text = b"X" + struct.pack("<I", size) + b"a" * size
    return (
        b"\x80\x02}U\x04data]("
        + text
        + b"q\x000c_codecs\nencode\nq\x010h\x00U\x06latin1\x86q\x020"
        + b"h\x01h\x02R" * count
        + b"es."
    )


BOMBS = (
    collisions(60_000), laughs(), copies(4000), b"\x80\x02" + b"]" * 4_000_000 + b".", b"\x80\x02}r\xff\xff\xff\xff.", b"\x80\x02}r\xff\xff\xff\x1f.",
    b"\x80\x02}" + b")" + b"\x85" * 100_000 + b"K\x01s.", b"\x80\x02" + b"(" * 200_000 + b".", b"\x80\x02]" + b"2" * 1000 + b"e.",
    b"\x80\x02]q\x00h\x00a.", b"\x80\x02}q\x00U\x04datah\x00s.", b"\x80\x05\x8e" + b"\xff" * 8 + b".", b"\x80\x02T\xff\xff\xff\x7f.",
    b"\x80\x02X\xff\xff\xff\xff.", b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.", b"\x80\x02\x8b\xff\xff\xff\x7f.", b"\x80\x04\x95" + b"\xff" * 8,
    b"\x80\x02I" + b"9" * 100_000 + b"\n.", b"\x80\x02L" + b"9" * 100_000 + b"L\n.", b"\x80\x05\x96" + b"\xff" * 7 + b"\x7f.", b"\x80\xff.", b".", b"",
)  # fmt: skip


def arrays(key: str = "labels", rows: int = 2, width: int = 3072, low: int = 0) -> list[bytes]:
    """Batches as CIFAR and ImageNet have them, in every protocol, and as Python 2 wrote them."""
    data = np.arange(rows * width, dtype=np.uint8).reshape(rows, width)
    batch = {"data": data, key: [low + n % 10 for n in range(rows)], "batch_label": "made up", "filenames": ["x.png"]}
    old = (
        b"\x80\x02}q\x00U\x04dataq\x01cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85U\x01b\x87Rq\x04"
        b"(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x05U\x02u1K\x00K\x01\x87Rq\x06(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89T" + struct.pack("<I", 3072) + bytes(3072) + b"tbsU" + bytes([len(key)]) + key.encode() + b"q\x07]q\x08K\x01as."
    )
    return [*(pickle.dumps(batch, protocol=protocol) for protocol in range(6)), old]


WORDS = (
    b".", b"(", b")", b"0", b"2", b"R", b"b", b"o", b"\x81", b"\x85", b"\x86", b"\x87", b"a", b"e", b"s", b"u", b"t", b"]", b"}", b"q\x00", b"h\x00",
    b"h\x01", b"cnumpy\ndtype\n", b"cnumpy\nndarray\n", b"cnumpy.core.multiarray\n_reconstruct\n", b"c_codecs\nencode\n", b"U\x02u1", b"U\x02O8", b"U\x01V",
    b"K\x01K\x02\x86", b"J\xff\xff\xff\xff", b"\x80\x04", b"\x93", b"\x94", b"\x8c\x05numpy", b"N", b"\x88", b"\x8f", b"\x97", b"\x98",
)  # fmt: skip
"""Opcodes, alone and with arguments that fit."""


def hostile(rng: Random, seeds: Sequence[bytes]) -> bytes:
    """A pickle to refuse: with a call in it, a bomb, opcodes at random, or a valid one that is damaged."""
    kind = rng.random()
    if kind < 0.45:
        return damaged(rng, seeds, WORDS, head=200)
    if kind < 0.75:
        module, name = rng.choice(RUNS)
        body = call(rng, module, name, rng.choice(ARGUMENTS))
        return _wrapped(rng, body, rng.choice(seeds))
    if kind < 0.752:
        return rng.choice(BOMBS)
    if kind < 0.78:
        return rng.choice(BOMBS[4:])
    body = b"".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 40)))
    if rng.random() < 0.2:
        body += struct.pack("<cI", rng.choice((b"r", b"j", b"X", b"T", b"B")), rng.choice(EXTREME) % 2**32)
    return b"\x80\x02}U\x04data" + body + rng.choice((b"s.", b".", b""))


def _wrapped(rng: Random, body: bytes, seed: bytes) -> bytes:
    """The opcodes alone, as a value, as a key, in a list, or put into a valid pickle."""
    place = rng.randrange(2, len(seed))
    return rng.choice((
        b"\x80\x02" + body + b".", b"\x80\x02}U\x04data" + body + b"s.", b"\x80\x02}" + body + b"K\x01s.", b"\x80\x02}U\x04data]" + body + b"as.",
        b"\x80\x04}\x8c\x04data" + body + b"s.", b"}S'data'\n" + body + b"s.", seed[:2] + body + b"0" + seed[2:], seed[:place] + body + seed[place:],
    ))  # fmt: skip
