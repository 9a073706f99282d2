"""Where a run begins or goes on: its optimiser, average and private side, and what a replayed step's bits depend on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparsedp import state
from sparsedp.config import Run
from sparsedp.dp.masks import maskable_layers
from sparsedp.dp.mechanism import Settings
from sparsedp.dp.randomness import raw
from sparsedp.environment import fingerprint
from sparsedp.optim import average_of, optimizer_for, scheduler_for
from sparsedp.planning import Budget
from sparsedp.private import Private
from sparsedp.pruning import Pruned
from sparsedp.sources import Source
from sparsedp.state import Learner, Progress

if TYPE_CHECKING:
    from sparsedp.training import Setting


@dataclass(frozen=True, eq=False)
class Begun:
    """All that a run has at its first step, or where it goes on."""

    learner: Learner
    private: Private
    source: Source
    progress: Progress
    bits: Mapping[str, Any]


def begin(setting: Setting, pruned: Pruned | None) -> Begun:
    """Optimiser, average and private side, as at the start or as the last checkpoint has them."""
    run, folder, model = setting.run, setting.folder, setting.parts.model
    optimizer = optimizer_for(model, run.optim)
    average = None if run.optim.average_decay is None else average_of(model, run.optim.average_decay)
    learner = Learner(model, average, optimizer, scheduler_for(optimizer, run.optim, setting.plan.steps))
    before = folder.read_ledger()
    private = Private(
        model, optimizer, setting.parts.loss, step_settings(run, setting.plan, pruned, model), steps=setting.plan.steps, key=setting.key,
        engine=run.runtime.engine, micro_batch=run.runtime.micro_batch, on_spend=folder.write_ledger,
        on_plan=lambda step, plan: folder.write_plans(private.plans),
    )  # fmt: skip
    private.plans = folder.read_plans()
    lost = {} if private.plans or not any(folder.states.iterdir()) else {"the plan of the engine": "lost"}
    bits = bits_depend_on(setting, private)
    found = state.take_up(folder, learner, before, {**bits, **lost})
    for line in (*private.notes, *found.notes):
        setting.note(line)
    progress, key = found.progress, found.progress.key(setting.key)
    private.resume(progress.taken, found.ledger, found.charged, private.plans)
    private.key, private.steps = key, setting.plan.steps - progress.extra
    if found.ledger != before:
        folder.write_ledger(found.ledger)
    folder.keep_metrics(progress.taken, private.steps)
    state.save(folder, learner, progress, bits)
    return Begun(learner, private, setting.parts.source(key), progress, bits)


def bits_depend_on(setting: Setting, private: Private) -> dict[str, Any]:
    """What must be equal for a replayed step to be equal to the bit; these are checksums, and stay in private/.

    The engine is put to a trial, by the plan that was recorded: the loss, the code of the model, libraries and processor show in what
    it sums.
    """
    mark = raw(setting.key, 16, "which key this is").hex()
    return {
        **fingerprint(setting.parts.device),
        "data": setting.data_checksum,
        "key": mark,
        "the engine's sums": _trial(setting, private),
    }


def _trial(setting: Setting, private: Private) -> str:
    """Before any weights are loaded, so that the model is what it was when the run began."""
    model = setting.parts.model
    mode = model.training
    model.train()
    try:
        with autocast(setting):
            return private.trial(setting.parts.source(setting.key))
    finally:
        model.train(mode)


def step_settings(run: Run, plan: Budget, pruned: Pruned | None, trained: nn.Module) -> Settings:
    """The public facts of a training step."""
    s, m = run.sparsity, run.mechanism
    return Settings(
        num_units=plan.num_units, batch_size=m.batch_size, noise_multiplier=plan.noise_multiplier,
        clip=m.clip if m.private else float("inf"), layers=maskable_layers(trained, s.granularity, s.maskable),
        drop=s.drop, drop_rate=s.drop_rate, pruned=pruned.masks if pruned else {}, unit_norm=m.unit_norm,
        exact=m.arithmetic == "exact",
    )  # fmt: skip


@contextmanager
def autocast(setting: Setting) -> Iterator[None]:
    if setting.run.runtime.autocast == "none":
        yield
    else:
        with torch.autocast(setting.parts.device.type, dtype=torch.bfloat16):
            yield
