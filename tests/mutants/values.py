"""What a mutant is, and a copy of src with one applied."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "sparsedp"


@dataclass(frozen=True)
class Mutant:
    """One way to be wrong. `row` is its row in the catalogue of failures: A masks, B clipping and noise, C sampling, D accounting, E runs."""

    row: str
    wrong: str
    """What goes wrong, in words."""
    edits: Sequence[tuple[str, str, str]]
    """(file below src/sparsedp, text that occurs there exactly once, its replacement)."""
    killers: Sequence[str]
    """The tests that must notice, as pytest names them. The first that fails ends the run."""
    sample: bool = False
    """Whether `make test` tries it too; all are tried by `make mutants`."""


class StalePatchError(Exception):
    """A patch no longer fits the code: the mutant must be written anew, not forgotten."""


def patched(mutant: Mutant) -> dict[str, str]:
    """The text of every file that the mutant changes."""
    texts: dict[str, str] = {}
    for name, old, new in mutant.edits:
        text = texts.get(name) or (SOURCE / name).read_text("utf-8")
        if text.count(old) != 1:
            raise StalePatchError(f"{mutant.row} ({mutant.wrong}): in {name} there are {text.count(old)} places for:\n{old}")
        if old == new:
            raise StalePatchError(f"{mutant.row} ({mutant.wrong}): the patch of {name} changes nothing")
        texts[name] = text.replace(old, new)
    for name, text in texts.items():
        compile(text, name, "exec")
    return texts


def write_copy(folder: Path, mutant: Mutant | None) -> None:
    """`folder`/sparsedp, a copy of the package with the mutant applied, or of the package as it is."""
    copy = folder / "sparsedp"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("embedded", "__pycache__"))
    embedded = SOURCE / "data" / "embedded"
    if embedded.exists():
        (copy / "data" / "embedded").symlink_to(embedded)
    for name, text in (patched(mutant) if mutant else {}).items():
        (copy / name).write_text(text, "utf-8")
