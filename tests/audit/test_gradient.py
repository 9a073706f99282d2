"""The canary audit: quiet on the right code, loud on wrong code, and not blurred by the other rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sparsedp.audit import bounds, canary_cells, variants
from sparsedp.audit.gradient import Finding, canary_audit, judged, scores
from sparsedp.audit.trial import EVERYONE, SAMPLED, Canary, Power, Trial, own_key
from sparsedp.config import Mechanism, Sparsity
from sparsedp.dp.accounting import epsilon
from sparsedp.dp.ledger import Ledger
from sparsedp.engines.functional import functional
from sparsedp.errors import UsageError
from tests.audit.jobs import DENSE, KEY, SPARSE, WRONG

DELTA = 1e-5


def audited(power: Power, runs: int, name: str = "", canary: Canary = Canary()) -> Finding:
    trial = Trial(DENSE, power, KEY, company=False)
    return canary_audit("x", trial, runs, DELTA, own_key(KEY, name), canary=canary)


@pytest.mark.parametrize("power", [EVERYONE, SAMPLED], ids=["everyone", "sampled"])
def test_right_code_is_consistent_and_half_of_its_claim_is_found(power: Power) -> None:
    """The size that continuous integration runs: 1000 jobs of each world, on sound code."""
    found = audited(power, 1000)
    assert not found.violated
    assert 0.5 * found.claimed <= found.bound <= found.claimed
    assert found.bound_by_rates <= found.claimed


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_code_is_contradicted(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    apply, factor = WRONG[wrong]
    apply(monkeypatch, factor)
    assert audited(SAMPLED, 1000 if "x 0.71" in wrong or "x 1.5" in wrong else 300, wrong).violated


@pytest.mark.release
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_code_is_contradicted_at_least_95_times_in_100(wrong: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        apply, factor = WRONG[wrong]
        apply(patch, factor)
        assert sum(audited(SAMPLED, 1000, f"{wrong} {i}").violated for i in range(40)) >= 38


@pytest.mark.release
@pytest.mark.parametrize("power", [EVERYONE, SAMPLED], ids=["everyone", "sampled"])
def test_two_thirds_of_the_claim_are_found_at_5000(power: Power) -> None:
    found = audited(power, 5000, "release")
    assert not found.violated and 0.65 * found.claimed <= found.bound <= found.claimed


@pytest.mark.release
def test_every_way_of_pruning_and_dropping_is_consistent() -> None:
    found = list(canary_cells(variants(SPARSE), 1000, KEY, 2 * len(variants(SPARSE)), lambda what: None))
    assert len(found) == 20
    assert not [f.what for f in found if f.violated or f.bound > f.claimed]
    assert not [f.what for f in found if f.bound < 0.5 * f.claimed]


def test_all_variants_play_and_their_masks_are_what_they_say() -> None:
    for name, run in variants(SPARSE):
        trial = Trial(run, SAMPLED, KEY)
        assert np.isfinite(trial.play(KEY, Canary()))
        kept = {n: float(m.float().mean()) for n, m in trial.masks(KEY, 0).items()}
        assert (not kept) == (run.sparsity == Sparsity()), name
        assert all(0 < share < 1 for share in kept.values()) or name == "SynFlow and random, by filter"
        assert trial.views == run.data.views


def test_a_lesser_mechanism_is_read_as_one() -> None:
    """Scores of a job with twice the noise prove no more than that job's epsilon, nearly."""
    quiet, loud = Power(noise_multiplier=2.0, sampling_rate=0.5, steps=6), SAMPLED
    draw = np.random.default_rng(0)

    def drawn(member: int) -> bounds.Scores:
        seen = (draw.random((4000, 6)) < 0.5) * member + 2.0 * draw.standard_normal((4000, 6))
        return bounds.log_likelihood_ratio(seen, 0.5, 1.0).sum(1)

    found = judged("x", Trial(DENSE, loud, KEY), drawn(0), drawn(1), DELTA, 1)
    true = epsilon(quiet.ledger(), DELTA).epsilon
    assert 0.5 * true <= found.bound <= 1.05 * true < 0.6 * found.claimed


@pytest.mark.parametrize("run", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_the_other_rows_do_not_blur_the_canary(run: object) -> None:
    """Random masks and all: with and without company the attacker sees the same."""
    assert isinstance(run, type(DENSE))
    for canary in (None, Canary(), Canary(parameter="head.bias")):
        seen = [Trial(run, SAMPLED, KEY, company=company).play(KEY, canary) for company in (True, False)]
        assert seen[0] == pytest.approx(seen[1], abs=1e-6)


def test_the_other_rows_are_there() -> None:
    first = [
        next(Trial(DENSE, EVERYONE, KEY, company=c).steps(KEY, None, lambda *e: None))[0].gradient.tensors
        for c in (True, False)
    ]
    assert any(not bool((first[0][name] == first[1][name]).all()) for name in first[0])


def test_a_run_records_what_the_audit_takes_as_the_claim() -> None:
    ledger = Ledger()

    def record(what: str, event: object) -> None:
        nonlocal ledger
        ledger = ledger.append(what, event)  # type: ignore[arg-type]

    Trial(SPARSE, SAMPLED, KEY).play(KEY, None, record)
    assert ledger == SAMPLED.ledger()


def test_another_engine_sees_the_same_canary() -> None:
    plain, general = (Trial(SPARSE, SAMPLED, KEY, **kind) for kind in ({}, {"engine": functional}))  # type: ignore[arg-type]
    assert plain.play(KEY, Canary()) == pytest.approx(general.play(KEY, Canary()), rel=1e-4)


def test_exact_arithmetic_is_audited_on_its_own_path() -> None:
    run = replace(DENSE, mechanism=Mechanism(epsilon=1.0, steps=4, arithmetic="exact"))
    trial = Trial(run, Power(noise_multiplier=0.05, sampling_rate=1.0, steps=1), KEY)
    out, inside = scores(trial, 8, KEY, Canary())
    assert out.max() < 0 < inside.min()


def test_runs_have_keys_of_their_own() -> None:
    assert len({own_key(KEY, world, i).secret for world in ("in", "out") for i in range(100)}) == 200


def test_too_few_runs_are_refused() -> None:
    with pytest.raises(UsageError, match="runs is 10, but fewer than 50"):
        audited(EVERYONE, 10)
