"""What `--dry-run` and `explain` forecast is what a run then does, and how a terminal counts epsilon on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparsedp import dryrun, keys
from sparsedp.config import Mechanism, Model, Sparsity
from sparsedp.dp.accounting import epsilon
from sparsedp.planning import budget
from sparsedp.progress import POINTS, TerminalReporter, curve
from tests import whole_runs
from tests.whole_runs import STEPS, UNITS, go, images, tiny

SNIP = Sparsity(prune="dp-snip", prune_rate=0.5, snip_noise_multiplier=3.0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_runs.quick_accounting(monkeypatch)


@pytest.mark.parametrize("changes", [{"sparsity": SNIP}, {"model": Model(train="head")}], ids=["snip", "head"])
def test_a_forecast_is_what_the_run_does(tmp_path: Path, home: Path, changes: dict[str, Any]) -> None:
    run = tiny(images(tmp_path / "data"), **changes, runtime={"key": None})
    told = dryrun.forecast(run)
    assert json.loads(json.dumps(told)) == told and not list(home.rglob("*")), "it spends nothing, and is plain"
    result = go(run, tmp_path / "run")
    public = tmp_path / "run" / "public"
    stated, summary = (json.loads((public / name).read_text()) for name in ("privacy.json", "summary.json"))
    privacy = told["privacy"]
    assert privacy["events"] == json.loads((public / "ledger.json").read_text())
    for name in ("epsilon", "delta", "accountant", "neighbouring", "steps", "num_units", "batch_size", "noise_multiplier"):
        assert privacy[name] == summary[name], name
    assert privacy["by_others"] == stated["others"]["epsilon"]
    assert privacy["snip_noise_multiplier"] == (3.0 if "sparsity" in changes else None)
    assert told["config"] == json.loads((public / "config.json").read_text())
    trained = sum(p.numel() for p in result.model.parameters() if p.requires_grad)
    assert told["model"]["parameters_trained"] == trained
    assert told["model"]["maskable"] < trained and told["engine"]["name"] == "functional"
    time = told["time"]
    assert time["seconds_per_step"] == pytest.approx(16 * time["seconds_per_unit"]) and time["seconds_per_unit"] > 0
    assert time["hours"] == pytest.approx(time["seconds_per_step"] * STEPS / 3600)


def test_a_forecast_says_what_an_accountant_cannot_answer(tmp_path: Path) -> None:
    run = tiny(images(tmp_path / "data"), mechanism=Mechanism(noise_multiplier=1.0, steps=2, batch_size=16, delta=1e-14))
    told = dryrun.privacy(run, budget(run, UNITS))
    assert isinstance(told["by_others"]["pld, add-remove"], float)
    assert "raise it to 1e-9 or more" in told["by_others"]["pld, replace-one"]


def test_an_explanation_covers_every_trained_parameter_of_the_run(tmp_path: Path) -> None:
    told = dryrun.explanation(tiny(images(tmp_path / "data"), model=Model(train="head"))).to_json()
    named = {line["parameter"] for line in told["lines"]}
    assert named == {"classifier.weight", "classifier.bias"}


def test_the_terminal_never_shows_less_than_was_spent(tmp_path: Path) -> None:
    from io import StringIO

    from rich.console import Console

    run = tiny(tmp_path, mechanism=Mechanism(noise_multiplier=1.0, steps=20, batch_size=16, delta=1e-3), sparsity=SNIP)
    plan = budget(run, UNITS)
    points = curve(plan, "pld", "add-remove", 1e-3)
    assert len(points) == POINTS and points[-1] == (20, plan.spent.epsilon) and points == sorted(points)
    reporter = TerminalReporter(Console(file=StringIO(), force_terminal=False))
    assert reporter.spent_at(3) is None
    reporter.start(run, plan, 0)
    try:
        for taken in (1, 4, 5, 13, 20):
            before, last = plan.at_end.entries
            spent = epsilon(type(plan.at_end)((before,)).append("train", last.event, taken), 1e-3).epsilon
            shown = reporter.spent_at(taken)
            assert shown is not None and spent <= shown <= plan.spent.epsilon
    finally:
        reporter.close()


def test_keys_are_fresh_or_follow_from_their_text() -> None:
    made = [keys.fresh() for _ in range(50)]
    assert len({key.secret for key in made}) == 50 and all(len(key.secret) == 32 and not key.given for key in made)
    one, same, other = keys.chosen("one"), keys.chosen("one"), keys.chosen("one ")
    assert one.secret == same.secret != other.secret and one.given and len(one.secret) == 32
    assert "one" not in repr(one) and one.secret.hex() not in repr(one) and str(one.secret) not in repr(one)
