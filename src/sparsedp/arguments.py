"""What may be said on the command line in more than one way, put into the one way that the parser knows."""

from __future__ import annotations

import functools
import typing
from collections.abc import Sequence
from types import NoneType

from sparsedp.config import Run

SAME = {"prune": {"--criterion": "--sparsity.prune", "--rate": "--sparsity.prune-rate"}}
"""Short names of settings, by verb. They must be settled before the configuration is made, which is checked as a whole."""


def respelt(verb: str, args: Sequence[str]) -> list[str]:
    """The same arguments, with short names written out, and `none` as `None` where an option may be left out."""
    made: list[str] = []
    last = ""
    for word in args:
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        option = SAME.get(verb, {}).get(option, option)
        if value == "none" and (option or last).replace("_", "-") in _optional():
            value = "None"
        made.append(f"{option}{equals}{value}")
        last = "" if equals else option
    return made


@functools.cache
def _optional() -> frozenset[str]:
    """The options of a configuration that may be none, as they are written."""
    return frozenset(
        f"--{section}.{name}".replace("_", "-")
        for section, kind in typing.get_type_hints(Run).items()
        for name, hint in typing.get_type_hints(kind).items()
        if NoneType in typing.get_args(hint)
    )
