"""`python -m tests.mutants`: tries every mutant, fails if one survives, and writes the table of what caught which."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from tests.mutants.catalogue import ALL
from tests.mutants.kept import Kept, by_fingerprint
from tests.mutants.page import page
from tests.mutants.running import Outcome, Task, against, clean, outcomes, repeats
from tests.mutants.values import patched


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--write", type=Path, help="write the table of what caught which to this file, once all are caught")
    parser.add_argument("--only", default="", help="only mutants whose row or words match this regular expression")
    parser.add_argument("--sample", action="store_true", help="only those that make test tries")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--json", type=Path, help="keep outcomes in this file, and do not try again what it has, unless it changed"
    )
    parser.add_argument("--at-most", type=int, help="stop after so many; with --json, the next call goes on")
    parser.add_argument(
        "--repeats", type=int, help="only the statistical tests, on the code as it is, so often, under other keys"
    )
    asked = parser.parse_args()
    if asked.write and (asked.only or asked.sample or asked.repeats):
        parser.error("--write needs all mutants; with --json they can be tried in slices")
    chosen = [m for m in ALL if (m.sample or not asked.sample) and re.search(asked.only, f"{m.row} {m.wrong}")]
    for mutant in chosen:
        patched(mutant)  # a stale patch ends it here, before anything runs
    tasks = against(chosen)
    if asked.repeats:
        tasks = repeats(asked.repeats)
    elif not asked.sample:  # the sample is part of a run that tests the clean code anyway
        tasks += clean(chosen)
    kept, named = Kept(asked.json), by_fingerprint(tasks)
    bad = tried(kept, {name: task for name, task in named.items() if name not in kept}, asked.at_most, asked.workers)
    right = sum(name in kept for name in named)
    sys.stdout.write(f"{right} of {len(named)} as they should be, {bad} not, {len(named) - right - bad} not tried\n")
    if asked.write and right == len(named):
        asked.write.write_text(page([kept.outcome(name, task) for name, task in named.items()]), "utf-8")
    return 1 if bad else 0


def tried(kept: Kept, named: dict[str, Task], most: int | None, workers: int) -> int:
    """Try so many, keep what is as it should be, and count what is not."""
    bad = 0
    for name, outcome in zip(list(named)[:most], outcomes(list(named.values())[:most], workers), strict=True):
        right = outcome.killed if outcome.mutant else outcome.code == 0
        bad += not right
        if right:
            kept.put(name, outcome)
        sys.stdout.write(said(outcome) + "\n")
        sys.stdout.flush()
    return bad


def said(outcome: Outcome) -> str:
    """One line for what went as it should, and the whole output for what did not."""
    mutant, took = outcome.mutant, f"{outcome.seconds:5.1f} s {outcome.processor:5.1f} s"
    if mutant is None:
        words = outcome.tests[0].split("::")[0]
        return f"clean    {took}  {words}" if outcome.code == 0 else f"FALSE ALARM\n{outcome.output}"
    if outcome.killed:
        return f"caught   {took}  {mutant.row:8} {mutant.wrong}  <- {outcome.killer}"
    return f"SURVIVED (code {outcome.code})  {mutant.row} {mutant.wrong}\n{outcome.output}"


if __name__ == "__main__":
    sys.exit(main())
