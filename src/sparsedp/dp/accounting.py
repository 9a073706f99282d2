"""What the events of a ledger cost together: epsilon at a delta.

The arithmetic is Google's `dp_accounting`. What is decided here is what may be claimed: everything is composed jointly at
one delta, in both directions of neighbouring, on a grid that only ever rounds towards more epsilon, with an allowance for
the rounding of the Fourier transform, and never with an accountant that is known to be wrong for the event.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import dp_accounting as dp
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution, from_gaussian_mechanism
from dp_accounting.rdp import RdpAccountant

from sparsedp.dp.ledger import Entry, Ledger, free_event, snip_event, training_event
from sparsedp.dp.parts import Parts, has_search, is_search, named_parts, parts_of
from sparsedp.errors import UsageError, one_of, require

__all__ = [
    "ACCOUNTANTS", "NEIGHBOURING", "SMALLEST_DELTA", "Accountant", "Entry", "Ledger", "Neighbouring", "Parts", "Spent", "check_delta",
    "epsilon", "first_grid", "free_event", "has_search", "loss_distribution", "parts_of", "renyi", "rounding", "snip_event", "spread",
    "training_event",
]  # fmt: skip

Accountant = Literal["pld", "rdp", "paper"]
Neighbouring = Literal["add-remove", "replace-one"]
ACCOUNTANTS = ("pld", "rdp", "paper")
NEIGHBOURING = {
    "add-remove": "one unit's data are added, taken away or made empty (add/remove; zero-out gives the same numbers and makes N public)",
    "replace-one": "one unit's data are replaced by any other data (replace-one)",
}
SMALLEST_DELTA = 1e-14
"""Below this, what is left of delta is the truncated tails of the privacy loss distribution."""

_RELATIONS = {
    "add-remove": dp.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace-one": dp.NeighboringRelation.REPLACE_ONE,
}
_ENOUGH = 1e-3
"""A grid is fine enough when one twice as coarse gives an epsilon larger by at most this part."""
_REFINEMENTS = 3
_WIDEST = 1000.0
"""The widest joint privacy loss, in standard deviations of it, that a grid is tried on: epsilons of many thousands."""


@dataclass(frozen=True)
class Spent:
    """A proved pair (epsilon, delta), and how it was proved."""

    epsilon: float
    delta: float
    """What is proved; under `paper` the sum of the parts' deltas."""
    accountant: Accountant
    neighbouring: Neighbouring
    method: str
    """In words, for the privacy statement."""
    grid: float | None = None
    """Interval of the privacy losses, for `pld`."""
    slack: float = 0.0
    """How much of epsilon the grid may have added: what one twice as coarse adds to it."""
    warnings: tuple[str, ...] = ()


def check_delta(delta: float) -> float:
    """`delta`, if an accountant can answer for it."""
    require(SMALLEST_DELTA <= delta < 1, "delta", delta, "it must lie in [1e-14, 1)", "1e-5 is usual; below 1/N is right")
    return delta


def epsilon(
    spent: dp.DpEvent | Ledger,
    delta: float,
    accountant: Accountant = "pld",
    neighbouring: Neighbouring = "add-remove",
    num_examples: int | None = None,
) -> Spent:
    """The epsilon of all events together at `delta`. Infinite when an event has no noise.

    pld: privacy loss distributions, tight; rdp if a search is among the events. rdp: Renyi differential privacy, looser. paper:
    each part by rdp at the full delta, and summed, which proves only the sum of the deltas.

    Guarantee: the pair (epsilon, delta) of the result is an upper bound; every approximation errs towards more epsilon.
    """
    one_of("accountant", accountant, ACCOUNTANTS)
    one_of("neighbouring", neighbouring, tuple(NEIGHBOURING))
    check_delta(delta)
    require(
        num_examples is None or num_examples >= 1, "num_examples", num_examples, "there must be at least one", "state how many"
    )
    parts = named_parts(spent) if accountant == "paper" else parts_of(spent)
    found = _METHODS[accountant](parts, delta, neighbouring)
    if num_examples is not None and found.delta >= 1 / num_examples:
        note = (
            f"delta {found.delta:g} is not below 1/N = {1 / num_examples:.2g}: releasing one record outright would satisfy it"
        )
        return Spent(**{**found.__dict__, "warnings": (*found.warnings, note)})
    return found


# --- Privacy loss distributions ---------------------------------------------------------------------------------------


def loss_distribution(parts: Parts, neighbouring: Neighbouring, grid: float) -> PrivacyLossDistribution:
    """The joint privacy loss of all parts on one grid, in both directions, rounded to the private side."""
    return functools.reduce(
        lambda whole, part: whole.compose(part),
        (_composed(event, count, neighbouring, grid) for event, count in parts.items()),
    )


def _composed(event: dp.DpEvent, count: int, neighbouring: Neighbouring, grid: float) -> PrivacyLossDistribution:
    rate, sigma = rate_and_noise(event)
    single = from_gaussian_mechanism(
        sigma,
        pessimistic_estimate=True,
        value_discretization_interval=grid,
        sampling_prob=rate,
        neighboring_relation=_RELATIONS[neighbouring],
    )
    # The library raises the size of a sparse distribution to the power `count`, as a whole number with millions of digits.
    # Mixing it with itself makes it dense and leaves every probability as it was.
    return single if count == 1 else single.compute_mixture(single, 0.5).self_compose(count)


def spread(parts: Parts, neighbouring: Neighbouring = "add-remove") -> float:
    """About the standard deviation of the joint privacy loss: the mu of the Gaussian mechanism that resembles it."""
    scale = 1.0 if neighbouring == "add-remove" else 2.0
    inner = [(part, count * times) for event, times in parts.items() for part, count in _trial_of(event).items()]
    return math.sqrt(sum(count * _step(event, scale)[0] for event, count in inner))


def _trial_of(event: dp.DpEvent) -> Parts:
    """Of a search the parts of one trial: a first guess at what it costs. Anything else is its own part."""
    return parts_of(event.event) if is_search(event) else {event: 1}


def first_grid(parts: Parts, neighbouring: Neighbouring) -> float:
    """A power of two, so that grids nest: fine beside the joint spread, not too fine beside the widest single step."""
    scale = 1.0 if neighbouring == "add-remove" else 2.0
    root = math.sqrt(max(parts.values()))
    points = 2.0**13 if rounding(parts) == 0 else max(16 * root, min(2.0**13, 192 * root))
    fine = spread(parts, neighbouring) / points
    coarse = max(_step(event, scale)[1] for event in parts) / 2.0**15
    return float(2.0 ** round(math.log2(max(fine, coarse, 2.0**-40))))


def _step(event: dp.DpEvent, scale: float) -> tuple[float, float]:
    """(about the variance, about the range) of one step's privacy loss."""
    rate, sigma = rate_and_noise(event)
    mu = scale / sigma
    square = mu**2 + mu**4 / 4
    variance = square if rate == 1.0 else min(rate**2 * math.expm1(min(mu**2, 100.0)), rate * square)
    return variance, mu**2 / 2 + 10 * mu


def rate_and_noise(event: dp.DpEvent) -> tuple[float, float]:
    """(sampling probability, noise multiplier) of a primitive event."""
    rate, inner = (event.sampling_probability, event.event) if isinstance(event, dp.PoissonSampledDpEvent) else (1.0, event)
    if not isinstance(inner, dp.GaussianDpEvent):
        raise UsageError(f"accountant 'pld' does not know the event {event}; use accountant 'rdp' for it.")
    return float(rate), float(inner.noise_multiplier)


def rounding(parts: Parts) -> float:
    """The part of delta that the Fourier transform's rounding may take up.

    Raising a spectrum to the power T multiplies the relative error of a float64, 1.1e-16, by up to T. Measured against the
    closed form for T from 10 to a million, the error of delta stayed below a quarter of this (docs/accounting.md).
    """
    if all(isinstance(event, dp.GaussianDpEvent) for event in parts):
        return 0.0
    return (100 + sum(parts.values())) * 2.0**-52


def _by_pld(parts: Parts, delta: float, neighbouring: Neighbouring) -> Spent:
    if has_search(parts) and dp.NonPrivateDpEvent() not in parts:
        return _by_rdp(parts, delta, neighbouring)
    shortcut = _without_grid(parts, delta, neighbouring)
    if shortcut is not None:
        return shortcut
    allowed = delta - rounding(parts)
    grid = first_grid(parts, neighbouring)
    coarse, fine = (loss_distribution(parts, neighbouring, g).get_epsilon_for_delta(allowed) for g in (2 * grid, grid))
    for _ in range(_REFINEMENTS):
        if fine < math.inf and coarse - fine <= max(_ENOUGH * fine, 3e-5):
            break
        grid, coarse = grid / 2, fine
        fine = loss_distribution(parts, neighbouring, grid).get_epsilon_for_delta(allowed)
    slack = abs(float(coarse - fine)) if coarse < math.inf else 0.0
    words = f"privacy loss distributions (dp_accounting), joint, both directions, pessimistic, grid 2^{round(math.log2(grid))}"
    return Spent(float(fine), delta, "pld", neighbouring, words, grid, slack)


def _without_grid(parts: Parts, delta: float, neighbouring: Neighbouring) -> Spent | None:
    """The cases in which no grid serves: nothing spent, no noise, a loss too wide for one, a delta too small for one."""

    def answer(value: float, words: str) -> Spent:
        return Spent(value, delta, "pld", neighbouring, words)

    if not parts:
        return answer(0.0, "nothing private was read")
    if dp.NonPrivateDpEvent() in parts:
        return answer(math.inf, "a release without noise has no finite epsilon")
    if spread(parts, neighbouring) > _WIDEST:
        return answer(
            _concentrated(parts, delta, neighbouring), "concentrated differential privacy, without amplification by sampling"
        )
    if delta - rounding(parts) >= delta / 2:
        return None
    require(
        neighbouring == "add-remove", "delta", delta,
        f"under replace-one the rounding of {sum(parts.values())} composed steps reaches it", "raise it to 1e-9 or more",
    )  # fmt: skip
    return answer(
        _renyi(parts, delta), "Renyi differential privacy (dp_accounting), since the grid's rounding reaches this delta"
    )


def _concentrated(parts: Parts, delta: float, neighbouring: Neighbouring) -> float:
    """Sampling can only help, so the unsampled Gaussians bound it: rho-zCDP with rho = mu^2 / 2 (Bun and Steinke 2016)."""
    rho = unsampled_mu(parts, neighbouring) ** 2 / 2
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


def unsampled_mu(parts: Parts, neighbouring: Neighbouring) -> float:
    """The mu of the one Gaussian mechanism that all parts would be together if every unit took part in each."""
    scale = 1.0 if neighbouring == "add-remove" else 2.0
    return math.sqrt(sum(count * (scale / rate_and_noise(event)[1]) ** 2 for event, count in parts.items()))


# --- Renyi differential privacy -----------------------------------------------------------------------------------------


def renyi(parts: Parts) -> RdpAccountant:
    """The library's accountant with all parts in it."""
    accountant = RdpAccountant(neighboring_relation=_RELATIONS["add-remove"])
    for event, count in parts.items():
        accountant.compose(event, count)
    return accountant


def _renyi(parts: Parts, delta: float) -> float:
    """Infinite where the library has left out every order: it answers 0 then."""
    accountant = renyi(parts)
    epsilon, order = accountant.get_epsilon_and_optimal_order(delta)
    return float(epsilon) if not parts or any(map(math.isfinite, accountant._rdp)) else math.inf


def _refuse_replacement(accountant: Accountant, neighbouring: Neighbouring) -> None:
    require(
        neighbouring == "add-remove", "neighbouring", neighbouring,
        f"accountant {accountant!r} does not double the sensitivity of a Gaussian event there, and would claim too little",
        "use accountant 'pld', or neighbouring 'add-remove'",
    )  # fmt: skip


def _by_rdp(parts: Parts, delta: float, neighbouring: Neighbouring) -> Spent:
    _refuse_replacement("rdp", neighbouring)
    return Spent(_renyi(parts, delta), delta, "rdp", neighbouring, "Renyi differential privacy (dp_accounting), joint")


def _by_paper(parts: Parts, delta: float, neighbouring: Neighbouring) -> Spent:
    _refuse_replacement("paper", neighbouring)
    total = sum(count * _renyi(parts_of(part), delta) for part, count in parts.items())
    several = sum(parts.values())
    proved = min(1.0, delta * max(1, several))
    words = f"the paper's rule: Renyi differential privacy of each part at delta {delta:g}, summed"
    if several > 1:
        words += f"; {several} parts prove only delta {proved:g}"
    return Spent(total, proved, "paper", neighbouring, words)


_METHODS = {"pld": _by_pld, "rdp": _by_rdp, "paper": _by_paper}
