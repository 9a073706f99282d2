"""From a target epsilon back to a setting: the noise, the number of steps or the batch size that it allows.

The answer always lies on the private side: its epsilon, worked out by `accounting.epsilon` itself, is at most the target.
The caller says how a setting becomes an event, so whatever else is charged to the same target (DP-SNIP in front) is
composed jointly with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import dp_accounting as dp

from sparsedp.dp.accounting import (
    Accountant,
    Ledger,
    Neighbouring,
    Spent,
    check_delta,
    epsilon,
    first_grid,
    has_search,
    loss_distribution,
    parts_of,
    rounding,
    snip_event,
    spread,
)
from sparsedp.dp.tradeoff import gaussian_mu
from sparsedp.errors import UsageError, require

MOST_STEPS = 1_000_000
LEAST_NOISE, MOST_NOISE = 0.01, 1e9
_CLOSE = 1e-4
"""A noise multiplier is good enough when its epsilon lies within this part below the target."""

Event: TypeAlias = dp.DpEvent | Ledger


@dataclass(frozen=True)
class Calibrated:
    """The setting found, and what it costs: at most the target."""

    value: float
    spent: Spent


def calibrate_noise(
    make_event: Callable[[float], Event],
    target: float,
    delta: float,
    accountant: Accountant = "pld",
    neighbouring: Neighbouring = "add-remove",
) -> Calibrated:
    """The least noise multiplier, to five digits and rounded up, whose event costs at most `target`."""
    ladder = _Ladder(
        _noise_at, _noise_place, _noise_place(MOST_NOISE), _noise_place(LEAST_NOISE), "noise_multiplier", -1.0, _CLOSE
    )
    return _solve(ladder, make_event, target, delta, accountant, neighbouring)


def calibrate_steps(
    make_event: Callable[[int], Event],
    target: float,
    delta: float,
    accountant: Accountant = "pld",
    neighbouring: Neighbouring = "add-remove",
) -> Calibrated:
    """The largest number of steps, up to a million, that costs at most `target`."""
    ladder = _Ladder(float, int, 1, MOST_STEPS, "steps", 0.5)
    return _solve(ladder, lambda steps: make_event(int(steps)), target, delta, accountant, neighbouring)


def calibrate_batch_size(
    make_event: Callable[[int], Event],
    num_examples: int,
    target: float,
    delta: float,
    accountant: Accountant = "pld",
    neighbouring: Neighbouring = "add-remove",
) -> Calibrated:
    """The largest expected batch, up to all examples, that costs at most `target`."""
    ladder = _Ladder(float, int, 1, num_examples, "batch_size", 1.0)
    return _solve(ladder, lambda size: make_event(int(size)), target, delta, accountant, neighbouring)


def calibrate_snip(
    delta: float,
    *,
    own: float | None = None,
    total: float | None = None,
    share: float | None = None,
    rate: float | None = None,
    accountant: Accountant = "pld",
    neighbouring: Neighbouring = "add-remove",
) -> Calibrated:
    """DP-SNIP's noise: it alone would cost `own`, or the share `share` of `total`. Charge `snip_event` of it with the rest."""
    if own is None:
        if total is None or share is None:
            raise UsageError(
                "DP-SNIP's noise follows from its own epsilon, or from a total epsilon and a share of it; give one or both."
            )
        require(
            0 < share < 1,
            "snip_share",
            share,
            "it is a part of the total, between 0 and 1",
            "0.1 costs training almost nothing",
        )
        own = share * total
    return calibrate_noise(lambda noise: snip_event(noise, rate), own, delta, accountant, neighbouring)


def steps_left(
    ledger: Ledger,
    event: dp.DpEvent,
    target: float,
    delta: float,
    accountant: Accountant = "pld",
    neighbouring: Neighbouring = "add-remove",
) -> int:
    """How many more of this event the target allows after what the ledger holds; 0 when not even one."""
    try:
        return int(calibrate_steps(lambda n: ledger.append("next", event, n), target, delta, accountant, neighbouring).value)
    except Unreachable:
        return 0


class Unreachable(UsageError):
    """Even the most private setting costs more than the target."""


# --- The search -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ladder:
    """The allowed settings by place: whole numbers along which epsilon grows, from the most private."""

    value: Callable[[int], float]
    place: Callable[[float], int]
    low: int
    high: int
    noun: str
    power: float
    """Epsilon is about the setting to this power."""
    close: float = 0.0
    """Stop this part below the target; 0: only at the last place that fits."""


def _noise_at(place: int) -> float:
    """Noise multipliers with five significant digits; more noise, lower place."""
    decade, mantissa = divmod(-place, 90_000)
    return float(f"{10_000 + mantissa}e{decade - 4}")


def _noise_place(noise: float) -> int:
    decade = math.floor(math.log10(noise))
    return -(decade * 90_000 + math.ceil(noise / 10.0 ** (decade - 4) - 1e-6) - 10_000)


def _solve(
    ladder: _Ladder,
    make_event: Callable[[float], Event],
    target: float,
    delta: float,
    accountant: Accountant,
    neighbouring: Neighbouring,
) -> Calibrated:
    """Three searches, each starting where the one before ended: by a formula, on a coarse grid, by the accountant itself."""
    check_delta(delta)
    require(0 < target < math.inf, "epsilon", target, "a target must be finite and above zero", "1 to 8 are common")

    def exact(x: float) -> float:
        return epsilon(make_event(x), delta, accountant, neighbouring).epsilon

    def rough(x: float) -> float:
        return _rough(make_event(x), delta, neighbouring) or exact(x)

    def formula(x: float) -> float:
        parts = parts_of(make_event(x))
        return math.inf if dp.NonPrivateDpEvent() in parts else spread(parts, neighbouring)

    middle = ladder.place(math.sqrt(ladder.value(ladder.low) * ladder.value(ladder.high)))
    place = _last(ladder, formula, gaussian_mu(target, delta), middle)
    if accountant == "pld":
        place = _last(ladder, rough, target, place)
    place = _last(ladder, exact, target, place)
    if place < ladder.low:
        least = exact(ladder.value(ladder.low))
        raise Unreachable(
            f"epsilon is {target:g}, but even {ladder.noun} {ladder.value(ladder.low):g} costs {least:.4g} at delta {delta:g}; "
            "raise epsilon, or spend less on the rest."
        )
    value = ladder.value(place)
    return Calibrated(value, epsilon(make_event(value), delta, accountant, neighbouring))


def _rough(event: Event, delta: float, neighbouring: Neighbouring) -> float | None:
    """Epsilon on a grid four times as coarse: fast, still above the truth. None where it would not serve."""
    parts = parts_of(event)
    allowed = delta - rounding(parts)
    if (
        not parts
        or has_search(parts)
        or dp.NonPrivateDpEvent() in parts
        or allowed < delta / 2
        or spread(parts, neighbouring) > 100
    ):
        return None
    grid = 4 * first_grid(parts, neighbouring)
    return float(loss_distribution(parts, neighbouring, grid).get_epsilon_for_delta(allowed))


def _last(ladder: _Ladder, cost: Callable[[float], float], target: float, start: int) -> int:
    """The last place whose cost is at most `target`, or one near it if `close`; below `low` when there is none.

    Secant steps on logarithms inside a bracket; a step that stays on one side is lengthened, and late ones bisect.
    """
    fits, fails = ladder.low - 1, ladder.high + 1
    place = min(max(start, ladder.low), ladder.high)
    same_side, before = 0, None
    for turn in range(200):
        at, spent = ladder.value(place), cost(ladder.value(place))
        same_side = same_side + 1 if before is not None and (before[1] <= target) == (spent <= target) else 0
        if spent <= target:
            fits = place
            if spent >= target * (1 - ladder.close) and ladder.close > 0:
                return fits
        else:
            fails = place
        if fails - fits <= 1:
            return fits
        if turn > 12:
            place = (fits + fails) // 2
        else:
            aim = ladder.place(at * _ratio(ladder.power, at, spent, before, target))
            aim += (2**same_side - 1) * (1 if spent <= target else -1)
            place = min(max(aim, fits + 1), fails - 1)
        before = (at, spent)
    raise AssertionError("the search did not end")


def _ratio(power: float, at: float, spent: float, before: tuple[float, float] | None, target: float) -> float:
    """By what to multiply the setting so that the cost meets the target."""
    spent = min(max(spent, target / 1e3), target * 1e3)
    if before is not None and before[0] != at and 0 < before[1] < math.inf and before[1] != spent:
        slope = math.log(spent / before[1]) / math.log(at / before[0])
        if 0.1 < slope / power < 10:
            power = slope
    return min(max(math.exp(math.log(target / spent) / power), 1e-3), 1e3)
