"""The verb `account`: of batch size, noise, steps and epsilon, the one left out is solved for. Reads no data, needs no torch."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparsedp.dp.accounting import (
    ACCOUNTANTS,
    NEIGHBOURING,
    Accountant,
    Ledger,
    Neighbouring,
    Spent,
    check_delta,
    snip_event,
    training_event,
)
from sparsedp.dp.accounting import epsilon as cost
from sparsedp.dp.calibration import MOST_STEPS, calibrate_batch_size, calibrate_noise, calibrate_steps
from sparsedp.errors import UsageError, missing_extra, one_of, require

_POINTS = 16


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A complete setting and what it costs."""

    num_examples: int
    batch_size: float
    noise_multiplier: float
    steps: int
    prune_noise_multiplier: float | None
    solved: str
    """The name of what was solved for: epsilon, noise_multiplier, steps or batch_size."""
    target: float | None
    """The epsilon asked for; none when it was what was solved for."""
    spent: Spent
    others: tuple[Spent, ...]
    """The same events by another accountant and under the other neighbouring relation, where these exist."""

    @property
    def ledger(self) -> Ledger:
        """The events of this setting."""
        return _ledger(self.num_examples, self.batch_size, self.noise_multiplier, self.steps, self.prune_noise_multiplier)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader of the numbers must know."""
        capped = self.solved == "steps" and self.steps == MOST_STEPS
        return (*self.spent.warnings, *([f"no more than {MOST_STEPS:,} steps are considered"] if capped else []))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; an infinite epsilon is null."""
        return {
            "num_examples": self.num_examples,
            "batch_size": self.batch_size,
            "sampling_rate": self.batch_size / self.num_examples,
            "noise_multiplier": self.noise_multiplier,
            "steps": self.steps,
            "prune_noise_multiplier": self.prune_noise_multiplier,
            "solved_for": self.solved,
            "target_epsilon": self.target,
            **_plain(self.spent),
            "others": [_plain(spent) for spent in self.others],
            "warnings": list(self.warnings),
            "events": self.ledger.to_json(),
        }

    def text(self) -> str:
        """For people."""
        rows = [
            ("examples", f"{self.num_examples:,}"),
            ("batch size", f"{self.batch_size:,g} expected (Poisson sampling, rate {self.batch_size / self.num_examples:.6g})"),
            ("noise multiplier", f"{self.noise_multiplier:g}"),
            ("steps", f"{self.steps:,}"),
        ]
        if self.prune_noise_multiplier is not None:
            rows.append(("DP-SNIP", f"one release over the whole data set, noise multiplier {self.prune_noise_multiplier:g}"))
        marked = [(name, value + ("   <- solved for" if name.replace(" ", "_") == self.solved else "")) for name, value in rows]
        lines = [f"{name:<18}{value}" for name, value in marked]
        target = "" if self.target is None else f" (target {self.target:g})"
        lines += [
            "",
            f"epsilon {_number(self.spent.epsilon)} at delta {self.spent.delta:g}{target}",
            f"  by {self.spent.method}",
        ]
        if self.spent.slack > 0:
            lines.append(f"  the grid may have added up to {self.spent.slack:.1e}")
        lines.append(f"  neighbouring: {NEIGHBOURING[self.spent.neighbouring]}")
        lines += [f"  {s.accountant}, {s.neighbouring}: {_number(s.epsilon)} at delta {s.delta:g}" for s in self.others]
        return "\n".join([*lines, *(f"warning: {note}" for note in self.warnings)])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The accountant logs the Renyi orders that it leaves out; leaving one out only raises epsilon, so nobody need know."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@_quiet()
def solve(
    num_examples: int,
    batch_size: float | None = None,
    noise_multiplier: float | None = None,
    steps: int | None = None,
    epsilon: float | None = None,
    delta: float = 1e-5,
    accountant: Accountant = "pld",
    neighbouring: Neighbouring = "add-remove",
    prune_noise_multiplier: float | None = None,
) -> Answer:
    """Of batch_size, noise_multiplier, steps and epsilon give three; the fourth is found, rounded to the private side."""
    setting = {"batch_size": batch_size, "noise_multiplier": noise_multiplier, "steps": steps, "epsilon": epsilon}
    _check(num_examples, setting, delta, prune_noise_multiplier)
    one_of("accountant", accountant, ACCOUNTANTS)
    one_of("neighbouring", neighbouring, tuple(NEIGHBOURING))
    missing = [name for name, value in setting.items() if value is None]
    if len(missing) != 1:
        got = "all four are given" if not missing else f"{', '.join(missing)} are left out"
        raise UsageError(
            f"Of batch_size, noise_multiplier, steps and epsilon exactly one is solved for, but {got}; give three of them."
        )
    if missing != ["epsilon"]:
        setting[missing[0]] = _found(missing[0], num_examples, setting, delta, accountant, neighbouring, prune_noise_multiplier)
    return _answer(num_examples, setting, missing[0], epsilon, delta, accountant, neighbouring, prune_noise_multiplier)


def _found(
    missing: str,
    num_examples: int,
    setting: dict[str, float | None],
    delta: float,
    accountant: Accountant,
    neighbouring: Neighbouring,
    prune_noise: float | None,
) -> float:
    def event(value: float) -> Ledger:
        full = {**setting, missing: value}
        return _ledger(num_examples, full["batch_size"], full["noise_multiplier"], full["steps"], prune_noise)

    how = (setting["epsilon"], delta, accountant, neighbouring)
    if missing == "noise_multiplier":
        return calibrate_noise(event, *how).value
    if missing == "steps":
        return int(calibrate_steps(event, *how).value)
    return int(calibrate_batch_size(event, num_examples, *how).value)


def _answer(
    num_examples: int,
    setting: dict[str, Any],
    solved: str,
    target: float | None,
    delta: float,
    accountant: Accountant,
    neighbouring: Neighbouring,
    prune_noise: float | None,
) -> Answer:
    ledger = _ledger(num_examples, setting["batch_size"], setting["noise_multiplier"], setting["steps"], prune_noise)
    pairs: list[tuple[Accountant, Neighbouring]] = [("pld", "add-remove"), ("rdp", "add-remove"), ("pld", "replace-one")]
    return Answer(
        num_examples=num_examples,
        batch_size=setting["batch_size"],
        noise_multiplier=setting["noise_multiplier"],
        steps=int(setting["steps"]),
        prune_noise_multiplier=prune_noise,
        solved=solved,
        target=target,
        spent=cost(ledger, delta, accountant, neighbouring, num_examples),
        others=tuple(
            spent for pair in pairs if pair != (accountant, neighbouring) for spent in _where_it_exists(ledger, delta, *pair)
        ),
    )


def _where_it_exists(ledger: Ledger, delta: float, accountant: Accountant, neighbouring: Neighbouring) -> tuple[Spent, ...]:
    try:
        return (cost(ledger, delta, accountant, neighbouring),)
    except UsageError:
        return ()


def _ledger(num_examples: int, batch_size: float, noise: float, steps: float, prune_noise: float | None) -> Ledger:
    ledger = Ledger() if prune_noise is None else Ledger().append("DP-SNIP", snip_event(prune_noise))
    return ledger.append("training step", training_event(batch_size / num_examples, noise), int(steps))


def _check(num_examples: int, setting: dict[str, float | None], delta: float, prune_noise: float | None) -> None:
    _whole("num_examples", num_examples)
    check_delta(delta)
    batch, noise, steps, target = (setting[name] for name in ("batch_size", "noise_multiplier", "steps", "epsilon"))
    if batch is not None:
        _finite("batch_size", batch, above=0)
        require(batch <= num_examples, "batch_size", batch, f"it cannot exceed num_examples, {num_examples}", "lower it")
    if steps is not None:
        _whole("steps", steps)
    if noise is not None:
        _finite("noise_multiplier", noise)
    if target is not None:
        _finite("epsilon", target, above=0)
    if prune_noise is not None:
        _finite("prune_noise_multiplier", prune_noise)


def _finite(name: str, value: float, above: float | None = None) -> None:
    ok = isinstance(value, int | float) and math.isfinite(value) and (value >= 0 if above is None else value > above)
    rule = "it must be finite and not negative" if above is None else f"it must be finite and above {above:g}"
    require(ok, name, value, rule, "correct it, or leave it out to have it solved for")


def _whole(name: str, value: float) -> None:
    require(isinstance(value, int) and value >= 1, name, value, "it must be a whole number from 1", "correct it")


def _number(epsilon: float) -> str:
    """Rounded up, so that what is read is proved too."""
    if not math.isfinite(epsilon):
        return "infinite"
    digits = 4 if epsilon < 1e4 else 0
    return f"{math.ceil(epsilon * 10**digits) / 10**digits:.{digits}f}"


def _plain(spent: Spent) -> dict[str, Any]:
    row = asdict(spent)
    row["warnings"] = list(spent.warnings)
    return {**row, "epsilon": spent.epsilon if math.isfinite(spent.epsilon) else None}


@_quiet()
def plot(answer: Answer, path: str | Path) -> Path:
    """Epsilon against steps, up to the answer's; the format follows from the suffix (png, svg, pdf)."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("matplotlib", "plots", "A plot of epsilon against steps") from error
    if not math.isfinite(answer.spent.epsilon):
        raise UsageError("Epsilon is infinite without noise, so there is no curve to draw; give a noise_multiplier above 0.")
    steps, curve = _curve(answer)
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, curve, marker=".")
    if answer.target is not None:
        axes.axhline(answer.target, linestyle="--", color="grey", label=f"target {answer.target:g}")
        axes.legend()
    axes.set(
        xlabel="steps", ylabel="epsilon", ylim=(0, None), title=f"delta {answer.spent.delta:g}, {answer.spent.neighbouring}"
    )
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"The plot cannot be written to {str(path)!r}: {error}; choose a folder that exists and png, svg or pdf."
        ) from error
    return Path(path)


def _curve(answer: Answer) -> tuple[list[int], list[float]]:
    steps = sorted({max(1, round(answer.steps * k / _POINTS)) for k in range(1, _POINTS + 1)})
    spent, rest = answer.spent, (answer.num_examples, answer.batch_size, answer.noise_multiplier)
    # Under `paper`, delta is that of each part, not the sum that is proved.
    delta = spent.delta / (2 if spent.accountant == "paper" and answer.prune_noise_multiplier is not None else 1)
    ledgers = (_ledger(*rest, count, answer.prune_noise_multiplier) for count in steps)
    return steps, [cost(ledger, delta, spent.accountant, spent.neighbouring).epsilon for ledger in ledgers]
