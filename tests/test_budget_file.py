"""The data set's budget: every run that touched it, what they spent together, and that nothing is forgotten."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import NonPrivateDpEvent

from sparsedp import budget_file
from sparsedp.budget_file import BudgetFile, home
from sparsedp.config import Mechanism, Run
from sparsedp.dp.accounting import epsilon
from sparsedp.dp.ledger import Ledger, gaussian_event
from sparsedp.errors import UsageError
from sparsedp.planning import Budget, budget

EVENT = gaussian_event(0.1, 1.0)


class Heard:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def plan(steps: int = 3) -> Budget:
    return budget(Run(mechanism=Mechanism(noise_multiplier=1.0, steps=steps, batch_size=10)), 100)


def file(place: Path, run: str, steps: int = 3, heard: Any = None) -> BudgetFile:
    return BudgetFile(place / "budgets" / "x.json", "mnist", run, plan(steps), 1e-5, heard or Heard())


def test_it_lies_where_the_variable_says(home_of: Path) -> None:
    assert home() == home_of / "budgets"


@pytest.fixture
def home_of(home: Path) -> Path:
    return home


def test_a_run_is_entered_with_all_it_may_spend_before_it_starts(tmp_path: Path) -> None:
    with file(tmp_path, "a") as account:
        entry = account.runs()["a"]
        assert entry == {"finished": False, "private": True, "ledger": plan().at_end.to_json()}
    assert account.runs()["a"]["finished"] is False, "a run that did not end stays entered whole"
    assert stat.S_IMODE(account.path.stat().st_mode) == 0o600


def test_an_ended_run_is_corrected_to_what_it_spent(tmp_path: Path) -> None:
    with file(tmp_path, "a", steps=9) as account:
        account.spent(Ledger().append("train", EVENT, 4))
    assert account.runs()["a"] == {"finished": True, "private": True, "ledger": Ledger().append("train", EVENT, 4).to_json()}


def test_runs_add_up_jointly_and_the_operator_is_told(tmp_path: Path) -> None:
    first, second, heard = file(tmp_path, "a"), file(tmp_path, "b", 5), Heard()
    with first:
        pass
    second = file(tmp_path, "b", 5, heard)
    with second:
        joint = epsilon(Ledger().append("train", EVENT, 8), 1e-5).epsilon
        assert second.together() == {"runs": 2, "not_private": 0, "epsilon": pytest.approx(joint)}
    assert len(heard.notes) == 1
    assert f"1 other run has used mnist: together with this one they spend epsilon {joint:.3f} at delta 1e-05" in heard.notes[0]


def test_runs_that_are_not_private_are_counted_beside_the_total(tmp_path: Path) -> None:
    with file(tmp_path, "a"):
        pass
    naked = file(tmp_path, "b")
    naked.spent(Ledger().append("train", NonPrivateDpEvent(), 3))
    path, heard = naked.path, Heard()
    with BudgetFile(path, "mnist", "c", plan(), 1e-5, heard, private=False) as chosen:
        alone = epsilon(plan().at_end, 1e-5).epsilon
        assert chosen.together() == {"runs": 3, "not_private": 2, "epsilon": pytest.approx(alone)}
    assert (
        f"those that are private spend epsilon {alone:.3f}" in heard.notes[0] and "2 of all are not private" in heard.notes[0]
    )
    runs = json.loads(path.read_text())
    del runs["runs"]["a"]["private"]  # as it was before it was written down
    path.write_text(json.dumps(runs))
    assert chosen.together()["not_private"] == 2


def test_taking_a_run_up_again_does_not_count_it_twice(tmp_path: Path) -> None:
    heard = Heard()
    for _ in range(2):
        with file(tmp_path, "a", heard=heard) as account:
            pass
    assert list(account.runs()) == ["a"] and heard.notes == []


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"runs": []}', '{"runs": {"a": 3}}', '{"runs": {"a": {}}}', "{", '{"runs": null}']
)
def test_a_damaged_file_stops_the_run_rather_than_forget(tmp_path: Path, content: str) -> None:
    with file(tmp_path, "a") as account:
        pass
    account.path.write_text(content)
    with pytest.raises(UsageError, match="budget file .*restore"):
        account.__enter__()
    assert account.path.read_text() == content


def test_a_damaged_ledger_in_it_is_named(tmp_path: Path) -> None:
    with file(tmp_path, "a") as account:
        pass
    account.path.write_text('{"runs": {"a": {"finished": true, "ledger": [{"what": 1}]}}}')
    with pytest.raises(UsageError, match="ledger entry 0"):
        account.total()


def test_many_writers_lose_nothing(tmp_path: Path) -> None:
    children = []
    for number in range(8):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                account = file(tmp_path, f"run {number}")
                for step in range(1, 6):
                    account.spent(Ledger().append("train", EVENT, step))
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
    runs = file(tmp_path, "x").runs()
    assert len(runs) == 8
    assert all(entry["ledger"][0]["count"] == 5 for entry in runs.values())


def test_the_lock_of_a_writer_that_died_holds_nobody_up(tmp_path: Path) -> None:
    account = file(tmp_path, "a")
    account.path.parent.mkdir(parents=True)
    account.path.with_suffix(".lock").write_text("")
    account.spent(Ledger().append("train", EVENT))
    assert list(account.runs()) == ["a"]


def test_an_unwritable_home_is_said(tmp_path: Path) -> None:
    (tmp_path / "budgets").write_text("a file")
    with pytest.raises(UsageError, match="cannot be written"):
        file(tmp_path, "a").__enter__()


def test_no_infinite_or_missing_epsilon_breaks_it(tmp_path: Path) -> None:
    with file(tmp_path, "a") as account:
        account.spent(Ledger().append("train", gaussian_event(0.5, 0.0)))
        assert account.total() == 0 and account.together()["not_private"] == 1
    assert budget_file.home().name == "budgets"
