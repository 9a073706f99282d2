"""What a target allows: always on the private side of it, and no more private than need be."""

from __future__ import annotations

import math

import dp_accounting as dp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsedp.dp.accounting import epsilon, snip_event, training_event
from sparsedp.dp.calibration import (
    MOST_STEPS,
    Unreachable,
    _noise_at,
    _noise_place,
    calibrate_batch_size,
    calibrate_noise,
    calibrate_snip,
    calibrate_steps,
    steps_left,
)
from sparsedp.dp.ledger import Ledger
from sparsedp.errors import UsageError

N, B = 50_000, 4096
Q = B / N


def noise_for(target: float, steps: int = 875, **how: str) -> float:
    found = calibrate_noise(lambda sigma: training_event(Q, sigma, steps), target, 1e-5, **how)  # type: ignore[arg-type]
    assert found.spent.epsilon <= target
    return found.value


@pytest.mark.parametrize(("target", "sigma"), [(1.0, 9.120), (2.0, 4.933), (4.0, 2.756)])
def test_the_specifications_noise(target: float, sigma: float) -> None:
    """9.119, 4.932 and 2.756 to the nearest; rounded to the private side, 9.120 and 4.933."""
    assert math.ceil(noise_for(target) * 1000) / 1000 == sigma


def test_replace_one_and_rdp_need_more_noise() -> None:
    assert noise_for(1.0, neighbouring="replace-one") == pytest.approx(18.08, abs=0.005)
    assert noise_for(1.0, accountant="rdp") == pytest.approx(9.89, rel=0.01)


def test_at_noise_ten_a_budget_of_one_buys() -> None:
    def event(steps: int) -> dp.DpEvent:
        return training_event(Q, 10.0, steps)

    assert calibrate_steps(event, 1.0, 1e-5).value == 1055
    assert calibrate_steps(event, 1.0, 1e-5, "rdp").value == 895
    assert epsilon(event(1055), 1e-5).epsilon <= 1.0 < epsilon(event(1056), 1e-5).epsilon


def test_the_largest_batch() -> None:
    target = epsilon(training_event(Q, 10.0, 875), 1e-5).epsilon
    found = calibrate_batch_size(lambda b: training_event(b / N, 10.0, 875), N, target, 1e-5)
    assert found.value == B
    assert found.spent.epsilon == target
    below = calibrate_batch_size(lambda b: training_event(b / N, 10.0, 875), N, target * (1 - 1e-9), 1e-5)
    assert below.value == B - 1


@pytest.mark.parametrize(("share", "snip", "training"), [(0.1, 30.75, 9.186), (0.2, 16.305, 9.363), (0.5, 7.03, 10.73)])
def test_dp_snip_from_a_share_is_composed_jointly(share: float, snip: float, training: float) -> None:
    front = calibrate_snip(1e-5, total=1.0, share=share)
    assert front.value == pytest.approx(snip, rel=1e-3)
    assert front.spent.epsilon <= share
    found = calibrate_noise(lambda s: dp.ComposedDpEvent([snip_event(front.value), training_event(Q, s, 875)]), 1.0, 1e-5)
    assert found.value == pytest.approx(training, rel=5e-4)
    assert found.spent.epsilon <= 1.0


def test_dp_snip_from_its_own_epsilon_and_from_one_batch() -> None:
    assert calibrate_snip(1e-5, own=0.1).value == 30.75
    assert calibrate_snip(1e-5, own=0.1, rate=Q).value == pytest.approx(3.71, abs=0.005)
    with pytest.raises(UsageError, match="own epsilon"):
        calibrate_snip(1e-5, total=1.0)
    with pytest.raises(UsageError, match="snip_share"):
        calibrate_snip(1e-5, total=1.0, share=1.0)


targets = st.floats(-2, 3).map(lambda k: 10**k)
rates = st.floats(-3, 0).map(lambda k: 10**k)


@settings(max_examples=20, deadline=None)
@given(targets, rates, st.integers(1, 20_000), st.sampled_from(["rdp", "paper"]))
def test_noise_never_passes_its_target(target: float, rate: float, steps: int, accountant: str) -> None:
    def event(sigma: float) -> dp.DpEvent:
        return dp.ComposedDpEvent([snip_event(3 * sigma), training_event(rate, sigma, steps)])

    try:
        found = calibrate_noise(event, target, 1e-5, accountant)  # type: ignore[arg-type]
    except Unreachable:  # Renyi orders end, and with them the epsilons that they can prove
        assert epsilon(event(1e9), 1e-5, accountant).epsilon > target  # type: ignore[arg-type]
        return
    assert found.spent == epsilon(event(found.value), 1e-5, accountant)  # type: ignore[arg-type]
    assert found.spent.epsilon <= target
    if found.value > 0.01 and found.value < 1e6:
        assert epsilon(event(found.value * 0.999), 1e-5, accountant).epsilon > target * (1 - 1e-3)  # type: ignore[arg-type]


@settings(max_examples=3, deadline=None)
@given(targets, rates, st.integers(1, 5_000), st.sampled_from(["add-remove", "replace-one"]))
def test_noise_by_pld_never_passes_its_target(target: float, rate: float, steps: int, neighbouring: str) -> None:
    found = calibrate_noise(lambda s: training_event(rate, s, steps), target, 1e-5, "pld", neighbouring)  # type: ignore[arg-type]
    assert found.spent.epsilon <= target
    assert found.spent.epsilon >= 0.98 * target or found.value <= 0.02


@settings(max_examples=12, deadline=None)
@given(st.floats(-0.5, 2).map(lambda k: 10**k), rates, st.floats(-0.2, 1.5).map(lambda k: 10**k))
def test_steps_are_the_most_that_fit(target: float, rate: float, sigma: float) -> None:
    def event(steps: int) -> dp.DpEvent:
        return training_event(rate, sigma, steps)

    try:
        steps = int(calibrate_steps(event, target, 1e-5, "rdp").value)
    except Unreachable:
        assert epsilon(event(1), 1e-5, "rdp").epsilon > target
        return
    assert epsilon(event(steps), 1e-5, "rdp").epsilon <= target
    assert steps == MOST_STEPS or epsilon(event(steps + 1), 1e-5, "rdp").epsilon > target


def test_a_million_steps() -> None:
    found = calibrate_noise(lambda s: training_event(0.001, s, 1_000_000), 2.0, 1e-5)
    assert 1.99 <= found.spent.epsilon <= 2.0
    assert found.spent.slack < 0.01


def test_what_is_left_after_a_ledger() -> None:
    step = training_event(Q, 10.0)
    ledger = Ledger().append("DP-SNIP", snip_event(30.75)).append("step", step, 800)
    left = steps_left(ledger, step, 0.9115, 1e-5)
    after = ledger.append("step", step, left)
    assert epsilon(after, 1e-5).epsilon <= 0.9115 < epsilon(after.append("step", step), 1e-5).epsilon
    assert left == 75
    assert steps_left(after, step, 0.9115, 1e-5) == 0


def test_targets_that_cannot_be() -> None:
    with pytest.raises(Unreachable, match="even steps 1 costs"):
        calibrate_steps(lambda t: training_event(1.0, 1.0, t), 0.5, 1e-5)
    with pytest.raises(Unreachable, match="even noise_multiplier"):
        calibrate_noise(lambda s: dp.ComposedDpEvent([snip_event(1.0), training_event(Q, s, 10)]), 1.0, 1e-5)
    with pytest.raises(Unreachable, match="inf"):
        calibrate_batch_size(lambda b: training_event(b / N, 0.0, 5), N, 1.0, 1e-5)
    for target in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(UsageError, match="epsilon is"):
            calibrate_noise(lambda s: training_event(Q, s, 10), target, 1e-5)


@given(st.floats(0.01, 1e8))
def test_noise_is_rounded_up_to_five_digits(noise: float) -> None:
    place = _noise_place(noise)
    assert noise * (1 - 1e-9) <= _noise_at(place) <= noise * 1.0001 + 1e-12
    assert _noise_at(place) < _noise_at(place - 1)
    assert _noise_place(_noise_at(place)) == place
