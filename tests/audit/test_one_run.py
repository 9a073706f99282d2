"""The one-run audit on a real training job, and DP-SNIP's release."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sparsedp.assembly import assemble, load_data
from sparsedp.audit.one_run import CanaryRows, Job, Planted, guesses_for, one_run_audit, shortened
from sparsedp.audit.snip import shift, snip_audit
from sparsedp.config import Data, Mechanism, Model, Run, Sparsity
from sparsedp.dp.accounting import epsilon
from sparsedp.dp.clipping import Rows
from sparsedp.errors import UsageError
from sparsedp.planning import budget
from tests.audit.jobs import KEY, WRONG, noise_times

JOB = Run(
    data=Data(name="mnist", limit=2400), model=Model(name="small_cnn"), sparsity=Sparsity(drop="random", drop_rate=0.5),
    mechanism=Mechanism(noise_multiplier=0.8, steps=8, epsilon=100.0, batch_size=600),
)  # fmt: skip


def job_of(run: Run) -> Job:
    dataset = load_data(run)
    plan = budget(run, dataset.train.num_units)
    return Job.of(assemble(run, dataset, KEY), plan, KEY)


def alone(job: Job) -> Job:
    """The same job, its real rows left out of the sum: for tests that are about the canaries."""
    return replace(job, engine=lambda model, loss, rows, masks, clip: {
        name: torch.zeros_like(p) for name, p in model.named_parameters()
    }, micro_batch=1 << 20)  # fmt: skip


def test_a_real_job_is_consistent_and_part_of_its_claim_is_found() -> None:
    found = one_run_audit(job_of(JOB), KEY)
    assert found.trials == 1200 and not found.violated
    assert 0.15 * found.claimed <= found.bound <= found.claimed
    assert 0 < found.bound_by_rates <= found.bound


@pytest.mark.parametrize("wrong", ["noise x 0.5", "duplicates x 2"])
def test_a_wrong_job_is_contradicted_or_proves_more(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run is a smoke alarm: twice the privacy loss shows as a higher bound, ten times as a contradiction."""
    job = alone(job_of(JOB))
    sound = one_run_audit(job, KEY)
    if wrong == "duplicates x 2":
        WRONG[wrong][0](monkeypatch, 2)
    else:
        noise_times(monkeypatch, 0.5)
    assert one_run_audit(alone(job_of(JOB)), KEY).bound > 1.2 * sound.bound


def test_a_job_without_noise_is_contradicted(monkeypatch: pytest.MonkeyPatch) -> None:
    noise_times(monkeypatch, 0.01)
    modest = replace(JOB, mechanism=replace(JOB.mechanism, noise_multiplier=2.0))
    assert one_run_audit(alone(job_of(modest)), KEY).violated


def test_every_canary_owns_a_coordinate_that_the_mask_leaves_and_the_real_rows_have_nothing_there() -> None:
    def real(model: object, loss: object, rows: Rows, masks: object, clip: float) -> dict[str, torch.Tensor]:
        return {"a": torch.ones(4, 5), "b": torch.ones(6, 2, 3, 3).contiguous(memory_format=torch.channels_last)}

    model = torch.nn.Module()
    for name, t in real(None, None, None, None, 1.0).items():  # type: ignore[arg-type]
        model.register_parameter(name, torch.nn.Parameter(t))
    masks = {"a": torch.arange(20).reshape(4, 5) % 3 > 0, "b": torch.arange(6) % 2 == 0}
    planted = Planted(25, real)  # type: ignore[arg-type]
    numbers = torch.tensor([0, 3, 3, 24])
    canaries = planted(model, lambda o, t: o, CanaryRows.of(numbers), masks, 2.0)
    assert planted.observe(canaries, masks) == pytest.approx(2.0 * np.bincount(numbers, minlength=25))
    assert sum(float(t.sum()) for t in canaries.values()) == pytest.approx(8.0)
    for name, mask in masks.items():
        off = ~mask if mask.ndim == canaries[name].ndim else ~mask.reshape(-1, 1, 1, 1).expand_as(canaries[name])
        assert not bool(canaries[name][off].any())
    others = planted(model, lambda o, t: o, Rows.make(torch.zeros(1), torch.zeros(1)), masks, 2.0)
    assert not planted.observe(others, masks).any()
    assert sum(int((t == 0).sum()) for t in others.values()) == 25


def test_the_number_of_guesses_is_fixed_before_the_run_and_fits_it() -> None:
    job = job_of(JOB)
    chosen = guesses_for(job.settings, 8, 1000, 1e-5, KEY)
    assert chosen == guesses_for(job.settings, 8, 1000, 1e-5, KEY)
    assert 20 <= chosen <= 400
    assert guesses_for(replace(job.settings, noise_multiplier=30.0), 5000, 1000, 1e-5, KEY) >= 20


def test_fewer_steps_claim_less() -> None:
    plan = job_of(JOB).plan
    short = shortened(plan, 2)
    assert short.spent.epsilon == epsilon(short.at_end, 1e-5).epsilon < plan.spent.epsilon
    assert shortened(plan, None) is plan
    with pytest.raises(UsageError, match="steps is 9"):
        shortened(plan, 9)


def test_too_many_canaries_are_refused() -> None:
    with pytest.raises(UsageError, match="canaries is 1300, but between 20 and 1200 fit this job"):
        one_run_audit(job_of(JOB), KEY, canaries=1300)


@pytest.mark.parametrize("granularity", ["weight", "filter"])
def test_dp_snip_right_and_with_two_thirds_of_its_noise(granularity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def audited() -> object:
        return snip_audit(30.75, 1.0, 0.7, granularity, 1e-5, KEY)

    sound = audited()
    assert not sound.violated and 0.6 * sound.claimed <= sound.bound <= sound.claimed  # type: ignore[attr-defined]
    noise_times(monkeypatch, 1 / 1.5)
    assert audited().violated  # type: ignore[attr-defined]


def test_dp_snip_of_a_sampled_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = snip_audit(1.0, 0.25, 1.0, "weight", 1e-5, KEY, canaries=1 << 17)
    assert not sound.violated and 0.6 * sound.claimed <= sound.bound <= sound.claimed
    noise_times(monkeypatch, 1 / 1.5)
    assert snip_audit(1.0, 0.25, 1.0, "weight", 1e-5, KEY, canaries=1 << 17).violated


def test_the_shift_of_the_mean_is_a_lower_limit_as_often_as_it_says() -> None:
    """Two hundred and fifty draws of each mu: below it in at least 95 of 100, and not much below."""
    for mu in (0.0, 0.3):
        limits = []
        for seed in range(250):
            draw = np.random.default_rng(seed)
            members = draw.random(1000) < 0.5
            limits.append(shift(mu * members + draw.standard_normal(1000), members, 0.05))
        assert sum(limit > mu for limit in limits) <= 0.09 * 250
        assert np.median(limits) >= mu - 0.15
