"""The verb `account`: whatever is left out is solved for, on the private side; everything else gets a sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sparsedp.account import plot, solve
from sparsedp.dp.accounting import epsilon
from sparsedp.dp.ledger import Ledger
from sparsedp.errors import UsageError

SETTING = {"num_examples": 50_000, "batch_size": 4096, "noise_multiplier": 10.0, "steps": 875}


def test_epsilon_is_solved_for_and_the_others_stand_beside_it() -> None:
    answer = solve(**SETTING, prune_noise_multiplier=30.75)  # type: ignore[arg-type]
    assert answer.solved == "epsilon" and answer.target is None
    assert round(answer.spent.epsilon, 4) == 0.9115
    beside = {(s.accountant, s.neighbouring): round(s.epsilon, 3) for s in answer.others}
    assert beside == {("rdp", "add-remove"): 0.997, ("pld", "replace-one"): 1.943}
    text = answer.text()
    for words in ("0.9115", "zero-out", "DP-SNIP", "50,000", "rate 0.08192", "replace-one: 1.943", "rdp, add-remove: 0.997"):
        assert words in text, words


@pytest.mark.parametrize(("left_out", "value"), [("noise_multiplier", 9.1192), ("steps", 1055), ("batch_size", 4496)])
def test_what_is_left_out_is_found(left_out: str, value: float) -> None:
    setting = {**SETTING, "epsilon": 1.0, left_out: None}
    answer = solve(**setting)  # type: ignore[arg-type]
    assert answer.solved == left_out
    assert getattr(answer, left_out) == pytest.approx(value, rel=2e-3)
    assert 0.998 < answer.spent.epsilon <= 1.0
    assert f"{left_out.replace('_', ' ')}" in next(line for line in answer.text().splitlines() if "solved for" in line)


def test_json_is_plain_and_its_events_recompute_epsilon() -> None:
    row = json.loads(json.dumps(solve(**SETTING, accountant="rdp").to_json(), allow_nan=False))  # type: ignore[arg-type]
    assert row["epsilon"] == epsilon(Ledger.from_json(row["events"]), row["delta"], "rdp").epsilon
    assert row["solved_for"] == "epsilon" and row["warnings"] == [] and row["accountant"] == "rdp"
    infinite = solve(**{**SETTING, "noise_multiplier": 0.0})  # type: ignore[arg-type]
    assert json.loads(json.dumps(infinite.to_json(), allow_nan=False))["epsilon"] is None
    assert "epsilon infinite" in infinite.text()


def test_the_papers_rule_states_its_delta() -> None:
    answer = solve(**SETTING, prune_noise_multiplier=30.75, accountant="paper")  # type: ignore[arg-type]
    assert answer.spent.delta == pytest.approx(2e-5)
    assert "at delta 2e-05" in answer.text()


def test_replace_one_is_not_the_add_remove_number() -> None:
    answer = solve(**SETTING, neighbouring="replace-one")  # type: ignore[arg-type]
    assert round(answer.spent.epsilon, 3) == 1.924
    assert "replaced by any other data" in answer.text()


def test_warnings_are_in_every_form() -> None:
    answer = solve(**SETTING, delta=1e-4, accountant="rdp")  # type: ignore[arg-type]
    assert "1/N" in answer.text() and "1/N" in answer.to_json()["warnings"][0]
    many = solve(50_000, 10, 10.0, None, 5.0, accountant="rdp")
    assert many.steps == 1_000_000 and "no more than 1,000,000 steps" in many.text()


BAD = [
    ({"batch_size": 60_000}, "batch_size is 60000, but it cannot exceed num_examples"),
    ({"batch_size": 0}, "batch_size is 0"),
    ({"noise_multiplier": -1.0}, "noise_multiplier is -1.0"),
    ({"noise_multiplier": float("nan")}, "noise_multiplier is nan"),
    ({"noise_multiplier": float("inf")}, "noise_multiplier is inf"),
    ({"steps": 0}, "steps is 0"),
    ({"steps": 1.5}, "steps is 1.5"),
    ({"num_examples": 0}, "num_examples is 0"),
    ({"delta": 1.0}, "delta is 1.0"),
    ({"delta": 0.0}, "delta is 0.0"),
    ({"epsilon": 1.0}, "all four are given"),
    ({"steps": None}, "steps, epsilon are left out"),
    ({"steps": None, "epsilon": -1.0}, "epsilon is -1.0"),
    ({"steps": None, "epsilon": 1e-4}, "even steps 1 costs"),
    ({"noise_multiplier": None, "epsilon": 1.0, "prune_noise_multiplier": 1.0}, "even noise_multiplier"),
    ({"prune_noise_multiplier": -2.0}, "prune_noise_multiplier is -2.0"),
    ({"accountant": "gdp"}, "accountant is 'gdp'"),
    ({"neighbouring": "zero"}, "neighbouring is 'zero'"),
    ({"accountant": "rdp", "neighbouring": "replace-one"}, "does not double the sensitivity"),
]


@pytest.mark.parametrize(("change", "words"), BAD)
def test_bad_input_gets_one_sentence(change: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        solve(**{**SETTING, **change})  # type: ignore[arg-type]
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    answer = solve(50_000, 4096, None, 400, 1.0, accountant="paper", prune_noise_multiplier=30.0)
    path = plot(answer, tmp_path / f"curve.{suffix}")
    assert path.stat().st_size > 1000


def test_a_plot_that_cannot_be(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(UsageError, match="no curve"):
        plot(solve(**{**SETTING, "noise_multiplier": 0.0}), tmp_path / "x.png")  # type: ignore[arg-type]
    answer = solve(**SETTING, accountant="rdp")  # type: ignore[arg-type]
    for path in (tmp_path / "missing" / "x.png", tmp_path / "x.docx"):
        with pytest.raises(UsageError, match="cannot be written"):
            plot(answer, path)


def test_accounting_needs_no_torch() -> None:
    code = "import sys, sparsedp.account; print([m for m in ('torch', 'matplotlib') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
