"""Every parser on damaged and hostile inputs, and the harness on parsers that are known to be bad.

The harness forks, so it runs in processes of its own, which have one thread only.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import bad, suite
from tests.fuzz.harness import Failure, Report, random_of
from tests.fuzz.page import Result, page

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
INPUTS = 10_000
FULL = ("config", "mask", "checkpoint", "idx", "idx-gzip", "cifar-binary", "cifar-pickle", "cifar-archive", "images")


def ran(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *words], cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=False
    )


@pytest.mark.parametrize("name", suite.GROUPS)
def test_damaged_and_hostile_inputs_end_in_a_value_or_in_a_sentence(name: str, tmp_path: Path):
    targets = suite.GROUPS[name]
    kept = tmp_path / "kept.json"
    done = ran("tests.fuzz", "--inputs", str(INPUTS), "--json", str(kept), "--only", *(target.name for target in targets))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row["report"] for row in json.loads(kept.read_text("utf-8"))]
    assert [row["target"] for row in rows] == [target.name for target in targets]
    for target, row in zip(targets, rows, strict=True):
        assert row["failures"] == [] and row["accepted"] > 0 and row["refused"] > 0
        assert row["inputs"] == row["accepted"] + row["refused"] == round(INPUTS * target.share)


def test_the_files_that_people_pass_on_get_all_inputs():
    assert {target.name for target in suite.TARGETS if target.share == 1} >= set(FULL)


@pytest.fixture(scope="module")
def judged() -> dict[str, Report]:
    done = ran("tests.fuzz.bad")
    assert done.returncode == 0, done.stderr
    return {row["target"]: Report.from_json(row) for row in json.loads(done.stdout)}


def stumbling(name: str) -> list[int]:
    """The inputs at which the made-up parser of this name does what it does."""
    target = bad.target(name, bad.HARMLESS["nothing"])
    return [n for n in range(bad.INPUTS) if bad.make(random_of(bad.SEED, target, n)) == bad.BAD]


@pytest.mark.parametrize("name", bad.FAULTS)
def test_the_harness_sees(judged, name: str):
    """Each such input, and no other; and it goes on afterwards."""
    kind, _ = bad.FAULTS[name]
    report, numbers = judged[name], stumbling(name)
    assert numbers and [(failure.number, failure.kind) for failure in report.failures] == [(n, kind) for n in numbers]
    assert report.inputs == bad.INPUTS and report.accepted + report.refused == bad.INPUTS - len(numbers)


@pytest.mark.parametrize("name", bad.HARMLESS)
def test_the_harness_lets_pass(judged, name: str):
    report = judged[name]
    assert stumbling(name) and report.failures == [] and report.accepted + report.refused == bad.INPUTS


@pytest.mark.parametrize("name", ["all accepted", "all refused"])
def test_inputs_of_one_kind_only_are_no_test(judged, name: str):
    (failure,) = judged[name].failures
    assert failure.kind == "inputs"


def test_the_command_fails_when_an_input_does(monkeypatch, capsys, tmp_path: Path):
    from tests.fuzz import __main__ as command

    bad_report = Report("idx", 10, 4, 5, [Failure(3, "crash", "SIGSEGV")], 0.5, 1.0)
    monkeypatch.setattr(command, "tried", lambda targets, inputs, seed: iter([bad_report]))
    monkeypatch.setattr(
        sys, "argv", ["fuzz", "--only", "idx", "--json", str(tmp_path / "kept"), "--write", str(tmp_path / "page")]
    )
    assert command.main() == 1
    assert "FAILURE crash, input 3: SIGSEGV" in capsys.readouterr().out
    assert "| idx | MNIST's idx files | 10 | 4 | 5 | 1 |" in (tmp_path / "page").read_text("utf-8")


def test_a_page_is_made_of_what_several_calls_found():
    results = [Result(Report(name, 10, 4, 6, [], 0.5, 1.0), 10, 1) for name in ("config", "idx")]
    assert "Not in these figures: budget, " in page(results)
    assert [line.split(" | ")[0] for line in page(results).splitlines() if line.startswith("| ")][1:] == ["| config", "| idx"]
