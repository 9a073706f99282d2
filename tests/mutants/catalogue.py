"""Every mutant there is, and the rows of the catalogue of failures that have none."""

from __future__ import annotations

import re

from tests.mutants import accounting, audits, core, data, pruning, review, runs, tuning
from tests.mutants.values import Mutant

ALL: tuple[Mutant, ...] = (
    *core.MUTANTS, *pruning.MUTANTS, *runs.MUTANTS, *data.MUTANTS, *accounting.MUTANTS, *tuning.MUTANTS,
    *audits.MUTANTS, *review.MUTANTS,
)  # fmt: skip

ROWS = [f"{letter}{n}" for letter, last in (("A", 20), ("B", 20), ("C", 11), ("D", 12), ("E", 16)) for n in range(1, last + 1)]
"""The catalogue: masks, clipping and noise, sampling and data, accounting, runs and artefacts."""

WITHOUT = {
    "E1": "how several ranks share the noise: training in several processes is not offered yet; the noise of one process is drawn "
    "after the sum is reduced, which tests/test_invariance.py holds for 1, 2 and 4 shares",
    "E2": "masks that differ between ranks: as E1; masks are functions of the key and the step alone (B11g, A17)",
    "E14": "time and memory that grow with the batch: out of scope, and docs/privacy.md says so; there is no right code to patch",
}


def place(row: str) -> tuple[int, str, int, str]:
    """Where a mutant stands in the catalogue; those of the audits come last."""
    letter, number, rest = re.fullmatch(r"([A-Z])(\d+)(\w*)", row).groups()  # type: ignore[union-attr]
    return (letter not in "ABCDE", letter, int(number), rest)


def row_of(mutant: Mutant) -> str:
    """The row that a mutant belongs to: C9 for C9b."""
    return re.sub(r"[a-z]+$", "", mutant.row)
