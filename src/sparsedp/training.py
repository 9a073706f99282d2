"""One run from its configuration to its folder: prepare, prune, train, evaluate, write."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from sparsedp import data, outputs, private_metrics, state
from sparsedp.assembly import Parts, assemble, load_data
from sparsedp.budget_file import Account, BudgetFile, EnteredAlready, place
from sparsedp.config import Run
from sparsedp.data import DataSet
from sparsedp.dp.clipping import Loss
from sparsedp.dp.ledger import Ledger
from sparsedp.dp.masks import maskable_layers
from sparsedp.dp.mechanism import Settings
from sparsedp.dp.randomness import Key, raw
from sparsedp.engines import NAMES as ENGINES
from sparsedp.engines import Plan
from sparsedp.engines.care import memory_in_words
from sparsedp.environment import fingerprint, keep_memory
from sparsedp.errors import one_of
from sparsedp.evaluation import Metrics, evaluate
from sparsedp.images import plain_batches
from sparsedp.optim import average_of, optimizer_for, scheduler_for
from sparsedp.planning import Budget, budget
from sparsedp.private import Private
from sparsedp.prune_run import before_training, prune_for_run
from sparsedp.pruning import Pruned
from sparsedp.rundir import RunDir
from sparsedp.sources import Source
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
    began = time.monotonic()
    setting = prepare(run, Path(run_dir), loss, reporter or Silence(), trial)
    keep_memory()
    account = _account(setting) if trial is None else EnteredAlready()
    try:
        return _carry_out(setting, account, began, stop)
    finally:
        setting.folder.close()


def _carry_out(setting: Setting, account: Account, began: float, stop: Callable[[], bool]) -> Result:
    run = setting.run
    with account:
        pruned = prune_for_run(setting)
        learner, private, source, progress = _begin(setting, pruned)
        setting.reporter.start(run, setting.plan, progress.taken)
        seconds = _loop(setting, learner, private, source, progress, began, stop)
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
    except BaseException:
        folder.discard()
        folder.close()
        raise
    for line in (*plan.spent.warnings, *checked.sentences(), *parts.notes):
        reporter.note(line)
    return Setting(parts, folder, plan, key, reporter, checked.checksum)


def refuse_early(run: Run, model: nn.Module) -> None:
    """Names that would only be looked up after pre-pruning has spent something."""
    one_of("runtime.engine", run.runtime.engine, ENGINES)
    optimizer_for(model, run.optim)
    maskable_layers(model, run.sparsity.granularity, run.sparsity.maskable)


def _account(setting: Setting) -> BudgetFile:
    """The run's entry in its data set's budget file."""
    run = setting.run
    where = (place(run.data), setting.dataset.name, setting.folder.name)
    return BudgetFile(*where, setting.plan, run.mechanism.delta, setting.reporter)


def step_settings(run: Run, plan: Budget, pruned: Pruned | None, trained: nn.Module) -> Settings:
    """The public facts of a training step."""
    s, m = run.sparsity, run.mechanism
    return Settings(
        num_units=plan.num_units, batch_size=m.batch_size, noise_multiplier=plan.noise_multiplier,
        clip=m.clip if m.private else float("inf"), layers=maskable_layers(trained, s.granularity, s.maskable),
        drop=s.drop, drop_rate=s.drop_rate, pruned=pruned.masks if pruned else {}, unit_norm=m.unit_norm,
        exact=m.arithmetic == "exact",
    )  # fmt: skip


def _begin(setting: Setting, pruned: Pruned | None) -> tuple[Learner, Private, Source, Progress]:
    """Optimiser, average and private side, as at the start or as the last checkpoint has them."""
    run, folder, model = setting.run, setting.folder, setting.parts.model
    optimizer = optimizer_for(model, run.optim)
    average = None if run.optim.average_decay is None else average_of(model, run.optim.average_decay)
    learner = Learner(model, average, optimizer, scheduler_for(optimizer, run.optim, setting.plan.steps))
    before = folder.read_ledger()
    found = state.take_up(folder, learner, before, bits_depend_on(setting))
    for line in found.notes:
        setting.reporter.note(line)
    progress, key = found.progress, found.progress.key(setting.key)

    def on_plan(step: int, plan: Plan) -> None:
        folder.write_plans(private.plans)
        for line in private.notes if step == progress.taken else ():
            setting.reporter.note(line)

    private = Private(
        model, optimizer, setting.parts.loss, step_settings(run, setting.plan, pruned, model),
        steps=setting.plan.steps - progress.extra, key=key,
        engine=run.runtime.engine, micro_batch=run.runtime.micro_batch, on_spend=folder.write_ledger,
        on_plan=on_plan,
    )  # fmt: skip
    private.resume(progress.taken, found.ledger, found.charged, folder.read_plans())
    source = setting.parts.source(key)
    if found.ledger != before:
        folder.write_ledger(found.ledger)
    folder.keep_metrics(progress.taken, private.steps or 0)
    state.save(folder, learner, progress, bits_depend_on(setting))
    return learner, private, source, progress


def bits_depend_on(setting: Setting) -> dict[str, Any]:
    """What must be equal for a replayed step to be equal to the bit; these are checksums, and stay in private/."""
    mark = raw(setting.key, 16, "which key this is").hex()
    return {**fingerprint(setting.parts.device), "data": setting.data_checksum, "key": mark}


def _loop(
    setting: Setting,
    learner: Learner,
    private: Private,
    source: Source,
    progress: Progress,
    began: float,
    stop: Callable[[], bool],
) -> float:
    """The training loop. Returns the seconds it took, over all resumptions."""
    runtime = setting.run.runtime
    begun = learner.model.training
    learner.model.train()

    def now() -> Progress:
        return replace(progress, taken=private.taken, seconds=max(0.0, progress.seconds + time.monotonic() - began))

    for batch in private.batches(source):
        with _autocast(setting):
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
            state.save(setting.folder, learner, now(), bits_depend_on(setting))
        if stopping:
            raise Stopped(f"stopped after {private.taken} of {private.steps} steps; the same command takes the run up again.")
    learner.model.train(begun)
    state.save(setting.folder, learner, now(), bits_depend_on(setting))
    return now().seconds


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


@contextmanager
def _autocast(setting: Setting) -> Iterator[None]:
    if setting.run.runtime.autocast == "none":
        yield
    else:
        with torch.autocast(setting.parts.device.type, dtype=torch.bfloat16):
            yield


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
