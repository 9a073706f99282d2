"""The menu of canaries, and what each check must notice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparsedp.audit.checks import Check, canary_checks, clip_checks, setting_checks
from sparsedp.audit.one_run import Job
from sparsedp.config import Mechanism, Run
from sparsedp.dp import clipping, mechanism
from tests.audit.jobs import DENSE, KEY, SPARSE
from tests.audit.test_one_run import JOB, job_of


def failed(checks: list[Check]) -> str:
    return "; ".join(f"{c.what} ({c.seen})" for c in checks if not c.ok)


EXACT = replace(SPARSE, mechanism=Mechanism(epsilon=1.0, steps=4, arithmetic="exact"))
FILTER = replace(SPARSE, sparsity=replace(SPARSE.sparsity, drop="magnitude", granularity="filter"))


@pytest.mark.parametrize("run", [DENSE, SPARSE, EXACT, FILTER], ids=["dense", "sparse", "exact", "filter"])
def test_the_menu_on_right_code(run: Run) -> None:
    checks = list(canary_checks(run, KEY))
    assert not failed(checks)
    assert len(checks) == (11 if run is DENSE else 12)


def test_a_norm_without_biases_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = clipping.clip_factor
    monkeypatch.setattr(clipping, "clip_factor", lambda g, clip: real({n: t for n, t in g.items() if t.ndim > 1}, clip))
    assert "conv.bias" in failed(list(canary_checks(DENSE, KEY)))


def test_a_missing_guard_against_broken_gradients_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        clipping, "factor_of", lambda squares, clip: (clip / squares.nan_to_num(posinf=1e300).sqrt()).clamp_max(1.0)
    )
    assert "infinite gradient" in failed(list(canary_checks(DENSE, KEY)))


def test_a_gradient_that_leaves_the_mask_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipping, "restrict", lambda tensors, masks: dict(tensors))
    monkeypatch.setattr(mechanism, "add_noise", _unmasked(mechanism.add_noise))
    assert "put aside" in failed(list(canary_checks(SPARSE, KEY)))


def _unmasked(real: object) -> object:
    return lambda total, sigma, masks, *where: real(total, sigma, {}, *where)  # type: ignore[operator]


@pytest.fixture(scope="module")
def job() -> Job:
    return job_of(JOB)


def test_settings_on_right_code(job: Job) -> None:
    assert not failed(list(setting_checks(job.parts.run, job.plan, job.settings, KEY)))
    assert not failed(list(clip_checks(job)))


@pytest.mark.parametrize("change", [{"noise_multiplier": 0.9}, {"clip": 2.0}, {"batch_size": 999.0}])
def test_a_job_with_other_settings_than_the_configured_is_seen(job: Job, change: dict[str, float]) -> None:
    assert failed(list(setting_checks(job.parts.run, job.plan, replace(job.settings, **change), KEY)))


def test_a_rate_other_than_the_charged_one_is_seen(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsedp.audit import checks

    real = checks.participants
    monkeypatch.setattr(checks, "participants", lambda key, step, count, rate: real(key, step, count, 1.05 * rate))
    assert "join" in failed(list(setting_checks(job.parts.run, job.plan, job.settings, KEY)))


def test_an_engine_that_clips_too_late_is_seen(job: Job) -> None:
    def late(*args: object) -> dict[str, torch.Tensor]:
        return {name: 1.01 * t for name, t in job.engine(*args).items()}  # type: ignore[arg-type]

    assert "steep" in failed(list(clip_checks(replace(job, engine=late))))
