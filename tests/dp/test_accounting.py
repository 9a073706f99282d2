"""What events cost: the specification's figures, closed forms, other accountants, and what must be refused."""

from __future__ import annotations

import math
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsedp.dp import accounting
from sparsedp.dp.accounting import (
    epsilon,
    first_grid,
    free_event,
    loss_distribution,
    parts_of,
    rounding,
    snip_event,
    training_event,
)
from sparsedp.dp.ledger import Ledger
from sparsedp.dp.tradeoff import gaussian_delta, gaussian_mu, profile
from sparsedp.errors import UsageError

Q = 4096 / 50000
FIRST = training_event(Q, 10.0, 875)
WITH_SNIP = Ledger().append("DP-SNIP", snip_event(30.75)).append("step", training_event(Q, 10.0), 875)


def rates() -> st.SearchStrategy[float]:
    return st.floats(-3, 0).map(lambda k: 10**k)


def noises() -> st.SearchStrategy[float]:
    return st.floats(-0.2, 1.5).map(lambda k: 10**k)


# --- Facts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "sigma", "steps", "rdp", "pld"),
    [
        (4096, 10.0, 875, 0.9877, 0.9028),
        (4096, 6.0, 1125, 1.9996, 1.8364),
        (4096, 4.0, 2000, 4.3988, 4.0627),
        (16384, 21.1, 250, 0.9976, 0.9121),
    ],
)
def test_the_papers_runs_to_four_digits(batch: int, sigma: float, steps: int, rdp: float, pld: float) -> None:
    event = training_event(batch / 50000, sigma, steps)
    assert round(epsilon(event, 1e-5).epsilon, 4) == pld
    assert round(epsilon(event, 1e-5, "rdp").epsilon, 4) == rdp


@pytest.mark.parametrize(
    ("sigma", "joint", "rdp", "paper", "replace"),
    [
        (57.8, 0.9052, 0.9904, 1.038, 1.930),
        (30.75, 0.9115, 0.9972, 1.100, 1.943),
        (7.03, 1.059, 1.157, 1.515, 2.271),
        (3.73, 1.394, 1.520, 2.075, 3.016),
    ],
)
def test_dp_snip_in_front_is_composed_jointly(sigma: float, joint: float, rdp: float, paper: float, replace: float) -> None:
    event = dp.ComposedDpEvent([snip_event(sigma), FIRST])
    assert epsilon(event, 1e-5).epsilon == pytest.approx(joint, rel=3e-4)
    assert epsilon(event, 1e-5, "rdp").epsilon == pytest.approx(rdp, rel=3e-4)
    assert epsilon(event, 1e-5, neighbouring="replace-one").epsilon == pytest.approx(replace, rel=3e-4)


def test_the_papers_rule_sums_the_parts_and_proves_only_twice_delta() -> None:
    parts = [epsilon(e, 1e-5, "rdp").epsilon for e in (snip_event(30.75), FIRST)]
    spent = epsilon(WITH_SNIP, 1e-5, "paper")
    assert spent.epsilon == pytest.approx(sum(parts))
    assert spent.delta == pytest.approx(2e-5)
    assert "only delta 2e-05" in spent.method
    alone = epsilon(FIRST, 1e-5, "paper")
    assert (alone.epsilon, alone.delta) == (parts[1], 1e-5)


@pytest.mark.parametrize("sigma", [20.0, 57.8])
def test_the_papers_rule_sums_the_parts_where_every_unit_takes_part(sigma: float) -> None:
    """At a rate of 1 both are Gaussians, which are one Gaussian together; the paper adds them up as two."""
    ledger = Ledger().append("dp-snip", snip_event(57.8)).append("train", training_event(1.0, sigma), 10)
    parts = [epsilon(event, 1e-5, "rdp").epsilon for event in (snip_event(57.8), training_event(1.0, sigma, 10))]
    spent = epsilon(ledger, 1e-5, "paper")
    assert spent.epsilon == pytest.approx(sum(parts)) and spent.delta == pytest.approx(2e-5)
    assert epsilon(ledger, 1e-5, "rdp").epsilon < 0.95 * sum(parts)
    taken_up = ledger.append("taken up again", free_event("nothing")).append("train", training_event(1.0, sigma), 2)
    assert epsilon(taken_up, 1e-5, "paper").delta == pytest.approx(2e-5), "steps are one part, in however many entries"


@pytest.mark.parametrize("accountant", ["pld", "rdp", "paper"])
@pytest.mark.parametrize("rate", [0.1, 1.0])
@pytest.mark.parametrize("sigma", [1e-200, 1e-160, 1e-60])
def test_noise_too_small_for_floating_point_is_none(sigma: float, rate: float, accountant: Any) -> None:
    assert epsilon(training_event(rate, sigma, 3), 1e-5, accountant).epsilon == math.inf
    with pytest.raises(UsageError, match="has no privacy profile"):
        profile(training_event(rate, sigma, 3))


def test_an_epsilon_without_any_order_is_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library leaves out orders that it cannot work out, and answers 0 where none is left."""
    broken = RdpAccountant()
    broken._rdp += math.nan
    monkeypatch.setattr(accounting, "renyi", lambda parts: broken)
    assert broken.get_epsilon(1e-5) == 0
    assert epsilon(FIRST, 1e-5, "rdp").epsilon == math.inf


@pytest.mark.parametrize(("sigma", "rate"), [(1e-3, 0.1), (1e-4, 1.0), (1e-6, 0.128)])
@pytest.mark.parametrize("relation", ["add-remove", "replace-one"])
def test_a_profile_too_wide_for_a_grid_is_that_of_the_unsampled_gaussian(sigma: float, rate: float, relation: Any) -> None:
    event = training_event(rate, sigma, 3)
    curve, mu = profile(event, relation), math.sqrt(3) * (1 if relation == "add-remove" else 2) / sigma
    assert curve.epsilons[0] == 0 and curve.deltas[0] == pytest.approx(1) and curve.deltas[-1] == pytest.approx(1e-10, rel=1e-3)
    assert list(curve.deltas) == sorted(curve.deltas, reverse=True)
    assert all(d >= gaussian_delta(e, mu) * (1 - 1e-6) for e, d in zip(curve.epsilons, curve.deltas, strict=True))
    assert curve.attack_power(0.001) == 1 and curve.attack_power(0.0) <= 1


def test_joint_composition_is_not_a_sum_and_claims_one_delta() -> None:
    spent = epsilon(WITH_SNIP, 1e-5)
    assert round(spent.epsilon, 4) == 0.9115
    assert spent.delta == 1e-5


def test_a_schedule_is_charged_step_by_step() -> None:
    """D9: noise and rate that change on the way are composed as they were, in whatever order."""
    calm, loud = (Q, 10.0, 400), (0.02, 2.0, 100)
    there, back = (
        epsilon(dp.ComposedDpEvent([training_event(*part) for part in parts]), 1e-5).epsilon
        for parts in ((calm, loud), (loud, calm))
    )
    library = dp.pld.PLDAccountant(value_discretization_interval=1e-4)
    for part in (calm, loud):
        library.compose(training_event(*part))
    assert there == pytest.approx(back, rel=1e-9) == pytest.approx(library.get_epsilon(1e-5), rel=1e-2)
    assert there > max(epsilon(training_event(*part), 1e-5).epsilon for part in (calm, loud))


def test_replace_one_costs_about_twice_and_says_so() -> None:
    spent = epsilon(FIRST, 1e-5, neighbouring="replace-one")
    assert round(spent.epsilon, 3) == 1.924
    assert spent.neighbouring == "replace-one"


# --- Closed forms and bounds --------------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(sigma=noises(), count=st.integers(1, 1000), delta=st.sampled_from([1e-3, 1e-5, 1e-9]), replace=st.booleans())
def test_gaussians_meet_their_closed_form(sigma: float, count: int, delta: float, replace: bool) -> None:
    mu = math.sqrt(count) / sigma * (2 if replace else 1)
    spent = epsilon(training_event(1.0, sigma, count), delta, neighbouring="replace-one" if replace else "add-remove")
    if mu <= 12:  # beyond, the library's own closed form overflows
        exact = dp.get_epsilon_gaussian(1 / mu, delta)
        assert spent.epsilon == pytest.approx(exact, rel=1e-6, abs=1e-6)
        assert spent.epsilon >= exact - 1e-9


@pytest.mark.parametrize("steps", [30, 3_000, 200_000])
@pytest.mark.parametrize("delta", [1e-5, 1e-9, 1e-11])
def test_the_fourier_transform_never_claims_too_little(steps: int, delta: float) -> None:
    """A rate a hair below 1 goes through the grid, and its closed form is known.

    Guarantee: the pair (epsilon, delta) of the result is an upper bound; every approximation errs towards more epsilon.
    """
    event = training_event(1 - 1e-15, math.sqrt(steps) / 0.9, steps)
    exact = dp.get_epsilon_gaussian(1 / 0.9, delta)
    assert exact <= epsilon(event, delta).epsilon <= exact * 1.2


def test_the_grid_rounds_to_the_private_side() -> None:
    """On a grid so coarse that it shows, every answer lies above the fine one."""
    parts = parts_of(FIRST)
    fine = epsilon(FIRST, 1e-5).epsilon
    for times in (64, 256, 1024):
        coarse = loss_distribution(parts, "add-remove", times * first_grid(parts, "add-remove")).get_epsilon_for_delta(1e-5)
        assert coarse > fine


@pytest.mark.parametrize(("rate", "sigma"), [(0.5, 1.0), (0.1, 0.7), (0.9, 2.0)])
def test_both_directions_are_covered(rate: float, sigma: float) -> None:
    """Delta is the larger of the two directions', by numerical integration of one step.

    At positive epsilons taking a unit away is the worse one here, at negative epsilons adding one is: so both are seen.
    """
    points = [-1.0, -0.3, 0.0, 0.1, 0.5]
    for eps, delta in zip(points, profile(training_event(rate, sigma), epsilons=points).deltas, strict=True):
        add, remove = (_one_step(rate, sigma, eps, adds) for adds in (True, False))
        assert delta == pytest.approx(max(add, remove), rel=1e-3)
        assert delta >= max(add, remove) * (1 - 1e-9)
        assert eps == 0 or (add < remove) == (eps > 0)


def _one_step(rate: float, sigma: float, eps: float, adds: bool) -> float:
    x = np.linspace(-12 * sigma, 12 * sigma + 1, 400_001)
    without = np.exp(-(x**2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))
    within = np.exp(-((x - 1) ** 2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi)) * rate + (1 - rate) * without
    first, second = (without, within) if adds else (within, without)
    return float(np.maximum(first - math.exp(eps) * second, 0).sum() * (x[1] - x[0]))


@settings(max_examples=3, deadline=None)
@given(rate=rates(), sigma=noises(), steps=st.integers(50, 3000))
def test_more_steps_higher_rate_less_noise_cost_more(rate: float, sigma: float, steps: int) -> None:
    base = epsilon(training_event(rate, sigma, steps), 1e-5)
    allowed = base.epsilon - base.slack - 1e-9
    assert epsilon(training_event(rate, sigma, 2 * steps), 1e-5).epsilon >= allowed
    assert epsilon(training_event(min(1.0, 1.5 * rate), sigma, steps), 1e-5).epsilon >= allowed
    assert epsilon(training_event(rate, sigma / 1.5, steps), 1e-5).epsilon >= allowed
    assert epsilon(training_event(rate, sigma, steps), 1e-7).epsilon >= allowed
    assert epsilon(training_event(rate, sigma, steps), 1e-5, neighbouring="replace-one").epsilon >= allowed


@settings(max_examples=6, deadline=None)
@given(rate=rates(), sigma=noises(), steps=st.integers(1, 3000))
def test_pld_lies_below_rdp_and_meets_the_library(rate: float, sigma: float, steps: int) -> None:
    event = training_event(rate, sigma, steps)
    spent = epsilon(event, 1e-5)
    assert spent.epsilon <= epsilon(event, 1e-5, "rdp").epsilon + 1e-6
    plain = dp.pld.PLDAccountant(value_discretization_interval=1e-3).compose(event).get_epsilon(1e-5)
    assert spent.epsilon <= plain + spent.slack + 1e-6


@pytest.mark.parametrize("setting", [(Q, 10.0, 875), (0.02, 1.2, 500), (0.3, 15.0, 300)])
def test_prv_accountant_agrees(setting: tuple[float, float, int]) -> None:
    prv = pytest.importorskip("prv_accountant")
    rate, sigma, steps = setting
    mechanism = prv.PoissonSubsampledGaussianMechanism(sampling_probability=rate, noise_multiplier=sigma)
    accountant = prv.PRVAccountant([mechanism], max_self_compositions=[steps], eps_error=0.02, delta_error=1e-8)
    low, estimate, high = accountant.compute_epsilon(1e-5, [steps])
    ours = epsilon(training_event(*setting), 1e-5).epsilon
    assert low <= ours <= high
    assert ours == pytest.approx(estimate, abs=1e-3)


# --- The curve ----------------------------------------------------------------------------------------------------------


def test_profile_mu_and_attack_power_of_the_papers_run() -> None:
    curve = profile(FIRST)
    assert round(curve.gaussian(), 4) == 0.2451
    assert [round(100 * curve.attack_power(a), 1) for a in (0.001, 0.01, 0.1)] == [0.2, 1.9, 15.0]
    assert round(profile(WITH_SNIP).gaussian(), 4) == 0.2472
    assert all(b <= a + 1e-12 for a, b in zip(curve.deltas, curve.deltas[1:], strict=False))


def test_profile_agrees_with_epsilon_and_the_gaussian() -> None:
    eps = epsilon(FIRST, 1e-5).epsilon
    assert profile(FIRST, epsilons=[eps]).deltas[0] == pytest.approx(1e-5, rel=1e-3)
    curve = profile(snip_event(2.0))
    for e, d in zip(curve.epsilons, curve.deltas, strict=True):
        assert d >= gaussian_delta(e, 0.5) - 1e-12
        assert d == pytest.approx(gaussian_delta(e, 0.5), rel=1e-5, abs=1e-14)
    assert curve.gaussian() == pytest.approx(0.5, rel=1e-5)
    assert profile(snip_event(2.0), "replace-one").gaussian() == pytest.approx(1.0, rel=1e-5)


def test_gaussian_mu_inverts() -> None:
    for mu in (0.05, 0.3, 2.0, 15.0):
        assert gaussian_mu(0.1, gaussian_delta(0.1, mu)) == pytest.approx(mu, rel=1e-5)
    assert gaussian_mu(1.0, 0.0) == 0.0 and gaussian_mu(1.0, 1.0) == math.inf


def test_profile_of_nothing_and_of_no_noise() -> None:
    assert profile(free_event("random masks read no data")).attack_power(0.01) == pytest.approx(0.01)
    with pytest.raises(UsageError, match="without noise"):
        profile(training_event(0.1, 0.0, 5))


# --- Edges --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", ["pld", "rdp", "paper"])
def test_no_noise_is_infinite_and_nothing_is_free(accountant: str) -> None:
    assert epsilon(training_event(0.1, 0.0, 5), 1e-5, accountant).epsilon == math.inf  # type: ignore[arg-type]
    assert epsilon(dp.NonPrivateDpEvent(), 1e-5, accountant).epsilon == math.inf  # type: ignore[arg-type]
    for free in (free_event("masks"), training_event(0.1, 1.0, 0), training_event(0.0, 1.0, 9), Ledger()):
        assert epsilon(free, 1e-5, accountant).epsilon == 0.0  # type: ignore[arg-type]


def test_rdp_and_paper_refuse_replace_one() -> None:
    """dp_accounting's RDP would claim 2.17 for a Gaussian of sigma 2, and the truth is 4.38."""
    for accountant in ("rdp", "paper"):
        with pytest.raises(UsageError, match="does not double the sensitivity"):
            epsilon(snip_event(2.0), 1e-5, accountant, "replace-one")  # type: ignore[arg-type]
    assert round(epsilon(snip_event(2.0), 1e-5, neighbouring="replace-one").epsilon, 2) == 4.38


@pytest.mark.parametrize("delta", [0.0, -1.0, 9e-15, 1.0, math.nan, math.inf])
def test_delta_outside_its_range_is_refused(delta: float) -> None:
    with pytest.raises(UsageError, match="delta is"):
        epsilon(FIRST, delta)


def test_unknown_words_are_refused() -> None:
    with pytest.raises(UsageError, match="choose one of paper, pld, rdp"):
        epsilon(FIRST, 1e-5, "gdp")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="add-remove, replace-one"):
        epsilon(FIRST, 1e-5, "pld", "both")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="does not know the event"):
        epsilon(dp.LaplaceDpEvent(1.0), 1e-5)


def test_delta_that_is_not_below_one_in_n_is_warned_of() -> None:
    assert epsilon(FIRST, 1e-5, num_examples=50_000).warnings == ()
    assert "1/N" in epsilon(FIRST, 1e-5, num_examples=100_000).warnings[0]
    assert "1/N" in epsilon(WITH_SNIP, 1e-5, "paper", num_examples=50_000).warnings[0]


def test_a_delta_that_rounding_reaches_falls_back_to_a_bound_that_holds() -> None:
    event = training_event(0.01, 5.0, 100_000)
    spent = epsilon(event, 1e-13)
    assert spent.grid is None and "Renyi" in spent.method
    assert spent.epsilon == epsilon(event, 1e-13, "rdp").epsilon
    with pytest.raises(UsageError, match="rounding"):
        epsilon(event, 1e-13, neighbouring="replace-one")


def test_a_loss_too_wide_for_a_grid_has_a_bound_all_the_same() -> None:
    spent = epsilon(training_event(0.5, 0.05, 100_000), 1e-5)
    assert spent.epsilon == pytest.approx(2e7, rel=0.01)
    assert spent.epsilon > epsilon(training_event(0.5, 0.05, 100_000), 1e-5, "rdp").epsilon * 0.9


def test_grids_follow_the_noise() -> None:
    """D5: with much noise the losses are far narrower than the usual grid of 1e-4, which would overstate epsilon by half."""
    event = training_event(0.01, 500.0, 10_000)
    spent = epsilon(event, 1e-5)
    usual = dp.pld.PLDAccountant(value_discretization_interval=1e-4).compose(event).get_epsilon(1e-5)
    assert spent.slack <= 1e-3 * spent.epsilon + 1e-5
    assert spent.epsilon < 0.7 * usual


def test_grids_are_refined_until_they_settle() -> None:
    """A step whose widest loss is far beyond its usual one: the first grid is too coarse for the sum of many."""
    event = training_event(0.001, 1.0, 20_000)
    spent = epsilon(event, 1e-5)
    assert spent.grid is not None and spent.grid < first_grid(parts_of(event), "add-remove")
    assert 0 < spent.slack <= 1e-3 * spent.epsilon


def test_rounding_is_charged_only_where_a_transform_is_used() -> None:
    assert rounding(parts_of(snip_event(2.0))) == 0.0
    assert rounding(parts_of(FIRST)) == (100 + 875) * 2.0**-52
