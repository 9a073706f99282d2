"""From settings to numbers: whatever is left out is solved for, to the private side, with pre-pruning counted in."""

from __future__ import annotations

import math
from typing import Any

import dp_accounting
import pytest

from sparsedp.config import Mechanism, Run, Sparsity
from sparsedp.dp.accounting import epsilon
from sparsedp.dp.ledger import Ledger, gaussian_event, snip_event
from sparsedp.errors import BudgetError, UsageError
from sparsedp.planning import budget

N, B = 5000, 500


def planned(sparsity: Sparsity | None = None, before: Ledger | None = None, **mechanism: Any) -> Any:
    return budget(Run(mechanism=Mechanism(batch_size=B, **mechanism), sparsity=sparsity or Sparsity()), N, before)


def test_noise_from_epsilon_and_steps() -> None:
    plan = planned(epsilon=2.0, steps=20)
    assert 1.98 < plan.spent.epsilon <= 2.0 == plan.target
    assert plan.at_end == Ledger().append("train", gaussian_event(B / N, plan.noise_multiplier), 20)
    assert plan.sampling_rate == 0.1


def test_steps_from_epsilon_and_noise() -> None:
    plan = planned(epsilon=2.0, noise_multiplier=1.5)
    assert plan.spent.epsilon <= 2.0
    assert epsilon(plan.at_end.append("train", gaussian_event(0.1, 1.5)), 1e-5).epsilon > 2.0


def test_epsilon_from_noise_and_steps() -> None:
    plan = planned(noise_multiplier=1.5, steps=20)
    assert plan.target is None
    assert plan.spent.epsilon == epsilon(Ledger().append("train", gaussian_event(0.1, 1.5), 20), 1e-5).epsilon


def test_all_three_are_checked() -> None:
    assert planned(epsilon=8.0, noise_multiplier=1.5, steps=3).steps == 3
    with pytest.raises(
        BudgetError, match=r"epsilon 0.5 would be passed: 300 steps at noise multiplier 1.5 spend \d.*leave out one"
    ):
        planned(epsilon=0.5, noise_multiplier=1.5, steps=300)


def test_a_target_that_not_even_one_step_keeps_is_refused() -> None:
    with pytest.raises(UsageError):
        planned(epsilon=0.01, noise_multiplier=0.3)


def test_more_than_all_is_refused() -> None:
    with pytest.raises(UsageError, match="batch_size is 500, but there are 400 privacy units; lower it"):
        budget(Run(mechanism=Mechanism(batch_size=B, epsilon=1.0, steps=2)), 400)


@pytest.mark.parametrize(
    "noise", [{"snip_noise_multiplier": 3.0}, {"snip_epsilon": 0.5}, {"snip_share": 0.2}], ids=lambda n: next(iter(n))
)
def test_dp_snip_is_composed_with_training(noise: dict[str, float]) -> None:
    plain = planned(epsilon=2.0, steps=20)
    plan = planned(Sparsity(prune="dp-snip", prune_rate=0.5, **noise), epsilon=2.0, steps=20)
    sigma = plan.snip_noise_multiplier
    assert plan.at_end.entries[0].event == dp_accounting.GaussianDpEvent(sigma)
    assert plan.noise_multiplier > plain.noise_multiplier
    assert plan.spent.epsilon <= 2.0
    if "snip_epsilon" in noise:
        assert epsilon(Ledger().append("dp-snip", snip_event(sigma)), 1e-5).epsilon == pytest.approx(0.5, rel=0.02)


def test_a_sampled_dp_snip_is_charged_as_sampled() -> None:
    plan = planned(
        Sparsity(prune="dp-snip", prune_rate=0.5, snip_noise_multiplier=2.0, snip_batch_size=50), noise_multiplier=1.0, steps=2
    )
    assert plan.at_end.entries[0].event == dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(2.0))


def test_a_share_needs_a_total() -> None:
    with pytest.raises(UsageError, match="snip_share is 0.2, but a share needs a total"):
        planned(Sparsity(prune="dp-snip", prune_rate=0.5, snip_share=0.2), noise_multiplier=1.0, steps=2)


@pytest.mark.parametrize("criterion", ["random", "synflow"])
def test_free_criteria_cost_nothing_and_say_why(criterion: Any) -> None:
    plan = planned(Sparsity(prune=criterion, prune_rate=0.5), epsilon=2.0, steps=20)
    assert plan.noise_multiplier == planned(epsilon=2.0, steps=20).noise_multiplier
    assert plan.at_end.entries[0].event == dp_accounting.NoOpDpEvent()
    assert "reads no data" in plan.at_end.entries[0].what


def test_what_was_spent_before_counts() -> None:
    before = Ledger().append("mask from a file, made by dp-snip", snip_event(2.0))
    plan = planned(Sparsity(mask_file="mask.safetensors"), before, epsilon=2.0, steps=20)
    assert plan.at_end.entries[0] == before.entries[0]
    assert plan.noise_multiplier > planned(epsilon=2.0, steps=20).noise_multiplier
    assert plan.spent.epsilon <= 2.0


def test_snip_without_noise_has_no_finite_epsilon() -> None:
    plan = planned(Sparsity(prune="snip-not-private", prune_rate=0.5), noise_multiplier=1.0, steps=2)
    assert math.isinf(plan.spent.epsilon)
    with pytest.raises(
        UsageError, match="epsilon is 1.0, but the weights are pruned without noise, for which there is no epsilon"
    ):
        planned(Sparsity(prune="snip-not-private", prune_rate=0.5), epsilon=1.0, steps=2)


def test_training_without_privacy_is_infinite() -> None:
    plan = planned(private=False, steps=7)
    assert (plan.steps, plan.noise_multiplier, plan.spent.epsilon, plan.target) == (7, 0.0, math.inf, None)


@pytest.mark.parametrize("options", [{"accountant": "rdp"}, {"neighbouring": "replace-one"}, {"accountant": "paper"}])
def test_the_accountant_asked_for_is_the_one_that_solves(options: dict[str, Any]) -> None:
    plan = planned(epsilon=2.0, steps=20, **options)
    assert plan.noise_multiplier > planned(epsilon=2.0, steps=20).noise_multiplier
    assert plan.spent.epsilon <= 2.0
    for name, value in options.items():
        assert getattr(plan.spent, name) == value
