"""Taking a run up again: the same to the bit, or with fresh noise and charged again; never free and different."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import torch
from torch import nn

from sparsedp import checkpoint, state
from sparsedp.config import Mechanism, Optim, Run
from sparsedp.dp.ledger import Ledger, gaussian_event
from sparsedp.errors import UsageError
from sparsedp.optim import average_of, scheduler_for
from sparsedp.rundir import RunDir
from sparsedp.state import FRESH, Learner, Progress, take_up
from tests.made_up import KEY
from tests.replay import assert_same_bits

EVENT = gaussian_event(0.1, 1.0)
HERE = {"torch": "2.6", "threads": 1, "data": "d", "key": "k"}


def learner_of(width: int = 3, average: bool = True) -> Learner:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(width, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return Learner(
        model, average_of(model, 0.9) if average else None, optimizer, scheduler_for(optimizer, Optim(schedule="cosine"), 10)
    )


def advance(learner: Learner, steps: int) -> None:
    for step in range(steps):
        for p in learner.model.parameters():
            p.grad = torch.full_like(p, 0.1 + step)
        learner.optimizer.step()
        learner.scheduler.step()
        if learner.average is not None:
            learner.average.update_parameters(learner.model)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunDir]:
    made = RunDir.open(tmp_path / "run", Run(mechanism=Mechanism(epsilon=1.0, steps=10)))
    yield made
    made.close()


def ledger(steps: int, before: Ledger | None = None) -> Ledger:
    return (before or Ledger()).append("train", EVENT, steps)


def saved(folder: RunDir, taken: int, where: dict[str, Any] = HERE, **more: Any) -> Learner:
    learner = learner_of()
    advance(learner, taken)
    state.save(folder, learner, Progress(taken=taken, **more), where)
    return learner


def test_nothing_saved_and_nothing_spent_is_a_start(folder: RunDir) -> None:
    found = take_up(folder, learner_of(), Ledger(), HERE)
    assert (found.progress, found.ledger, found.charged) == (Progress(), Ledger(), 0)


def test_everything_that_learns_comes_back_to_the_bit(folder: RunDir) -> None:
    learner, other = saved(folder, 4, seconds=2.5), learner_of()
    found = take_up(folder, other, ledger(4), HERE)
    assert found.progress == Progress(taken=4, seconds=2.5)
    assert_same_bits(learner.state(), other.state(), "state")
    advance(learner, 3)
    advance(other, 3)
    assert_same_bits(learner.state(), other.state(), "state afterwards")


def test_a_ledger_ahead_of_the_checkpoint_is_replayed_at_no_cost(folder: RunDir) -> None:
    saved(folder, 4)
    found = take_up(folder, learner_of(), ledger(7), HERE)
    assert (found.progress.taken, found.charged, found.progress.extra, found.progress.epoch) == (4, 7, 0, 0)
    assert found.ledger == ledger(7)


def test_a_ledger_older_than_the_checkpoint_is_refused(folder: RunDir) -> None:
    saved(folder, 4)
    with pytest.raises(UsageError, match="counts 3 steps, but the checkpoint has taken 4: it is older than the run"):
        take_up(folder, learner_of(), ledger(3), HERE)


def test_a_ledger_without_any_checkpoint_is_refused(folder: RunDir) -> None:
    with pytest.raises(UsageError, match="counts 2 steps, but there is no checkpoint to go on from"):
        take_up(folder, learner_of(), ledger(2), HERE)


@pytest.mark.parametrize("name", sorted(HERE))
def test_where_bits_may_differ_steps_are_done_afresh_and_charged_again(folder: RunDir, name: str) -> None:
    """Guarantee: steps that are done again either find everything as it was, or take fresh noise and are charged again."""
    saved(folder, 4)
    found = take_up(folder, learner_of(), ledger(7), {**HERE, name: "another"})
    assert found.progress == Progress(taken=4, epoch=1, extra=3)
    assert found.charged == 4, "the next step is charged"
    assert found.ledger.entries[-1].event == dp_accounting.NoOpDpEvent()
    assert found.ledger.entries[-1].what == f"{FRESH}: 3 steps are charged again"
    assert found.progress.key(KEY).secret != KEY.secret
    assert found.notes == (f"{name} changed since the checkpoint: {FRESH}: 3 steps are charged again.",)


def test_something_new_that_bits_depend_on_is_a_change(folder: RunDir) -> None:
    saved(folder, 4)
    assert take_up(folder, learner_of(), ledger(4), {**HERE, "more": 1}).progress.epoch == 1


def test_every_fresh_key_is_another(folder: RunDir) -> None:
    secrets = [Progress(epoch=epoch).key(KEY).secret for epoch in range(4)]
    assert len(set(secrets)) == 4 and secrets[0] == KEY.secret
    assert Progress(epoch=2).key(KEY).given == KEY.given


def test_two_changes_add_up_and_the_target_is_kept(folder: RunDir) -> None:
    """4 taken, 7 charged; then 4 more under a fresh key, saved after 2 of them; then another change: 3 + 2 are charged twice."""
    saved(folder, 4)
    first = take_up(folder, learner_of(), ledger(7), {**HERE, "threads": 2})
    learner = learner_of()
    advance(learner, 6)
    state.save(folder, learner, Progress(taken=6, epoch=1, extra=3), {**HERE, "threads": 2})
    second = take_up(folder, learner_of(), ledger(4, first.ledger), {**HERE, "threads": 3})
    assert second.progress == Progress(taken=6, epoch=2, extra=5)
    assert state.trained_steps(second.ledger) == 11 and second.charged == 6
    assert second.progress.taken + second.progress.extra == state.trained_steps(second.ledger)


def test_a_checkpoint_from_before_a_fresh_key_never_passes_for_the_last(folder: RunDir) -> None:
    """Saved at 3 and 4; then fresh noise from 4 on; then the newest file is damaged, and the machine is the old one again.

    The first key's steps up to 7 were released, and so were two steps under the fresh one. Neither may be met again.
    """
    saved(folder, 3)
    saved(folder, 4)
    fresh = take_up(folder, learner_of(), ledger(7), {**HERE, "threads": 2})
    learner = learner_of()
    advance(learner, 4)
    state.save(folder, learner, fresh.progress, {**HERE, "threads": 2})
    newest = folder.states / "step-00000004.state"
    newest.write_bytes(newest.read_bytes()[:-3])
    for where in (HERE, {**HERE, "threads": 2}):
        found = take_up(folder, learner_of(), ledger(2, fresh.ledger), where)
        assert found.progress == Progress(taken=3, epoch=2, extra=6)
        assert found.charged == 3
        assert "step-00000004.state is damaged" in found.notes[0]


def test_a_ledger_that_lacks_a_fresh_key_is_refused(folder: RunDir) -> None:
    saved(folder, 4, epoch=1, extra=3)
    with pytest.raises(UsageError, match="it is older than the run"):
        take_up(folder, learner_of(), ledger(9), HERE)


def test_a_checkpoint_of_another_run_is_never_loaded(folder: RunDir, tmp_path: Path) -> None:
    """Its optimiser may be of another kind, and its weights may have been paid for in another ledger."""
    saved(folder, 4)
    other = RunDir.open(tmp_path / "other", Run(mechanism=Mechanism(epsilon=1.0, steps=10)))
    saved(other, 6)
    other.close()
    (other.states / "step-00000006.state").replace(folder.states / "step-00000006.state")
    found = take_up(folder, learner_of(), ledger(6), HERE)
    assert (found.progress.taken, found.charged) == (4, 6)
    assert found.notes == ("step-00000006.state is of another run.",)


def test_a_checkpoint_of_another_model_is_refused(folder: RunDir) -> None:
    saved(folder, 4)
    for other in (learner_of(width=5), learner_of(average=False)):
        if other.average is None:
            other = Learner(other.model, None, torch.optim.SGD(other.model.parameters(), lr=1.0), other.scheduler)
            other.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        with pytest.raises(UsageError, match=r"does not fit this run \(\w+\); start a new run"):
            take_up(folder, other, ledger(4), HERE)


@pytest.mark.parametrize("spoil", [{"progress": None}, {"progress": {"taken": 1, "speed": 2}}, {"model": {}}, {"optimizer": 3}])
def test_a_checkpoint_that_lacks_something_is_refused(folder: RunDir, spoil: dict[str, Any]) -> None:
    learner = learner_of()
    run = folder.name.split()[-1]
    whole = {**learner.state(), "run": run, "progress": vars(Progress(taken=1)), "bits_depend_on": HERE}
    checkpoint.save(folder.states, 1, {**copy.deepcopy(whole), **spoil})
    with pytest.raises(UsageError, match="does not fit this run"):
        take_up(folder, learner_of(), ledger(1), HERE)


ODD: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no bits": lambda kept: kept.pop("bits_depend_on"),
    "bits of another kind": lambda kept: kept.update(bits_depend_on=["torch"]),
    "a text for the steps": lambda kept: kept["progress"].update(taken="4"),
    "steps below zero": lambda kept: kept["progress"].update(taken=-1),
    "endless seconds": lambda kept: kept["progress"].update(seconds=float("nan")),
    "a text for the rate": lambda kept: kept["optimizer"]["param_groups"][0].update(lr="0.1"),
    "a rate beyond every tensor": lambda kept: kept["optimizer"]["param_groups"][0].update(lr=1e308),
    "a rate that is no number": lambda kept: kept["optimizer"]["param_groups"][0].update(lr=float("nan")),
    "no rate": lambda kept: kept["optimizer"]["param_groups"][0].pop("lr"),
    "momentum in a list": lambda kept: kept["optimizer"]["state"][0].update(exp_avg=[1.0]),
    "momentum of another shape": lambda kept: kept["optimizer"]["state"][0].update(exp_avg=torch.zeros(7, 7)),
    "a schedule of another kind": lambda kept: kept["scheduler"].update(last_epoch="4"),
}


@pytest.mark.parametrize("odd", ODD)
def test_a_checkpoint_that_would_fail_later_is_refused_at_once(folder: RunDir, odd: str) -> None:
    """torch's optimisers and schedules take what they are given, and fail at the next step."""
    saved(folder, 4)
    (path,) = folder.states.glob("step-*.state")
    kept = checkpoint.decode(path.read_bytes(), path.name)
    take_up(folder, learner_of(), ledger(4), HERE)
    ODD[odd](kept)
    path.write_bytes(checkpoint.encode(kept))
    with pytest.raises(UsageError, match="does not fit this run"):
        take_up(folder, learner_of(), ledger(4), HERE)
