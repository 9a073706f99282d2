"""The pickles in which some data sets are published, read without running anything that they name.

Two walls. First the opcodes are listed (never executed) and compared with the few that plain values and arrays need.
Then the unpickler runs with a `find_class` that gives stand-ins of ours for the five names that numpy writes, and nothing
for any other name. The stand-ins take no state that they do not check, and no object of numpy is built from the file.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sparsedp.data.files import broken
from sparsedp.errors import UsageError

# fmt: off
OPCODES = frozenset({
    "PROTO", "FRAME", "STOP", "MARK", "POP", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG1",
    "SHORT_BINSTRING", "BINSTRING", "STRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "BINUNICODE",
    "SHORT_BINUNICODE", "UNICODE", "EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS",
    "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET",
    "LONG_BINGET", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "BINFLOAT",
})
# fmt: on
FEW = 1000  # tuples and huge numbers. An array needs about five tuples; nesting them without end would overflow the stack
STEPS = 1_000_000  # opcodes; a batch of CIFAR-100 has about 300,000, and each may make an object of a hundred bytes
HUGE = 1 << 63  # numbers beyond it can be chosen so that they collide as keys, and a dictionary of many takes hours to fill
NUMBERS = frozenset(f"{kind}{size}" for kind in "ui" for size in (1, 2, 4, 8)) | {"f4", "f8"}


class _Refused(Exception):
    """The pickle holds something other than plain values and arrays."""


class _Inert:
    """What the file can hold but not change: any state that is handed to it is refused."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise _Refused


class _Type(_Inert):
    """Stands for a numpy dtype of plain numbers: `short` is such as 'u1', `order` one of '<', '>' and '|'."""

    __slots__ = ("order", "short")

    def __init__(self, short: str) -> None:
        self.short, self.order = short, "|"

    def __setstate__(self, state: object) -> None:
        order = _text(state[1]) if isinstance(state, tuple) and len(state) >= 2 else ""
        if order not in ("<", ">", "|"):
            raise _Refused
        self.order = order

    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.order + self.short)


class _Room:
    """How many bytes may still be made from text: in all no more than the file has, however often it names the same text."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left

    def encoded(self, text: str) -> bytes:
        self.left -= len(text)
        if self.left < 0:
            raise _Refused
        return text.encode("latin1")


class _Array(_Inert):
    """Stands for a numpy array; `value` is there once its state has been checked."""

    __slots__ = ("room", "value")

    def __init__(self, room: _Room) -> None:
        self.room = room

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise _Refused
        _, shape, kind, fortran, raw = state
        self.value = _array(raw, kind, shape, "F" if fortran is True or fortran == 1 else "C", self.room)


class _Name(_Inert):
    """What a global name in the file becomes: callable, and nothing else."""

    __slots__ = ("name", "room")

    def __init__(self, name: str, room: _Room) -> None:
        self.name, self.room = name, room

    def __call__(self, *given: Any) -> object:
        match self.name, given:
            case "_reconstruct", (_Name(), _, _):
                return _Array(self.room)
            case "_frombuffer", (raw, kind, shape, order):
                made = _Array(self.room)
                made.value = _array(raw, kind, shape, _text(order), self.room)
                return made
            case "dtype", (short, *_) if _text(short) in NUMBERS:
                return _Type(_text(short))
            case "encode", (str() as text, coding) if _text(coding) == "latin1":
                return self.room.encoded(text)
        raise _Refused


NAMES = frozenset(
    [("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")]
    + [(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")]
    + [(f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")]
)


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")
        self.room = _Room(len(content))

    def find_class(self, module: str, name: str) -> _Name:
        if (module, name) not in NAMES:
            raise _Refused
        return _Name(name, self.room)


def restricted_loads(content: bytes, source: str | Path = "pickled data") -> dict[Any, Any]:
    """The dictionary pickled in `content`. Its values are plain or arrays; take them out with `field_of`."""
    try:
        _check_opcodes(content)
        value = _Unpickler(content).load()
    except _Refused as error:
        raise broken(source, "it is a pickle of more than arrays, text, numbers, lists and dictionaries") from error
    except Exception as error:  # noqa: BLE001 - the unpickler raises whatever the bytes make it stumble over
        raise _not_a_pickle(source) from error
    if not isinstance(value, dict):
        raise broken(source, f"it holds a {type(value).__name__.lstrip('_').lower()} where a dictionary belongs")
    return value


def field_of(values: dict[Any, Any], key: str, source: str | Path) -> object:
    """The value of `key`, which Python 2 wrote as bytes; arrays as numpy arrays."""
    for spelling in (key, key.encode()):
        if spelling in values:
            found = values[spelling]
            return getattr(found, "value", None) if isinstance(found, _Array) else found
    raise broken(source, f"it has no entry {key!r}")


def _not_a_pickle(source: str | Path) -> UsageError:
    return broken(source, "it is not a complete pickle")


def _check_opcodes(content: bytes) -> None:
    rare = 0
    for steps, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if opcode.name not in OPCODES or steps >= STEPS:
            raise _Refused
        rare += opcode.name.startswith("TUPLE") or (isinstance(argument, int) and abs(argument) >= HUGE)
        # the table of remembered objects is allocated up to the largest index named
        if rare > FEW or (opcode.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > len(content)):
            raise _Refused


def _array(raw: object, kind: object, shape: object, order: str, room: _Room) -> npt.NDArray[Any]:
    if isinstance(raw, str):
        raw = room.encoded(raw)
    sizes = isinstance(shape, tuple) and len(shape) <= 8 and all(type(size) is int and size >= 0 for size in shape)
    if not isinstance(raw, bytes | bytearray) or not isinstance(kind, _Type) or not sizes or order not in ("C", "F"):
        raise _Refused
    dtype = kind.dtype()
    if len(raw) != math.prod(shape) * dtype.itemsize:  # type: ignore[arg-type]
        raise _Refused
    return np.frombuffer(raw, dtype).reshape(shape, order=order)  # type: ignore[call-overload,no-any-return]


def _text(value: object) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else value if isinstance(value, str) else ""
