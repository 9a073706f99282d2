"""`python -m tests.fuzz.bad`: made-up parsers, each with one fault, and what the harness says of them, as JSON."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import NoReturn

from sparsedp.errors import UsageError
from tests.fuzz.harness import Target
from tests.fuzz.suite import FEW, begin_with_one_thread, tried

INPUTS, SEED, BAD = 40, 1, 5


def _refuse(message: str) -> Callable[[Path], NoReturn]:
    def refuse(place: Path) -> NoReturn:
        raise UsageError(message)

    return refuse


def _write_outside(place: Path) -> None:
    (place.parent / "outside").write_text("x")


def _remove_outside(place: Path) -> None:
    (place.parent / "failures").unlink(missing_ok=True)


def _write_beside(place: Path) -> None:
    """Its name begins as the folder's does."""
    Path(f"{place}-more").write_text("x")


def _hidden(place: Path) -> None:
    """A handler for everything does not hide it."""
    try:
        os.system("true")
    except BaseException:  # noqa: BLE001
        return


class _Called:
    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return eval, ("1 + 1",)


PICKLED = pickle.dumps(_Called())


def _unpickle(place: Path) -> None:
    pickle.loads(PICKLED)  # noqa: S301 - what no parser may do


def _raise(error: BaseException) -> Callable[[Path], NoReturn]:
    def fail(place: Path) -> NoReturn:
        raise error

    return fail


def _recur(place: Path) -> None:
    _recur(place)


def _false(place: Path) -> None:
    raise AssertionError("a label outside of the classes")


FAULTS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a wild pointer": ("crash", lambda place: ctypes.string_at(0)),
    "a killed process": ("crash", lambda place: os.abort()),
    "an exit": ("exit", lambda place: os._exit(3)),
    "an exit that looks well": ("exit", lambda place: os._exit(0)),
    "an exit by an error": ("exception", lambda place: sys.exit(0)),
    "an endless wait": ("hang", lambda place: time.sleep(1000)),
    "a file outside": ("escape", _write_outside),
    "a file beside": ("escape", _write_beside),
    "a file removed outside": ("escape", _remove_outside),
    "a process": ("escape", lambda place: subprocess.run(["true"], check=True)),
    "a process, hidden": ("escape", _hidden),
    "code run": ("escape", lambda place: eval("1 + 1")),
    "code in a pickle": ("escape", _unpickle),
    "a module that the input names": ("escape", lambda place: importlib.import_module("fuzz_payload")),
    "memory held": ("memory", lambda place: b"x" * (100 << 20)),
    "memory asked for": ("memory", lambda place: b"x" * (1 << 30)),
    "a traceback": ("exception", _raise(KeyError("labels"))),
    "an end of the stack": ("exception", _recur),
    "an interrupt": ("exception", _raise(KeyboardInterrupt())),
    "a value that cannot be": ("invariant", _false),
    "no full stop": ("message", _refuse("the file is broken")),
    "several lines": ("message", _refuse("the file\nis broken.")),
    "nothing said": ("message", _refuse("")),
    "a page": ("message", _refuse("the file is broken, " * 400 + "that is all.")),
}
"""What goes wrong, what the harness must call it, and how it is done."""


HARMLESS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda place: None,
    "a file inside": lambda place: (place / "inside").write_text("x"),
    "memory never touched": lambda place: bytes(1 << 30),
    "two sentences in a list": _refuse("2 things are wrong:\n  - one is odd.\n  - one is large."),
}


def target(name: str, fault: Callable[[Path], object]) -> Target:
    """A parser that accepts even numbers, refuses odd ones in a sentence, and does something else at one of them."""

    def read(number: int, place: Path) -> None:
        if number == BAD:
            fault(place)
        elif number % 2:
            raise UsageError(f"the number is {number}, which is odd; give an even one.")

    return Target(name, "numbers", make, read, megabytes=60, seconds=3.0)


def make(rng: Random) -> int:
    return rng.randrange(2 * BAD)


def one_sided() -> list[Target]:
    """Parsers that are sound, and inputs that say nothing about them."""
    return [
        replace(target("all refused", HARMLESS["nothing"]), make=lambda rng: 1),
        replace(target("all accepted", HARMLESS["nothing"]), make=lambda rng: 0),
    ]


def main() -> int:
    targets = [target(name, do) for name, do in ({name: do for name, (_, do) in FAULTS.items()} | HARMLESS).items()]
    reports = [*tried(targets, INPUTS, SEED), *tried(one_sided(), FEW, SEED)]
    sys.stdout.write(json.dumps([report.to_json() for report in reports]))
    return 0


if __name__ == "__main__":
    begin_with_one_thread()
    sys.exit(main())
