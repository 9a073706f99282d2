"""Every mutant there is."""

from __future__ import annotations

from tests.mutants import audits, core
from tests.mutants.values import Mutant

ALL: tuple[Mutant, ...] = (*core.MUTANTS, *audits.MUTANTS)
