"""Record and replay of whole runs: under frozen noise, a neighbouring data set leaves the same bits in every file and every state."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import replay_cases, whole_runs
from tests.replay import FrozenNoise, assert_no_leak, replayed
from tests.replay_cases import RELATIONS, Case, cases, everything_of

QUICK = (7, 20)
"""Of `cases()`, those that every test run replays, beside the kinds of tests/test_training.py."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_runs.quick_accounting(monkeypatch)


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=str(c), marks=[] if n in QUICK else pytest.mark.release) for n, c in enumerate(cases())]
)
def test_whole_runs_leak_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Weights, average, optimiser, ledger, statement, metrics, masks and checkpoints are the same to the bit, for every relation."""
    relations = (None, *RELATIONS)
    frozen, results = replayed(
        monkeypatch,
        [lambda r=r: everything_of(case, r, tmp_path / "data", tmp_path / f"run-{r}") for r in relations],
    )
    for place, relation in enumerate(RELATIONS, start=1):
        pair = FrozenNoise()
        pair.runs = [frozen.runs[0], frozen.runs[place]]
        assert_no_leak(pair, [results[0], results[place]], units_replaced=relation != "emptied")
        first, second = (calls[-case_steps(case)].total.tensors for calls in pair.runs)
        moved = any(not first[name].equal(second[name]) for name in first)
        assert moved or relation == "other label", f"{relation}: the changed unit changed nothing, so the test shows nothing"


def case_steps(case: Case) -> int:
    """Training steps of a case: so many calls of the noise function, counted from the end, the first step's first."""
    return int(case.changes["mechanism"]["steps"])


def test_the_cases_are_all_that_a_run_can_be() -> None:
    """Every word of every list occurs, with the recipes, and there are more than 200 pairs."""
    words = {word for case in cases() for word in case.words}
    lists = (
        replay_cases.PRUNE, replay_cases.DROP, replay_cases.OPTIMISERS, replay_cases.VIEWS, replay_cases.ACCOUNTANTS,
        replay_cases.ARITHMETIC, replay_cases.CADENCE, replay_cases.ENGINES, replay_cases.RECIPES,
    )  # fmt: skip
    assert {word for options in lists for word in options} <= words
    assert {"weight", "filter", "keep", "zero", "2 rows a unit", "stopped at 2", "head", "norm-bias"} <= words
    assert len(cases()) * len(RELATIONS) > 200
    assert len({str(case) for case in cases()}) == len(cases())
