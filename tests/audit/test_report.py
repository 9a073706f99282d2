"""The page, the values, the command, and the privacy statement that an audit ends up in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sparsedp import audit, cli, training
from sparsedp.audit import Report, add_to_statement, attack
from sparsedp.audit.checks import Check
from sparsedp.audit.gradient import Finding
from sparsedp.audit.trial import Power
from sparsedp.config import Mechanism, Run, Sparsity
from sparsedp.dp.accounting import epsilon
from sparsedp.errors import UsageError
from sparsedp.recipes import smoke
from tests.audit.jobs import KEY

RUN = replace(
    smoke(),
    data=replace(smoke().data, limit=400, evaluation="none"),
    mechanism=Mechanism(noise_multiplier=2.0, steps=2, batch_size=100, epsilon=50.0, delta=1e-4),
)


@pytest.fixture(scope="module")
def report() -> Report:
    return attack(RUN, runs=50, key=KEY)


def test_an_audit_of_sound_code(report: Report) -> None:
    assert report.ok and report.verdict() == "Nothing that was tried contradicts the claimed privacy."
    assert [f.what.split(":")[0] for f in report.findings] == [
        "canary, as the recipe has it, all units", "canary, as the recipe has it, sampled", "one run of the job itself",
    ]  # fmt: skip
    assert all(0 <= f.bound <= f.claimed and f.bound_by_rates >= 0 for f in report.findings)


def test_every_number_of_the_page_is_in_the_values(report: Report) -> None:
    stated = json.loads(json.dumps(report.to_json()))
    for finding in stated["findings"]:
        assert f"{finding['claimed']:8.3f}" in report.text() and f"{finding['bound']:8.3f}" in report.text()
    assert all(check["what"] in report.text() for check in stated["checks"])
    assert stated["lower_bound_confidence"] == 0.95 and stated["violation_confidence_family_wise"] == 0.99


@pytest.mark.parametrize("kind", ["finding", "check"])
def test_a_contradiction_is_shouted(report: Report, kind: str) -> None:
    bad = Finding(what="an attack", method="x", trials=9, claimed=1.0, delta=1e-5, bound=3.0, bound_by_rates=0.0, violated=True)
    wrong = replace(report, findings=(bad,)) if kind == "finding" else replace(report, checks=(Check("a check", False, "2 C"),))
    assert not wrong.ok and "CONTRADICTED by: a" in wrong.text()
    assert ("CONTRADICTED (x" in wrong.text()) == (kind == "finding") and ("FAIL  a check: 2 C" in wrong.text()) == (
        kind == "check"
    )


def test_the_statement_of_a_run_tells_of_its_audit(report: Report, tmp_path: Path) -> None:
    training.train(RUN, tmp_path / "run")
    before = json.loads((tmp_path / "run" / "public" / "privacy.json").read_text())
    assert before["audit"] is None
    add_to_statement(report, tmp_path / "run")
    after = json.loads((tmp_path / "run" / "public" / "privacy.json").read_text())
    assert {**after, "audit": None} == before
    assert after["audit"]["ok"] and len(after["audit"]["findings"]) == 3
    assert "shown at least" in (tmp_path / "run" / "public" / "privacy.md").read_text()
    with pytest.raises(UsageError, match="mechanism settings are not those of the run"):
        add_to_statement(replace(report, recipe={**report.recipe, "mechanism": {}}), tmp_path / "run")
    with pytest.raises(UsageError, match="has no public/privacy.json"):
        add_to_statement(report, tmp_path)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", "smoke", "--runs", "50", "--steps", "2", "--data.limit", "400", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and len(found["findings"]) == 3 and found["recipe"]["sparsity"]["prune"] == "random"


def test_a_run_that_claims_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="no claim to audit"):
        attack(Run(mechanism=Mechanism(private=False, steps=2)), runs=50)


def test_exact_arithmetic_leaves_the_one_run_audit_out_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "canary_cells", lambda *args: [])  # many exact jobs take minutes
    found = attack(replace(RUN, mechanism=replace(RUN.mechanism, arithmetic="exact")), key=KEY)
    assert found.ok and found.findings == () and "left out" in found.text()


def test_a_recipe_with_dp_snip_has_that_release_audited_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "canary_cells", lambda *args: [])
    found = attack(replace(RUN, sparsity=Sparsity(prune="dp-snip", prune_rate=0.5, snip_noise_multiplier=20.0)), key=KEY)
    snip, one_run = found.findings
    assert found.ok and snip.what == "DP-SNIP's release" and 0 < snip.bound <= snip.claimed
    assert one_run.claimed > epsilon(Power(noise_multiplier=2.0, sampling_rate=0.25, steps=2).ledger(), 1e-4).epsilon
    assert "what the steps record is what epsilon was computed from: 2 entries" in found.text()
