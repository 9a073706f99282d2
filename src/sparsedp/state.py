"""What a run carries from step to step, and how it is put away and taken up again, to the bit.

A resumed run that finds everything as it was replays the steps since its last checkpoint with the same bits, at no cost.
Where anything that bits depend on has changed (versions, machine, threads, data, key), it goes on under a fresh key, the replayed
steps are charged again, and the run ends so many steps earlier: the same noise never meets two different sums. The ledger counts
the fresh keys, so that a checkpoint from before one of them is never taken for the last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import dp_accounting
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from sparsedp import checkpoint
from sparsedp.dp.ledger import Ledger
from sparsedp.dp.randomness import Key, raw
from sparsedp.errors import UsageError
from sparsedp.rundir import RunDir


@dataclass(frozen=True, eq=False)
class Learner:
    """Everything that changes while training."""

    model: nn.Module
    average: AveragedModel | None
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands. `epoch` counts fresh keys, `extra` the steps that were charged and then done again."""

    taken: int = 0
    epoch: int = 0
    extra: int = 0
    seconds: float = 0.0

    def key(self, key: Key) -> Key:
        """The key in force: the run's own, or one derived from it after the environment changed."""
        return key if self.epoch == 0 else Key(raw(key, 32, "epoch", self.epoch), key.given)


FRESH = "taken up again with fresh noise"
"""How the ledger's entry for a fresh key begins."""


def fresh_keys(ledger: Ledger) -> int:
    """How often a run went on under a fresh key."""
    return sum(entry.count for entry in ledger.entries if entry.what.startswith(FRESH))


def trained_steps(ledger: Ledger) -> int:
    """How many training steps a ledger counts."""
    return sum(entry.count for entry in ledger.entries if entry.what == "train")


def save(folder: RunDir, learner: Learner, progress: Progress, bits_depend_on: Mapping[str, Any]) -> None:
    """Write a checkpoint."""
    state = {**learner.state(), "run": _id(folder), "progress": vars(progress), "bits_depend_on": dict(bits_depend_on)}
    checkpoint.save(folder.states, progress.taken, state)


@dataclass(frozen=True, eq=False)
class TakenUp:
    """Where a run goes on: its ledger, how many of that ledger's steps may be replayed, and what to tell the operator."""

    progress: Progress
    ledger: Ledger
    charged: int
    notes: tuple[str, ...]


def take_up(folder: RunDir, learner: Learner, ledger: Ledger, bits_depend_on: Mapping[str, Any]) -> TakenUp:
    """Load the last whole checkpoint into `learner`.

    Guarantee: steps that are done again either find everything as it was, or take fresh noise and are charged again.
    """
    found = checkpoint.load_latest(folder.states, lambda state: state.get("run") == _id(folder))
    counted, keys_used = trained_steps(ledger), fresh_keys(ledger)
    if found is None:
        if counted:
            raise UsageError(
                f"The ledger in {folder.public} counts {counted} steps, but there is no checkpoint to go on from; start a new run in "
                "another folder, and count this one as spent."
            )
        return TakenUp(Progress(), ledger, 0, ())
    _, state, notes = found
    progress = _load(folder, learner, state)
    charged = counted - progress.extra
    if charged < progress.taken or keys_used < progress.epoch:
        raise UsageError(
            f"The ledger in {folder.public} counts {counted} steps, but the checkpoint has taken {progress.taken + progress.extra}: "
            "it is older than the run; restore the right ledger.json, or start a new run and count this one as spent."
        )
    changed = different(state["bits_depend_on"], bits_depend_on)
    if keys_used > progress.epoch:
        changed.append("the key")
    if not changed:
        return TakenUp(progress, ledger, charged, tuple(notes))
    what = f"{FRESH}: {charged - progress.taken} steps are charged again"
    fresh = replace(progress, epoch=keys_used + 1, extra=counted - progress.taken)
    notes = [*notes, f"{', '.join(changed)} changed since the checkpoint: {what}."]
    return TakenUp(fresh, ledger.append(what, dp_accounting.NoOpDpEvent()), progress.taken, tuple(notes))


def _id(folder: RunDir) -> str:
    """Which run a checkpoint is of, wherever its folder lies."""
    return folder.name.rsplit(maxsplit=1)[-1]


def different(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The names of what is not as it was."""
    return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))


def _load(folder: RunDir, learner: Learner, state: Mapping[str, Any]) -> Progress:
    try:
        progress = Progress(**state["progress"])
        before = learner.state()
        learner.load(state)
        _check(progress, state["bits_depend_on"])
        _check_loaded(learner, before)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise UsageError(
            f"The checkpoint in {folder.states} does not fit this run ({type(error).__name__}); start a new run."
        ) from error
    return progress


def _check(progress: Progress, bits_depend_on: object) -> None:
    """Raises ValueError at what `save` would not have written."""
    counts = (progress.taken, progress.epoch, progress.extra)
    named = isinstance(bits_depend_on, dict) and all(isinstance(name, str) for name in bits_depend_on)
    if not named or not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError("progress")
    if type(progress.seconds) not in (int, float) or not 0 <= progress.seconds < math.inf:
        raise ValueError("seconds")


def _check_loaded(learner: Learner, before: Mapping[str, Any]) -> None:
    """Raises ValueError where a setting is of another kind than it was: torch takes anything, and fails at the next step."""
    now = learner.state()
    groups = [
        (old, new) for old, new in zip(before["optimizer"]["param_groups"], now["optimizer"]["param_groups"], strict=True)
    ]
    for old, new in (*groups, (before["scheduler"], now["scheduler"])):
        if not all(_alike(old[name], new[name]) for name in old):
            raise ValueError("settings")
    for parameter, kept in learner.optimizer.state.items():
        for name, value in kept.items():
            counts = name == "step" and isinstance(value, int | float)
            if not (value is None or counts or (isinstance(value, Tensor) and _goes_with(value, parameter))):
                raise ValueError("state of the optimiser")


def _alike(old: object, new: object) -> bool:
    """Two values of one type, floats that a tensor can hold; lists and tuples of one length, entry by entry."""
    if isinstance(old, list | tuple) and type(old) is type(new):
        return len(old) == len(new) and all(map(_alike, old, new))  # type: ignore[arg-type]
    held = not isinstance(new, float) or abs(new) <= torch.finfo(torch.float32).max
    return type(old) is type(new) and (held or old == new)


def _goes_with(value: Tensor, parameter: Tensor) -> bool:
    """A number, or a tensor of the parameter's shape, along some sides of which it may be one number."""
    sides = zip(value.shape, parameter.shape, strict=False)
    return value.numel() == 1 or (value.ndim == parameter.ndim and all(own in (1, side) for own, side in sides))
