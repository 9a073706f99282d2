"""Pre-pruning as part of a run: once, before training; the mask is kept in public/ and read back when the run is taken up."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import dp_accounting
from torch import Tensor, nn

from sparsedp import keys, mask_files
from sparsedp.apply_masks import prepare_for
from sparsedp.assembly import assemble, load_data
from sparsedp.budget_file import BudgetFile, place
from sparsedp.config import Run
from sparsedp.data import check
from sparsedp.dp.clipping import Engine, Loss, Rows
from sparsedp.dp.ledger import Ledger
from sparsedp.engines import choose_engine
from sparsedp.planning import Budget, budget, pruning_event
from sparsedp.pruning import PrivateData, Pruned, prune
from sparsedp.sources import Source, parts

if TYPE_CHECKING:
    from sparsedp.training import Setting

AT_ONCE = 64  # rows that DP-SNIP works on at once: its memory does not grow with the data set


def before_training(run: Run) -> Ledger | None:
    """What a mask from a file has cost the data already; None where the run prunes for itself, or not at all."""
    if run.sparsity.mask_file is None:
        return None
    pruned = mask_files.load(run.sparsity.mask_file)
    return Ledger().append(f"mask from a file, made by {pruned.criterion}", pruned.event)


def prune_for_run(setting: Setting) -> Pruned | None:
    """The run's masks, made once; the model is what it is under them afterwards."""
    s, folder = setting.run.sparsity, setting.folder
    if s.prune == "none" and s.mask_file is None:
        return None
    kept = folder.public / "mask.safetensors"
    if kept.exists():
        pruned = mask_files.load(kept, setting.parts.model)
    else:
        pruned = _pruned(setting)
        mask_files.save(kept, pruned)
    prepare_for(setting.parts.model, pruned.masks, s.pruned_weights)
    return pruned


def _pruned(setting: Setting) -> Pruned:
    folder, s = setting.folder, setting.run.sparsity

    def record(what: str, event: dp_accounting.DpEvent) -> None:
        """Once: a run that died between the event and the mask makes the same mask again, which nobody has seen."""
        ledger = folder.read_ledger()
        if not ledger.entries:
            folder.write_ledger(ledger.append(what, event))

    if s.mask_file is not None:
        spent = before_training(setting.run)
        assert spent is not None
        record(spent.entries[0].what, spent.entries[0].event)
        return mask_files.load(s.mask_file, setting.parts.model)
    parts_of_run = setting.parts
    data = private_data(setting.run, setting.plan, parts_of_run.source(setting.key, plain=True), parts_of_run.loss)
    entry = pruning_event(s, setting.plan.num_units, setting.plan.snip_noise_multiplier)
    assert entry is not None
    return prune(
        parts_of_run.model, s, setting.key, input_shape=parts_of_run.shape, data=data,
        record=lambda what, event: record(entry[0], event),
    )  # fmt: skip


def private_data(run: Run, plan: Budget, source: Source, loss: Loss) -> PrivateData:
    """What DP-SNIP may see: the training images, one plain view of each, streamed."""

    def read(units: Tensor) -> Iterable[Rows]:
        return parts(source, units, 0, AT_ONCE)

    def engine(connected: nn.Module) -> Engine:
        return choose_engine("auto", connected, loss, source.example(), clip=run.sparsity.snip_clip, rows=AT_ONCE)

    return PrivateData(
        num_units=plan.num_units, read=read, loss=loss, engine=engine, example=source.example(),
        noise_multiplier=plan.snip_noise_multiplier, exact=run.mechanism.arithmetic == "exact",
    )  # fmt: skip


def prune_alone(run: Run, out: Path) -> Pruned:
    """Masks without training, into a file that says what they cost; DP-SNIP's cost is entered in the data set's budget."""
    key = keys.fresh() if run.runtime.key is None else keys.chosen(run.runtime.key)
    dataset = load_data(run)
    made = assemble(run, dataset, key)
    from_data = run.sparsity.prune in ("dp-snip", "snip-not-private")
    if not from_data:
        pruned = prune(made.model, run.sparsity, key, input_shape=made.shape)
        mask_files.save(out, pruned)
        return pruned
    check(dataset)
    plan = budget(without_target(run), dataset.train.num_units)
    account = BudgetFile(
        place(run.data),
        dataset.name,
        f"{out.resolve()} {secrets.token_hex(8)}",
        plan,
        run.mechanism.delta,
        Quiet(),
        not key.given,
    )

    def record(what: str, event: dp_accounting.DpEvent) -> None:
        account.spent(Ledger().append(what, event))

    data = private_data(run, plan, made.source(key, plain=True), made.loss)
    pruned = prune(made.model, run.sparsity, key, input_shape=made.shape, data=data, record=record)
    mask_files.save(out, pruned)
    return pruned


def without_target(run: Run) -> Run:
    """What is pruned without noise has no epsilon, so that there is none to aim for."""
    if run.sparsity.prune != "snip-not-private":
        return run
    return replace(run, mechanism=replace(run.mechanism, private=False, steps=run.mechanism.steps or 1, arithmetic="float"))


class Quiet:
    """Takes notes, and keeps them to itself."""

    def note(self, text: str) -> None: ...
