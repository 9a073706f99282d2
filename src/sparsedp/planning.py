"""From a run's settings to its numbers, before any data is touched: noise, steps, and the ledger at its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dp_accounting import DpEvent, NonPrivateDpEvent

from sparsedp.config import Mechanism, Run, Sparsity
from sparsedp.dp.accounting import Spent, epsilon, parts_of
from sparsedp.dp.calibration import calibrate_noise, calibrate_snip, calibrate_steps
from sparsedp.dp.ledger import Ledger, free_event, gaussian_event, snip_event
from sparsedp.errors import BudgetError, require


@dataclass(frozen=True)
class Budget:
    """The numbers of a run: its noise, its length, and what will be in the ledger when it ends."""

    num_units: int
    batch_size: int
    steps: int
    noise_multiplier: float
    snip_noise_multiplier: float | None
    at_end: Ledger
    spent: Spent
    target: float | None

    @property
    def sampling_rate(self) -> float:
        return self.batch_size / self.num_units


FREE = {
    "random": "random pre-pruning reads no data",
    "synflow": "SynFlow reads no data",
    "file": "a mask from a file",
}


def alone(ledger: Ledger) -> Ledger:
    """What a run costs that is part of nothing larger."""
    return ledger


def budget(run: Run, num_units: int, before: Ledger | None = None, whole: Callable[[Ledger], Ledger] = alone) -> Budget:
    """Solve for whichever of epsilon, noise multiplier and steps was left out; refuse what would pass the target.

    `before` is what was spent already, when that is not the run's own pre-pruning. `whole` makes of the run's ledger that of
    which the target speaks, and `spent` tells: a search's, whose trials the run is one of.
    """
    m, s = run.mechanism, run.sparsity
    require(m.batch_size <= num_units, "batch_size", m.batch_size, f"there are {num_units} privacy units", "lower it")
    size = snip_batch(s, num_units)
    require(
        size <= num_units, "snip_batch_size", size, f"there are {num_units} privacy units", "lower it, or leave it out for all"
    )
    snip_sigma = _snip_noise(m, s, num_units)
    before = before or _before_training(s, num_units, snip_sigma)
    if not m.private:
        steps = m.steps or 0
        at_end = before.append("train", NonPrivateDpEvent(), max(steps, 1))
        return Budget(num_units, m.batch_size, steps, 0.0, snip_sigma, at_end, epsilon(at_end, m.delta), None)
    require(
        m.epsilon is None or NonPrivateDpEvent() not in parts_of(before), "epsilon", m.epsilon,
        "the weights are pruned without noise, for which there is no epsilon", "use --mechanism.no-private, or leave the target out and give "
        "noise_multiplier and steps",
    )  # fmt: skip
    sigma, steps = _solve(m, m.batch_size / num_units, before, whole)
    at_end = _then(before, m.batch_size / num_units, sigma, steps)
    spent = epsilon(whole(at_end), m.delta, m.accountant, m.neighbouring, num_units)
    if m.epsilon is not None and spent.epsilon > m.epsilon:
        raise BudgetError(
            f"epsilon {m.epsilon} would be passed: {steps} steps at noise multiplier {sigma:g} spend {spent.epsilon:.4f}; "
            "leave out one of epsilon, noise_multiplier and steps to have it solved for."
        )
    return Budget(num_units, m.batch_size, steps, sigma, snip_sigma, at_end, spent, m.epsilon)


def ledger_at_end(run: Run, num_units: int, before: Ledger | None = None) -> Ledger:
    """Of a run whose noise and steps are given, what will be in its ledger when it ends."""
    m = run.mechanism
    assert m.noise_multiplier is not None and m.steps is not None
    before = before or _before_training(run.sparsity, num_units, _snip_noise(m, run.sparsity, num_units))
    return _then(before, m.batch_size / num_units, m.noise_multiplier, m.steps)


def _solve(m: Mechanism, rate: float, before: Ledger, whole: Callable[[Ledger], Ledger]) -> tuple[float, int]:
    options = (m.delta, m.accountant, m.neighbouring)

    def cost(sigma: float, steps: int) -> Ledger:
        return whole(_then(before, rate, sigma, steps))

    if m.noise_multiplier is None:
        assert m.epsilon is not None and m.steps is not None
        steps = m.steps
        return calibrate_noise(lambda sigma: cost(sigma, steps), m.epsilon, *options).value, steps
    sigma = m.noise_multiplier
    if m.steps is None:
        assert m.epsilon is not None
        return sigma, int(calibrate_steps(lambda steps: cost(sigma, steps), m.epsilon, *options).value)
    return sigma, m.steps


def _then(before: Ledger, rate: float, sigma: float, steps: int) -> Ledger:
    return before.append("train", gaussian_event(rate, sigma), steps)


def _snip_noise(m: Mechanism, s: Sparsity, num_units: int) -> float | None:
    if s.prune != "dp-snip" or s.mask_file is not None:
        return None
    if s.snip_noise_multiplier is not None:
        return s.snip_noise_multiplier
    require(
        s.snip_share is None or m.epsilon is not None,
        "snip_share",
        s.snip_share,
        "a share needs a total",
        "give epsilon, or snip_epsilon instead",
    )
    return calibrate_snip(
        m.delta, own=s.snip_epsilon, total=m.epsilon, share=s.snip_share, rate=snip_batch(s, num_units) / num_units,
        accountant=m.accountant, neighbouring=m.neighbouring,
    ).value  # fmt: skip


def snip_batch(s: Sparsity, num_units: int) -> int:
    """How many units DP-SNIP's release expects: all of them, unless a batch was asked for."""
    return num_units if s.snip_batch_size is None else s.snip_batch_size


def pruning_event(s: Sparsity, num_units: int, snip_sigma: float | None) -> tuple[str, DpEvent] | None:
    """What pre-pruning will write in the ledger; None if there is none."""
    if s.mask_file is not None:
        return FREE["file"], free_event(FREE["file"])
    if s.prune == "dp-snip":
        assert snip_sigma is not None
        return "dp-snip", snip_event(snip_sigma, snip_batch(s, num_units) / num_units)
    if s.prune == "snip-not-private":
        return "SNIP, not private", NonPrivateDpEvent()
    if s.prune == "none":
        return None
    return FREE[s.prune], free_event(FREE[s.prune])


def _before_training(s: Sparsity, num_units: int, snip_sigma: float | None) -> Ledger:
    event = pruning_event(s, num_units, snip_sigma)
    return Ledger() if event is None else Ledger().append(*event)
