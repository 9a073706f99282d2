"""A thousand targets: the noise found for each keeps it, and the accountant that says so lies between its neighbours."""

from __future__ import annotations

import random

import dp_accounting as dp
import pytest

from sparsedp.dp.accounting import Neighbouring, epsilon, snip_event, training_event
from sparsedp.dp.calibration import calibrate_noise

CHUNKS, EACH, COMPARED = 20, 50, 25
"""1,000 targets, of which 500 are looked at by two other accountants as well."""


@pytest.mark.parametrize("chunk", [pytest.param(n, marks=pytest.mark.release) for n in range(CHUNKS)])
def test_a_thousand_targets_are_kept(chunk: int) -> None:
    for number in range(EACH * chunk, EACH * (chunk + 1)):
        check(number, compared=number % EACH < COMPARED)


def test_a_few_targets_are_kept() -> None:
    for number in range(4):
        check(number, compared=number < 2)


def check(number: int, compared: bool) -> None:
    """Calibrate to a target, with or without DP-SNIP in front; `compared` ones are plain training under add/remove."""
    own = random.Random(number)
    rate, steps, target, delta = 10 ** own.uniform(-3, 0), round(10 ** own.uniform(0, 3.7)), 10 ** own.uniform(-1, 1.2), 1e-5
    relation: Neighbouring = "add-remove" if compared or own.random() < 0.7 else "replace-one"
    snip = not compared and own.random() < 0.5

    def event(sigma: float) -> dp.DpEvent:
        training = training_event(rate, sigma, steps)
        return dp.ComposedDpEvent([snip_event(3 * sigma), training]) if snip else training

    found = calibrate_noise(event, target, delta, "pld", relation)
    words = f"target {number}: {target} at rate {rate}, {steps} steps, {relation}"
    spent = epsilon(event(found.value), delta, "pld", relation).epsilon
    assert found.spent.epsilon == spent <= target, words
    assert spent > 0.98 * target or found.value <= 0.02, words
    if compared:
        low, high = interval(rate, found.value, steps, delta)
        assert low <= spent <= high, words
        assert spent <= epsilon(event(found.value), delta, "rdp").epsilon + 1e-6, words


def interval(rate: float, sigma: float, steps: int, delta: float) -> tuple[float, float]:
    """Within which prv_accountant proves epsilon to lie."""
    prv = pytest.importorskip("prv_accountant")
    mechanism = prv.PoissonSubsampledGaussianMechanism(sampling_probability=rate, noise_multiplier=sigma)
    accountant = prv.PRVAccountant([mechanism], max_self_compositions=[steps], eps_error=0.02, delta_error=1e-8)
    low, _, high = accountant.compute_epsilon(delta, [steps])
    return low, high
