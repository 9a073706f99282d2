"""One run from its configuration to its folder: prepare, prune, train, evaluate, write."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from sparsedp import data, outputs, private_metrics, state, statement
from sparsedp.assembly import Parts, assemble, load_data
from sparsedp.beginning import Begun, autocast, begin
from sparsedp.budget_file import Account, BudgetFile, EnteredAlready, place
from sparsedp.config import Run
from sparsedp.data import DataSet
from sparsedp.dp.clipping import Loss
from sparsedp.dp.ledger import Ledger
from sparsedp.dp.masks import check_maskable, maskable_layers, participating, told_unmasked
from sparsedp.dp.noise import grid_for
from sparsedp.dp.randomness import Key
from sparsedp.engines import NAMES as ENGINES
from sparsedp.engines.care import memory_in_words
from sparsedp.environment import keep_memory
from sparsedp.errors import one_of
from sparsedp.evaluation import Metrics, evaluate
from sparsedp.images import plain_batches
from sparsedp.optim import optimizer_for
from sparsedp.planning import Budget, budget
from sparsedp.private import Private
from sparsedp.prune_run import before_training, prune_for_run
from sparsedp.rundir import RunDir
from sparsedp.state import Learner, Progress


class Reporter(Protocol):
    """Where a run tells how it goes. What it is told is public, but for `note`, which is for the operator's eyes."""

    def start(self, run: Run, plan: Budget, steps_done: int) -> None: ...
    def note(self, text: str) -> None: ...
    def step(self, taken: int) -> None: ...
    def evaluated(self, taken: int, results: Mapping[str, Metrics]) -> None: ...
    def finish(self, summary: Mapping[str, Any]) -> None: ...


class Silence:
    """A reporter that says nothing."""

    def start(self, run: Run, plan: Budget, steps_done: int) -> None: ...
    def note(self, text: str) -> None: ...
    def step(self, taken: int) -> None: ...
    def evaluated(self, taken: int, results: Mapping[str, Metrics]) -> None: ...
    def finish(self, summary: Mapping[str, Any]) -> None: ...


class Stopped(Exception):
    """The run was asked to stop, and did, after writing a checkpoint."""


@dataclass(frozen=True, eq=False)
class Trial:
    """What a run is given that is a trial of a search (`tune`): which data, how they were found, and its numbers. The search
    has entered the cost of all its trials in the data set's budget file."""

    dataset: DataSet
    checked: data.CheckReport
    plan: Budget


@dataclass(frozen=True, eq=False)
class Result:
    """What a finished run leaves. `summary` is what stands in public/summary.json."""

    summary: Mapping[str, Any]
    model: nn.Module
    average: nn.Module | None
    ledger: Ledger
    path: Path


@dataclass(frozen=True, eq=False)
class Setting:
    """All that a run has before its first step."""

    parts: Parts
    folder: RunDir
    plan: Budget
    key: Key
    reporter: Reporter
    data_checksum: str

    @property
    def run(self) -> Run:
        return self.parts.run

    @property
    def dataset(self) -> DataSet:
        return self.parts.dataset

    def note(self, text: str) -> None:
        """Tell the operator, on the screen and in private/."""
        self.reporter.note(text)
        self.folder.note(text)


@memory_in_words()
def train(
    run: Run,
    run_dir: str | Path,
    *,
    loss: Loss | None = None,
    reporter: Reporter | None = None,
    stop: Callable[[], bool] = lambda: False,
    trial: Trial | None = None,
) -> Result:
    """Train as `run` says, into the folder `run_dir`; an unfinished run of the same configuration there is taken up again.

    `loss(output, targets)` returns one number per row; left out, cross entropy, or binary cross entropy over several labels.
    When `stop()` turns true the run writes a checkpoint and raises `Stopped`. `trial` is for `tune` alone.
    """
    setting = prepare(run, Path(run_dir), loss, reporter or Silence(), trial)
    keep_memory()
    account = _account(setting) if trial is None else EnteredAlready()
    try:
        return _carry_out(setting, account, stop)
    finally:
        setting.folder.close()


def _carry_out(setting: Setting, account: Account, stop: Callable[[], bool]) -> Result:
    run = setting.run
    with account:
        pruned = prune_for_run(setting)
        begun = begin(setting, pruned)
        learner, private = begun.learner, begun.private
        setting.reporter.start(run, setting.plan, begun.progress.taken)
        seconds = _loop(setting, begun, stop)
        results = _measure(setting, learner, private)
        account.spent(private.ledger)
        together = account.together()
    summary = outputs.write(setting, learner, private.ledger, results, seconds, pruned, together)
    setting.folder.finish()
    setting.reporter.finish(summary)
    average = None if learner.average is None else learner.average.module
    return Result(summary, setting.parts.model, average, private.ledger, setting.folder.path)


def prepare(run: Run, path: Path, loss: Loss | None, reporter: Reporter, trial: Trial | None = None) -> Setting:
    """Read and check the data, solve the budget, open the folder, build the model. Nothing is spent."""
    dataset = load_data(run) if trial is None else trial.dataset
    plan = budget(run, dataset.train.num_units, before_training(run)) if trial is None else trial.plan
    folder = RunDir.open(path, run)
    try:
        checked = data.check(dataset) if trial is None else trial.checked
        key = folder.key(run.runtime.key)
        parts = assemble(run, dataset, key, loss)
        refuse_early(run, parts.model)
        refuse_grid(run, plan, parts.model)
        if trial is None:
            statement.rehearse(plan, run.mechanism)
    except BaseException:
        folder.discard()
        folder.close()
        raise
    setting = Setting(parts, folder, plan, key, reporter, checked.checksum)
    for line in (*plan.spent.warnings, *checked.sentences(), *parts.notes, *left_whole(run, parts.model)):
        setting.note(line)
    return setting


def refuse_early(run: Run, model: nn.Module) -> None:
    """Names that would only be looked up after pre-pruning has spent something."""
    one_of("runtime.engine", run.runtime.engine, ENGINES)
    optimizer_for(model, run.optim)
    layers = maskable_layers(model, run.sparsity.granularity, run.sparsity.maskable)
    for name in ("prune_rate", "drop_rate"):
        check_maskable(layers, name, getattr(run.sparsity, name))


def refuse_grid(run: Run, plan: Budget, model: nn.Module) -> None:
    """Too many coordinates for training in exact arithmetic, before DP-SNIP has spent something; without it the first step refuses them."""
    s, m = run.sparsity, run.mechanism
    if m.arithmetic == "exact" and plan.snip_noise_multiplier is not None:
        layers = maskable_layers(model, s.granularity, s.maskable)
        every, maskable = (sum(p.numel() for p in participating(model).values()), sum(layer.size for layer in layers))
        kept = (1 - s.drop_rate) * (
            1 - s.prune_rate if s.granularity == "weight" else 1
        )  # by filter, the large ones may be kept
        most = every - maskable + math.ceil(kept * maskable) + sum(layer.size // layer.shape[0] for layer in layers)
        grid_for(plan.noise_multiplier, m.clip, min(every, most))


def left_whole(run: Run, model: nn.Module) -> tuple[str, ...]:
    """A note on weights that look as if they were masked, and are not."""
    s = run.sparsity
    if s.maskable is not None or (s.prune == "none" and s.mask_file is None and s.drop == "none"):
        return ()
    return told_unmasked(model, maskable_layers(model, s.granularity))


def _account(setting: Setting) -> BudgetFile:
    """The run's entry in its data set's budget file."""
    run = setting.run
    where = (place(run.data), setting.dataset.name, setting.folder.name)
    private = outputs.stamp(setting, None) == outputs.PRIVATE
    return BudgetFile(*where, setting.plan, run.mechanism.delta, setting, private)


def _loop(setting: Setting, begun: Begun, stop: Callable[[], bool]) -> float:
    """The training loop. Returns the seconds it took, over all resumptions."""
    began = time.monotonic()
    runtime, learner, private, progress = setting.run.runtime, begun.learner, begun.private, begun.progress
    mode = learner.model.training
    learner.model.train()

    def now() -> Progress:
        return replace(progress, taken=private.taken, seconds=max(0.0, progress.seconds + time.monotonic() - began))

    for batch in private.batches(begun.source):
        with autocast(setting):
            private.backward(batch)
        learner.optimizer.step()
        learner.scheduler.step()
        if learner.average is not None:
            learner.average.update_parameters(learner.model)
        setting.reporter.step(private.taken)
        if private.taken != private.steps and _due(runtime.evaluate_every, private.taken):
            setting.reporter.evaluated(private.taken, _measure(setting, learner, private))
            learner.model.train()
        stopping = stop()
        if stopping or _due(runtime.checkpoint_every, private.taken):
            state.save(setting.folder, learner, now(), begun.bits)
        if stopping:
            raise Stopped(f"stopped after {private.taken} of {private.steps} steps; the same command takes the run up again.")
    learner.model.train(mode)
    state.save(setting.folder, learner, now(), begun.bits)
    return now().seconds


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _measure(setting: Setting, learner: Learner, private: Private) -> dict[str, Metrics]:
    """Evaluate and write it down."""
    results = _evaluate(setting, learner)
    outputs.add_metrics(setting, private, results)
    if setting.run.runtime.unsafe_metrics:
        private_metrics.add(setting, learner, private)
    return results


def _evaluate(setting: Setting, learner: Learner) -> dict[str, Metrics]:
    """The last iterate and the average, on the declared evaluation data."""
    images = setting.dataset.evaluation
    if images is None:
        return {}
    candidates = {"last": learner.model, "average": None if learner.average is None else learner.average.module}
    classes, several = len(setting.dataset.classes), setting.dataset.multilabel
    return {
        name: evaluate(model, plain_batches(images, setting.parts.spec, setting.parts.device), classes, several)
        for name, model in candidates.items()
        if model is not None
    }
