"""The composition: one private step as Algorithm 1 of the paper has it, and DP-SNIP's release from the same parts.

Everything that a step needs is handed in: how rows are read, how sums are reduced over ranks, where spending is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import dp_accounting
from torch import Tensor, nn

from sparsedp.dp import clipping
from sparsedp.dp.clipping import Engine, Loss, Rows
from sparsedp.dp.ledger import gaussian_event
from sparsedp.dp.masks import Layer, Masks, participating
from sparsedp.dp.noise import add_noise, grid_for
from sparsedp.dp.randomness import Key
from sparsedp.dp.sampling import participants, sampling_rate
from sparsedp.dp.selection import Criterion, select
from sparsedp.dp.values import ClippedSum, Released, public

Read = Callable[[Tensor], Iterable[Rows]]
"""Units -> their rows, in parts of any size."""
Reduce = Callable[[ClippedSum], ClippedSum]
"""The sum over ranks; one process has nothing to do."""
Record = Callable[[str, dp_accounting.DpEvent], None]
"""Writes an event to the ledger, or refuses it, before anything is read."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The public facts of a private step."""

    num_units: int
    batch_size: float
    noise_multiplier: float
    clip: float
    layers: Sequence[Layer] = ()
    drop: str | Criterion = "none"
    drop_rate: float = 0.0
    pruned: Masks = field(default_factory=dict)
    unit_norm: bool = True
    exact: bool = False

    @property
    def sampling_rate(self) -> float:
        """q: the probability with which a unit joins a step."""
        return sampling_rate(self.num_units, self.batch_size)

    @property
    def event(self) -> dp_accounting.DpEvent:
        """What one step spends."""
        if self.noise_multiplier == 0:
            return dp_accounting.NonPrivateDpEvent()
        return gaussian_event(self.sampling_rate, self.noise_multiplier)


@dataclass(frozen=True)
class Step:
    """What a private step leaves: the noised average gradient, and the coordinates that it may move."""

    gradient: Released
    masks: Masks


def nothing_to_reduce(total: ClippedSum) -> ClippedSum:
    """The reduction of a single process."""
    return total


def private_step(
    settings: Settings,
    model: nn.Module,
    loss: Loss,
    read: Read,
    engine: Engine,
    key: Key,
    step: int,
    record: Record,
    reduce: Reduce = nothing_to_reduce,
) -> Step:
    """Record, select, sample, clip, sum, noise, and divide by the expected batch size.

    Guarantee: the event is recorded before the first row is read.
    Guarantee: an empty batch is an ordinary step, recorded and noised.
    Guarantee: but for the inputs of `add_noise`, nothing that leaves depends on the data.
    """
    if settings.exact:
        now = public(participating(model), "weights that are released or initial")
        chosen = select(settings.layers, settings.drop, settings.drop_rate, settings.pruned, now, key, step)
        _grid(settings, model, chosen)  # what exact arithmetic cannot do is refused before it is charged
    record("train", settings.event)
    weights = public(participating(model), "weights before this step are released or initial")
    masks = select(settings.layers, settings.drop, settings.drop_rate, settings.pruned, weights, key, step)
    units = participants(key, step, settings.num_units, settings.sampling_rate)
    total = reduce(_sum(settings, model, loss, read(units), masks, engine))
    noised = add_noise(total, settings.noise_multiplier, masks, key, "train", step)
    divisor = settings.batch_size * (settings.clip if settings.unit_norm and settings.clip < float("inf") else 1.0)
    return Step(noised.over(divisor), masks)


def dp_snip_release(
    settings: Settings,
    model: nn.Module,
    loss: Loss,
    read: Read,
    engine: Engine,
    key: Key,
    record: Record,
    reduce: Reduce = nothing_to_reduce,
) -> Released:
    """The noised average of the clipped connection gradients: one Gaussian release, by the same parts as training.

    `model` is one whose trained parameters are the connectivity variables (see `sparsedp.pruning`). With batch_size equal
    to num_units every unit takes part and nothing is sampled.
    """
    if settings.exact:
        _grid(settings, model, settings.pruned)
    record("dp-snip", settings.event)
    units = participants(key, 0, settings.num_units, settings.sampling_rate, purpose="dp-snip")
    total = reduce(_sum(settings, model, loss, read(units), settings.pruned, engine))
    return add_noise(total, settings.noise_multiplier, settings.pruned, key, "dp-snip", 0).over(settings.batch_size)


def _sum(settings: Settings, model: nn.Module, loss: Loss, batch: Iterable[Rows], masks: Masks, engine: Engine) -> ClippedSum:
    if not settings.exact:
        return clipping.clipped_sum(engine, model, loss, batch, masks, settings.clip)
    return clipping.clipped_sum_on_grid(model, loss, batch, masks, settings.clip, _grid(settings, model, masks))


def _grid(settings: Settings, model: nn.Module, masks: Masks) -> float:
    return grid_for(settings.noise_multiplier, settings.clip, clipping.selected(participating(model), masks))
