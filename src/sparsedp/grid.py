"""Candidate settings of a search: what `--try optim.lr=1,2,4` says, as runs. No torch here."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsedp.config import Run
from sparsedp.errors import UsageError, require, told, wrong

MOST = 10_000
WHOLE = ("optim", "model", "sparsity")
"""Sections in which everything may be tried, as long as a trial costs the same."""
SINGLE = {"mechanism": ("clip", "unit_norm"), "data": ("augment", "views", "pad")}
"""Of other sections, what may be tried."""

PATHS = ("model.weights", "sparsity.mask_file")


@dataclasses.dataclass(frozen=True)
class Grid:
    """Values by the dotted name of their setting; a candidate has one of each."""

    values: Mapping[str, tuple[Any, ...]]

    def __len__(self) -> int:
        product = 1
        for tried in self.values.values():
            product *= len(tried)
        return product

    def candidate(self, run: Run, number: int) -> Run:
        """The run with the settings of candidate `number`."""
        changes: dict[str, dict[str, Any]] = {}
        for name, tried in self.values.items():
            number, place = divmod(number, len(tried))
            section, field = name.split(".")
            changes.setdefault(section, {})[field] = tried[place]
        made = {section: dataclasses.replace(getattr(run, section), **fields) for section, fields in changes.items()}
        return dataclasses.replace(run, **made)

    def candidates(self, run: Run) -> Iterator[Run]:
        """All of them, each checked by its own rules."""
        return (self.candidate(run, number) for number in range(len(self)))

    def to_json(self) -> dict[str, list[Any]]:
        """Plain values, which may be published: of a path, which may name a person or an illness, only its end."""
        return {
            name: [Path(v).name if name in PATHS and v is not None else v for v in tried] for name, tried in self.values.items()
        }


def grid_of(run: Run, tried: Sequence[str]) -> Grid:
    """From words such as 'optim.lr=1,2,4'; refused where a setting or a value does not exist, or may not vary."""
    if not tried:
        raise UsageError("tune needs something to try; give --try SECTION.FIELD=VALUE,VALUE, such as --try optim.lr=1,2,4.")
    values: dict[str, tuple[Any, ...]] = {}
    for said in tried:
        name, equals, rest = said.partition("=")
        name = name.strip().replace("-", "_")
        require(bool(equals and rest), "--try", said, "it has the form SECTION.FIELD=VALUE,VALUE", "write --try optim.lr=1,2,4")
        require(name not in values, "--try", said, f"{name} is tried already", "put all its values into one list")
        kind = _kind(run, name)
        found = tuple(_value(name, kind, text) for text in rest.split(","))
        require(len(set(found)) == len(found), "--try", said, "a value is there twice", "write each value once")
        values[name] = found
    grid = Grid(values)
    require(len(grid) <= MOST, "the number of candidates", len(grid), f"at most {MOST} are checked", "try fewer values")
    return grid


def _kind(run: Run, name: str) -> Any:
    """The type of a setting that may be tried."""
    section, _, field = name.partition(".")
    sections = [f.name for f in dataclasses.fields(run)]
    hints = typing.get_type_hints(type(getattr(run, section))) if section in sections else {}
    if field not in hints:
        known = ", ".join(f"{section}.{f}" for f in hints) if hints else ", ".join(f"{s}.FIELD" for s in sections)
        raise UsageError(f"--try names {told(name)}, which is no setting; choose one of {known}.")
    if section not in WHOLE and field not in SINGLE.get(section, ()):
        allowed = [*(f"{s}.*" for s in WHOLE), *(f"{s}.{f}" for s, fields in SINGLE.items() for f in fields)]
        raise wrong(
            "--try", f"{section}.{field}", "it would change what a trial costs, which data it reads, or nothing that a score can tell",
            f"choose among {', '.join(allowed)}",
        )  # fmt: skip
    return hints[field]


def _value(name: str, kind: Any, text: str) -> Any:
    """One value as the setting's type has it."""
    text = text.strip()
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union else (kind,)
    if text.lower() == "none" and type(None) in kinds:
        return None
    for one in kinds:
        if typing.get_origin(one) is typing.Literal and text in typing.get_args(one):
            return text
        if one is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if one in (int, float) and (found := _number(one, text)) is not None:
            return found
        if one is str and text:
            return text
    words = [w for one in kinds for w in (typing.get_args(one) if typing.get_origin(one) is typing.Literal else [_named(one)])]
    raise wrong(f"a value of --try {name}", text, f"it must be one of: {', '.join(words)}", "correct it")


def _number(kind: type, text: str) -> Any:
    try:
        found = kind(text)
    except ValueError:
        return None
    return found if abs(found) < math.inf else None


def _named(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        return "nothing, since lists cannot be tried"
    return {int: "a whole number", float: "a number", bool: "true, false", str: "a word", type(None): "none"}.get(
        kind, str(kind)
    )
