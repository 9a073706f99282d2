"""The machinery of mutants can itself fail, every patch still fits the code, and a sample is caught on every run of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants.catalogue import ALL, ROWS, WITHOUT, row_of
from tests.mutants.kept import Kept, by_fingerprint
from tests.mutants.page import page
from tests.mutants.running import Outcome, against, clean, repeats
from tests.mutants.values import ROOT, Mutant, StalePatchError, patched

COUNTS = ["tests/dp/test_masks.py::test_counts_by_hand"]


def test_every_patch_fits_the_code() -> None:
    for mutant in ALL:
        patched(mutant)
        assert mutant.killers and all((ROOT / killer.split("::")[0]).exists() for killer in mutant.killers), mutant.row
    rows = [mutant.row for mutant in ALL]
    assert len(rows) == len(set(rows)) >= 150


def test_every_row_of_the_catalogue_has_a_mutant_or_a_reason() -> None:
    tried = {row_of(mutant) for mutant in ALL}
    assert len(ROWS) == 79 and set(ROWS) <= tried | set(WITHOUT) and not tried & set(WITHOUT)


def test_no_switch_for_a_mutant_is_in_the_code() -> None:
    assert not [p for p in (ROOT / "src").rglob("*.py") if "mutant" in p.read_text("utf-8").lower()]


@pytest.mark.parametrize(
    "edit",
    [
        ("dp/masks.py", "no such text", "x"),
        ("dp/masks.py", "import", "x"),
        ("errors.py", "class UsageError", "class UsageError"),
    ],
)
def test_a_patch_that_does_not_fit_is_loud(edit: tuple[str, str, str]) -> None:
    with pytest.raises(StalePatchError):
        patched(Mutant("X", "stale", [edit], COUNTS))


def test_an_outcome_counts_for_the_same_code_and_the_same_tests_alone(tmp_path: Path) -> None:
    first, second, *_ = ALL
    (name,) = by_fingerprint(against([first]))
    kept = Kept(tmp_path / "outcomes.json")
    kept.put(name, Outcome(first, tuple(first.killers), 1, "tests/x.py::test_x[1]", 2.0, 1.5, "long output"))
    (again,) = by_fingerprint(against([first]))
    found = Kept(tmp_path / "outcomes.json").outcome(again, against([first])[0])
    assert found.killed and (found.killer, found.seconds, found.processor) == ("tests/x.py::test_x[1]", 2.0, 1.5)
    file, old, new = first.edits[0]
    others = [second, replace(first, edits=[(file, old, new + "\n# other")]), replace(first, killers=second.killers[:1])]
    names = {*by_fingerprint(against(others)), *by_fingerprint(clean([first])), *by_fingerprint(repeats(2))}
    assert len(names) >= 6 and not [n for n in names if n in Kept(tmp_path / "outcomes.json")]
    assert len(by_fingerprint(against(ALL))) == len(ALL), "two mutants are the same"


def test_the_page_has_a_line_for_every_mutant_in_order() -> None:
    found = [Outcome(m, tuple(m.killers), 1, f"{m.killers[0]}[case]", 2.0, 6.0) for m in reversed(ALL)]
    right = [Outcome(None, task.tests, 0, None, 2.0, 6.0) for task in clean(ALL)]
    assert {test for task in clean(ALL) for test in task.tests} == {killer for m in ALL for killer in m.killers}
    lines = page([*found, *right]).splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| ") and " : " in line]
    assert len(rows) == len(ALL) and {row[0].removeprefix("| ") for row in rows} == {m.row for m in ALL}
    assert rows[0][0] == "| A1" and rows[-1][0].startswith("| U") and "[case]" not in rows[0][-1]
    assert f"{len(ALL)} mutants, {len(ALL)} caught" in "\n".join(lines)
    assert f"{len(ALL) / 10:.0f} for the mutants" in "\n".join(lines)


def test_a_slice_is_not_a_page() -> None:
    done = run_apart(
        "import sys; sys.argv = ['x', '--only', 'A1', '--write', 'never.md']",
        "from tests.mutants.__main__ import main",
        "main()",
    )
    assert done.returncode == 2 and "--write needs all mutants" in done.stderr and not (ROOT / "never.md").exists()


def run_apart(*lines: str) -> subprocess.CompletedProcess[str]:
    """A program of its own: this process has imported the right sparsedp already."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_survivors_false_alarms_and_broken_copies_are_told_apart() -> None:
    """A patch of a comment survives; one that breaks the import was not caught by a test; one that is wrong is; clean code is clean."""
    done = run_apart(
        "from tests.mutants.running import against, clean, outcomes",
        "from tests.mutants.values import Mutant",
        f"killers = {COUNTS!r}",
        "old = 'import math\\nfrom collections.abc import Mapping, Sequence'",
        "variants = [old + '  # harmless', 'import nothing_of_the_kind\\n' + old]",
        "mutants = [Mutant('X', 'x', [('dp/masks.py', old, new)], killers) for new in variants]",
        "mutants.append(Mutant('Y', 'y', [('dp/masks.py', 'rate * n + 0.5', '0.5')], killers))",
        "missing = [Mutant('Z', 'z', [('dp/masks.py', 'rate * n + 0.5', '0.5')], ['tests/dp/test_masks.py::test_of_no_such_name'])]",
        "tasks = [*clean(mutants), *against([*mutants, *missing])]",
        "print([(o.code, o.killed) for o in outcomes(tasks)])",
    )
    codes = eval(done.stdout.strip().splitlines()[-1], {}) if done.returncode == 0 else pytest.fail(done.stderr)
    assert codes[0] == (0, False) and codes[1] == (0, False)
    assert not codes[2][1] and codes[2][0] not in (0, 1)
    assert codes[3] == (1, True)
    assert not codes[4][1] and codes[4][0] not in (0, 1)


def test_a_sample_is_caught() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants", "--sample"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("caught  ") == sum(mutant.sample for mutant in ALL)
