"""How a run looks on a terminal: step, time left, epsilon spent of its target, throughput. Silent where nobody watches."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from sparsedp.config import Run
from sparsedp.dp.accounting import epsilon
from sparsedp.dp.ledger import Ledger
from sparsedp.evaluation import Metrics
from sparsedp.outputs import number
from sparsedp.planning import Budget

POINTS = 8  # how often on the way epsilon is computed for the display; between them the next one is shown


class TerminalReporter:
    """A `training.Reporter` on a rich console. Throughput is of expected batches, never of realised ones."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._curve: list[tuple[int, float]] = []
        self._began, self._at, self._plan = 0.0, 0, None

    def start(self, run: Run, plan: Budget, steps_done: int) -> None:
        m = run.mechanism
        self._plan: Budget | None = plan
        self._console.print(
            f"[bold]{run.model.name}[/] on [bold]{run.data.name}[/]: {plan.steps} steps of {plan.batch_size} of {plan.num_units}, "
            f"noise multiplier {plan.noise_multiplier:.4g}, epsilon {number(plan.spent.epsilon)} at delta {m.delta:g} "
            f"({plan.spent.accountant}, {plan.spent.neighbouring})"
        )
        self._curve = curve(plan, m.accountant, m.neighbouring, m.delta)
        self._bar = Progress(
            TextColumn("step {task.completed}/{task.total}"), BarColumn(bar_width=None), TimeRemainingColumn(),
            TextColumn("{task.fields[spent]}"), TextColumn("{task.fields[speed]}"), console=self._console, transient=False,
        )  # fmt: skip
        self._task = self._bar.add_task(
            "train", total=plan.steps, completed=steps_done, spent=self._spent(steps_done), speed=""
        )
        self._began, self._at = time.monotonic(), steps_done
        self._bar.start()

    def note(self, text: str) -> None:
        self._console.print(f"[dim]{text}[/]", highlight=False)

    def step(self, taken: int) -> None:
        if self._bar is None or self._plan is None:
            return
        speed = (taken - self._at) * self._plan.batch_size / max(time.monotonic() - self._began, 1e-9)
        self._bar.update(self._task, completed=taken, spent=self._spent(taken), speed=f"{speed:.0f}/s")

    def _spent(self, taken: int) -> str:
        assert self._plan is not None
        target = self._plan.target or self._plan.spent.epsilon
        return f"epsilon <= {number(self.spent_at(taken))} of {number(target)}" if taken else ""

    def spent_at(self, taken: int) -> float | None:
        """Epsilon after so many steps, rounded up to the next point of the curve."""
        place = bisect_left(self._curve, (taken, 0.0))
        return self._curve[min(place, len(self._curve) - 1)][1] if self._curve else None

    def evaluated(self, taken: int, results: Mapping[str, Metrics]) -> None:
        words = ", ".join(f"{name} {100 * r.accuracy:.2f} %" for name, r in results.items() if r.accuracy is not None)
        if words:
            self._console.print(f"step {taken}: accuracy {words}")

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def curve(plan: Budget, accountant: str, neighbouring: str, delta: float) -> list[tuple[int, float]]:
    """Epsilon after some numbers of steps, ascending."""
    *before, last = plan.at_end.entries
    points = sorted({max(1, round(plan.steps * (i + 1) / POINTS)) for i in range(POINTS)})
    return [
        (steps, plan.spent.epsilon if steps == plan.steps else epsilon(
            Ledger((*before,)).append(last.what, last.event, steps), delta, accountant, neighbouring).epsilon)  # type: ignore[arg-type]
        for steps in points
    ]  # fmt: skip
