"""Damage to nested plain values, and to the JSON that they are written in."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from tests.fuzz.mutation import damaged

TEXTS = (
    "", " ", "a", "0", "-1", "1e999", "nan", "none", "auto", "all", "*", "[", "..", "/", "../../x", "a\nb", "a\0b", "\x1b[2J", "%s%n",
    "{0.__class__}", "\ud800", "\u202e", "\ufeff", "\u0663", "x" * 300, "os:system", "os:abort", "http.server:test", "fuzz_payload:run",
)  # fmt: skip
NUMBERS = (
    0, -0.0, 1, -1, 2, 0.5, 0.999999, 1.0000001, 3, 255, -(2**31), 2**31, 2**53, 2**63, 2**64, 10**30, -(10**30), 10**300, 10**400, 1e308,
    -1e308, 5e-324, 1e-14, math.nan, math.inf, -math.inf,
)  # fmt: skip


def odd(rng: Random) -> Any:
    """A value that does not belong where it will be put."""
    kind = rng.randrange(10)
    if kind < 4:
        return rng.choice(NUMBERS)
    if kind < 7:
        return rng.choice(TEXTS)
    made: tuple[Callable[[], Any], ...] = (
        lambda: None, lambda: True, lambda: False, list, dict, lambda: [[]], lambda: {"type": "NoOpDpEvent"}, lambda: [odd(rng)],
        lambda: {rng.choice(TEXTS): odd(rng)}, lambda: nested(rng.choice((5, 100))), lambda: [rng.choice(NUMBERS)] * 20,
    )  # fmt: skip
    return rng.choice(made)()


def nested(depth: int) -> Any:
    """Lists in dictionaries in lists."""
    value: Any = 0
    for level in range(depth):
        value = [value] if level % 2 else {"event": value}
    return value


def changed(rng: Random, text: str, words: Sequence[Any] = ()) -> Any:
    """The value that the JSON text holds, with one or a few faults. Now and then none."""
    holder = [json.loads(text)]
    while rng.random() < 0.85:
        spots = list(_spots(holder))
        where, key = rng.choice(spots)
        kind = rng.randrange(8)
        if kind < 4:
            where[key] = _copy(rng.choice(words)) if words and rng.random() < 0.4 else odd(rng)
        elif kind == 4 and where is not holder:
            del where[key]
        elif kind == 5:
            other, name = rng.choice(spots)
            where[key] = _copy(other[name])
        elif kind == 6:
            where[key] = [where[key]] if rng.random() < 0.5 else {"a": where[key]}
        elif isinstance(where, dict):
            where[rng.choice(TEXTS)] = odd(rng)
        else:
            where.insert(0, odd(rng))
    return holder[0]


def _copy(value: Any) -> Any:
    """A value of its own, so that no later fault changes two places, or makes a circle."""
    try:
        return json.loads(json.dumps(value))
    except RecursionError:
        return 0


def _spots(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        one = waiting.pop()
        pairs = one.items() if isinstance(one, dict) else enumerate(one)
        for key, inner in pairs:
            found.append((one, key))
            if isinstance(inner, dict | list):
                waiting.append(inner)
    return found


RAW = (
    b"", b" ", b"null", b"[]", b"{}", b"{", b"1e999", b"NaN", b"-" + b"9" * 5000, b"9" * 4301, b'"\\ud800"', b'"\xff"', b"\xef\xbb\xbf{}",
    b"[" * 100_000, b'{"a":' * 100_000, b"[" * 990 + b"]" * 990, b'{"a": 1, "a": 2}', b"\0" * 50, "{}".encode("utf-16"),
    "{}".encode("utf-32"),
)  # fmt: skip
"""Texts that are trouble for a reader of JSON, whatever it expects."""


def json_bytes(rng: Random, texts: Sequence[str], words: Sequence[Any] = ()) -> bytes:
    """A file of JSON: values changed, then written down, or its bytes damaged."""
    text = rng.choice(texts)
    kind = rng.randrange(20)
    if kind == 0:
        return rng.choice(RAW)
    if kind < 4:
        return damaged(rng, [t.encode() for t in texts], RAW[:9])
    return written(rng, changed(rng, text, words))


def written(rng: Random, value: Any) -> bytes:
    """JSON in one of the ways that it is written, lone surrogates and all."""
    try:
        return json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    except RecursionError:  # nested values, put into each other
        return b"[" * 5000 + b"]" * 5000
