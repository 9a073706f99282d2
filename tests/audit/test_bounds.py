"""The statistics of audits against closed forms, brute force, and simulated attacks on mechanisms whose privacy is known."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import special, stats

from sparsedp.audit import bounds, one_run_bounds
from sparsedp.audit.bounds import Counts, Limits
from sparsedp.dp.accounting import epsilon
from sparsedp.dp.ledger import Ledger, gaussian_event
from sparsedp.dp.tradeoff import Profile, gaussian_delta, gaussian_mu, profile

DELTA = 1e-5


def gaussian_attack(mu: float, runs: int, seed: int) -> tuple[Counts, ...]:
    """The best attack on the Gaussian mechanism mu."""
    draw = np.random.default_rng(seed)
    return bounds.attack(draw.standard_normal(runs), mu + draw.standard_normal(runs))


@pytest.mark.parametrize(("count", "trials", "alpha"), [(0, 100, 0.01), (3, 50, 0.05), (49, 50, 0.005)])
def test_the_upper_limit_is_where_so_few_become_improbable(count: int, trials: int, alpha: float) -> None:
    limit = bounds.upper_limit(count, trials, alpha)
    assert stats.binom.cdf(count, trials, limit) == pytest.approx(alpha, rel=1e-9)


def test_the_upper_limit_by_hand() -> None:
    assert bounds.upper_limit(0, 100, 0.05) == pytest.approx(1 - 0.05 ** (1 / 100))
    assert bounds.upper_limit(7, 7, 0.05) == 1.0


def test_limits_hold_as_often_as_they_say() -> None:
    """All ten limits of an attack together, in at least 95 of 100 attacks; nine tenths would be seen."""
    mu, draws = 1.0, 400
    held = 0
    for seed in range(draws):
        draw = np.random.default_rng(seed)
        out, inside = draw.standard_normal(400), mu + draw.standard_normal(400)
        places = [*np.quantile(out[:80], bounds.QUANTILES_OUT), *np.quantile(inside[:80], bounds.QUANTILES_IN)]
        found = bounds.limits(bounds.attack(out, inside), 0.95)
        held += all(
            one.false_alarm >= special.ndtr(-t) and one.miss >= special.ndtr(t - mu)
            for one, t in zip(found, places, strict=True)
        )
    assert held >= 0.93 * draws


def test_epsilon_by_rates_by_hand() -> None:
    found = [Limits(0.1, 0.4), Limits(0.5, 0.01)]
    assert bounds.epsilon_by_rates(found, 0.0) == pytest.approx(max(math.log(6), math.log(50)))
    assert bounds.epsilon_by_rates([Limits(0.1, 0.4)], 0.3) == pytest.approx(math.log(3))
    assert bounds.epsilon_by_rates([Limits(1.0, 1.0)], DELTA) == 0.0


def test_mu_by_rates_is_exact_on_the_curve() -> None:
    at = 0.3
    assert bounds.mu_by_rates([Limits(float(special.ndtr(-at)), float(special.ndtr(at - 1.7)))]) == pytest.approx(1.7)
    assert bounds.mu_by_rates([Limits(0.9, 0.9)]) == 0.0


@pytest.mark.parametrize("target", [0.1, 1.0, 8.0])
def test_epsilon_of_mu_inverts_the_closed_form(target: float) -> None:
    mu = gaussian_mu(target, DELTA)
    assert bounds.epsilon_of_mu(mu, DELTA) == pytest.approx(target, rel=1e-6)
    assert gaussian_delta(bounds.epsilon_of_mu(mu, DELTA), mu) == pytest.approx(DELTA, rel=1e-4)
    assert bounds.epsilon_of_mu(0.0, DELTA) == 0.0


def family(rate: float, sigma: float, steps: int) -> bounds.Family:
    return lambda factor: Ledger().append("train", gaussian_event(rate, factor * sigma), steps)


def test_the_family_of_a_gaussian_gives_what_its_curve_gives() -> None:
    of = family(1.0, 2.0, 4)
    found = [Limits(float(special.ndtr(-0.5)), float(special.ndtr(0.5 - 0.6)))]
    by_family = bounds.epsilon_in_family(of, DELTA, lambda claim: bounds.violates(claim, found))
    assert by_family == pytest.approx(bounds.epsilon_of_mu(0.6, DELTA), rel=0.02)
    assert bounds.epsilon_in_family(of, DELTA, lambda claim: False) == 0.0
    assert bounds.epsilon_in_family(of, DELTA, lambda claim: True) == math.inf


def test_a_family_can_prove_more_than_the_claim() -> None:
    found = [Limits(float(special.ndtr(-1.0)), float(special.ndtr(1.0 - 2.0)))]
    by_family = bounds.epsilon_in_family(family(1.0, 2.0, 4), DELTA, lambda claim: bounds.violates(claim, found))
    assert by_family == pytest.approx(bounds.epsilon_of_mu(2.0, DELTA), rel=0.02)


@pytest.mark.parametrize(("mu", "violated"), [(0.95, False), (0.995, False), (1.05, True)])
def test_violation_is_judged_on_the_whole_curve(mu: float, violated: bool) -> None:
    """Exact rates of attacks: on the claim's curve and above it nothing is wrong, below it anywhere all is."""
    claim = profile(Ledger().append("train", gaussian_event(1.0, 1.0), 1))
    for at in (-1.0, 0.0, 0.5, 2.0):
        found = [Limits(float(special.ndtr(-at)), float(special.ndtr(at - mu)))]
        assert bounds.violates(claim, found) is violated


EXPECTED = {(2, 1000): 1.29, (4, 1000): 3.21, (2, 5000): 1.69, (4, 5000): 3.65, (8, 5000): 7.56}
"""Median lower bounds by the Gaussian curve at 95 %, delta 1e-5, of a published table of five thresholds."""


@pytest.mark.parametrize(("claimed", "runs"), EXPECTED)
def test_lower_bounds_are_as_large_as_expected_and_below_the_truth(claimed: float, runs: int) -> None:
    mu = gaussian_mu(claimed, DELTA)
    found = [bounds.limits(gaussian_attack(mu, runs, seed), 0.95) for seed in range(30)]
    by_curve = [bounds.epsilon_of_mu(bounds.mu_by_rates(f), DELTA) for f in found]
    assert np.median(by_curve) >= 0.85 * EXPECTED[claimed, runs]
    assert sum(e > claimed for e in by_curve) <= 4  # 30 draws at 5 %: five or more have probability 0.06 at worst
    assert all(e <= 1.1 * claimed for e in by_curve)
    assert all(bounds.epsilon_by_rates(f, DELTA) <= claimed for f in found)


def simulated(
    power: tuple[float, float, int], runs: int, seed: int, noise: float = 1.0, rate: float = 1.0, copies: int = 1
) -> tuple[Counts, ...]:
    """The canary audit's scores, drawn from the formula instead of from training."""
    sigma, q, steps = power
    draw = np.random.default_rng(seed)

    def scores(member: int) -> np.ndarray:
        joined = (draw.random((runs, steps)) < q * rate) * member * copies
        seen = joined + noise * sigma * draw.standard_normal((runs, steps))
        return bounds.log_likelihood_ratio(seen, q, sigma).sum(1)

    return bounds.attack(scores(0), scores(1))


@pytest.mark.parametrize("power", [(2.0, 0.25, 50), (1.0, 0.5, 6), (1.0, 1.0, 1)])
def test_power_and_false_alarms_of_the_violation_rule(power: tuple[float, float, int]) -> None:
    sigma, q, steps = power
    claim = profile(Ledger().append("train", gaussian_event(q, sigma), steps))

    def alarms(**wrong: float) -> float:
        return float(
            np.mean([bounds.violates(claim, bounds.limits(simulated(power, 1000, s, **wrong), 0.99)) for s in range(40)])
        )  # type: ignore[arg-type]

    assert alarms() == 0
    assert alarms(noise=0.71) >= 0.9
    if q < 1:
        assert alarms(rate=1.5) >= 0.95
    assert alarms(copies=2) >= 0.95


def test_log_likelihood_ratio_is_that_of_the_densities() -> None:
    seen, q, sigma = np.array([-3.0, 0.0, 0.4, 1.0, 7.0]), 0.3, 0.8
    out = stats.norm.pdf(seen, 0, sigma)
    inside = (1 - q) * out + q * stats.norm.pdf(seen, 1, sigma)
    assert bounds.log_likelihood_ratio(seen, q, sigma) == pytest.approx(np.log(inside / out))
    assert bounds.log_likelihood_ratio(seen, 1.0, sigma) == pytest.approx((2 * seen - 1) / (2 * sigma**2))


def randomised_response_tail(canaries: int, correct: int, chance: float) -> float:
    """The chance of at least so many right guesses, by counting all outcomes."""
    total = 0.0
    for outcome in itertools.product((True, False), repeat=canaries):
        if sum(outcome) >= correct:
            total += math.prod(chance if right else 1 - chance for right in outcome)
    return total


@pytest.mark.parametrize("correct", range(1, 8))
def test_the_p_value_is_exact_for_randomised_response(correct: int) -> None:
    level = 1.3
    chance = math.exp(level) / (1 + math.exp(level))
    assert one_run_bounds.p_value(7, 7, correct, level, 0.0) == pytest.approx(randomised_response_tail(7, correct, chance))


@pytest.mark.parametrize(
    ("guesses", "correct", "level", "delta"), [(40, 33, 1.0, 1e-3), (10, 10, 0.5, 1e-2), (60, 5, 2.0, 1e-4)]
)
def test_the_price_of_delta_is_the_steepest_chord(guesses: int, correct: int, level: float, delta: float) -> None:
    chance = 1 / (1 + math.exp(-level))
    tail = [float(stats.binom.sf(v - 1, guesses, chance)) for v in range(correct + 1)]
    steepest = max((tail[correct - i] - tail[correct]) / i for i in range(1, correct + 1))
    assert one_run_bounds.p_value(100, guesses, correct, level, delta) == pytest.approx(
        min(1.0, tail[correct] + 200 * delta * steepest)
    )


def test_p_values_of_nothing() -> None:
    assert one_run_bounds.p_value(10, 5, 0, 1.0, 0.1) == 1.0
    assert one_run_bounds.epsilon_bound(100, 40, 20, DELTA, 0.95) == 0.0
    assert not one_run_bounds.curve_rejected(one_run_bounds.of_gaussian(0.1), 10, 5, 0, 0.95)


@pytest.mark.parametrize("level", [0.5, 1.5])
def test_the_recursion_never_rejects_randomised_response_too_often(level: float) -> None:
    """For pure epsilon the tail of right guesses is binomial, so what the recursion rejects must be rarer than it says."""
    guesses, chance = 50, 1 / (1 + math.exp(-level))
    curve = Profile((level,), (0.0,))
    for confidence in (0.8, 0.95, 0.99):
        rejected = [
            c for c in range(1, guesses + 1)
            if one_run_bounds.curve_rejected(one_run_bounds.of_profile(curve), guesses, guesses, c, confidence)
        ]  # fmt: skip
        assert rejected == list(range(rejected[0], guesses + 1))
        tail = float(stats.binom.sf(rejected[0] - 1, guesses, chance))
        assert tail <= 1 - confidence
        assert tail >= (1 - confidence) / 60  # and not for being blind


def test_the_blow_down_of_a_profile_is_that_of_its_mechanism() -> None:
    claim = profile(Ledger().append("train", gaussian_event(1.0, 1.0), 1))
    ours, exact = one_run_bounds.of_profile(claim), one_run_bounds.of_gaussian(1.0)
    for power in (0.05, 0.3, 0.7, 0.95):
        assert ours(power) == pytest.approx(exact(power), rel=0.02)
        assert ours(power) <= exact(power) * (1 + 1e-9)
    assert ours(1.0) == pytest.approx(1.0, abs=1e-6)


TABLE = {(2, 1000): (0.57, 0.72), (4, 1000): (1.29, 1.75), (2, 5000): (0.79, 0.95), (8, 5000): (2.93, 3.95)}
"""Medians of five draws: Steinke et al., and by trade-off curve."""


@pytest.mark.parametrize(("claimed", "canaries"), TABLE)
def test_one_run_bounds_are_as_large_as_expected_and_below_the_truth(claimed: float, canaries: int) -> None:
    mu, guesses = gaussian_mu(claimed, DELTA), max(40, canaries // 50)
    found = []
    for seed in range(15):
        draw = np.random.default_rng(seed)
        inside = draw.random(canaries) < 0.5
        scores = mu * inside + draw.standard_normal(canaries)
        correct = int(inside[np.argsort(-scores)[:guesses]].sum())
        by_curve = bounds.epsilon_of_mu(one_run_bounds.mu_bound(canaries, guesses, correct, 0.95), DELTA)
        found.append((one_run_bounds.epsilon_bound(canaries, guesses, correct, DELTA, 0.95), by_curve))
    plain, curve = np.median([f[0] for f in found]), np.median([f[1] for f in found])
    assert (plain, curve) == pytest.approx(TABLE[claimed, canaries], rel=0.35)
    assert curve > plain
    assert all(f[1] <= claimed for f in found)


def test_the_claim_of_a_family_is_its_member_of_factor_one() -> None:
    of = family(0.5, 1.0, 6)
    assert epsilon(of(2.0), DELTA).epsilon < epsilon(of(1.0), DELTA).epsilon
