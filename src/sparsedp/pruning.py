"""Pre-pruning of a real model: the criterion is chosen by name, run, recorded in the ledger, and reported.

What a criterion does not need it does not get: `random` and `synflow` are handed a `Public` and nothing else; only `dp-snip`
and `snip-not-private` are handed the `PrivateData` as well. A criterion of one's own is a function that returns scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dp_accounting
from torch import nn

from sparsedp.config import Sparsity
from sparsedp.connectivity import Connected
from sparsedp.dp import pruning as dp
from sparsedp.dp.clipping import Engine, Loss, Rows, reference
from sparsedp.dp.ledger import free_event
from sparsedp.dp.masks import Layer, Masks, maskable_layers, participating
from sparsedp.dp.mechanism import Read, Record, Reduce, Settings, dp_snip_release, nothing_to_reduce
from sparsedp.dp.randomness import Key
from sparsedp.engines.care import sheltered
from sparsedp.errors import UsageError, require, unknown, wrong
from sparsedp.linearise import Linearised
from sparsedp.pruning_report import PruningReport

Scoring = Callable[[nn.Module, Sequence[Layer]], dp.Scores]
"""A criterion of one's own: (model, layers) -> one score per coordinate (per output channel under `filter`), by layer name.
The highest stay. It must read no private data: nothing is charged for it."""
Outcome = tuple[Masks, dp_accounting.DpEvent]


@dataclass(frozen=True, kw_only=True)
class Public:
    """What every criterion may know: the model at its initial or public weights, which layers, the rate, coins, one shape."""

    model: nn.Module
    layers: tuple[Layer, ...]
    rate: float
    key: Key
    input_shape: tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True, repr=False)
class PrivateData:
    """What DP-SNIP needs beyond that. The data are streamed through `read`, in parts as small as it likes."""

    num_units: int
    read: Read
    loss: Loss
    noise_multiplier: float | None = None
    """As calibrated by the caller from an epsilon or a share; left out, the configuration must have it."""
    engine: Callable[[nn.Module], Engine] = lambda connected: reference
    """Chooses an engine for the model of connectivity variables."""
    example: Rows | None = None
    """A few rows of the data's shapes and types, as a `Source` gives them; with them connections are tried before anything is spent."""
    exact: bool = False
    reduce: Reduce = nothing_to_reduce


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """Masks, what they cost, and how they came about."""

    masks: Masks = field(repr=False)
    event: dp_accounting.DpEvent
    criterion: str
    rate: float
    granularity: str
    private: bool
    """False: made from the data without noise; nothing that uses these masks can be called private."""
    key_given: bool
    """The key was chosen by somebody, who can compute the coins and the noise again."""
    layers: tuple[Layer, ...] = field(repr=False)
    maskable: tuple[str, ...] | None = None

    @property
    def noise_known(self) -> bool:
        """Made from the data with noise that somebody can compute again: as good as without."""
        return self.key_given and self.criterion in FROM_DATA

    @property
    def report(self) -> PruningReport:
        """A table per layer, as text, JSON or a plot."""
        return PruningReport.of(self)


def prune(
    model: nn.Module,
    sparsity: Sparsity,
    key: Key,
    *,
    input_shape: Sequence[int] | None = None,
    data: PrivateData | None = None,
    record: Record = lambda what, event: None,
    scoring: Scoring | None = None,
) -> Pruned:
    """The masks that `sparsity` asks for. `record` writes the event to the ledger before any data are read.

    `scoring`, a criterion of one's own, takes the place of `sparsity.prune`. The model is not changed: what becomes of the
    pruned weights is `prepare_for`'s affair.
    """
    layers = maskable_layers(model, sparsity.granularity, sparsity.maskable)
    if not layers:
        raise UsageError("The model has no weight that may be masked; give maskable patterns, or train without pruning.")
    shape = None if input_shape is None else tuple(input_shape)
    public = Public(model=model, layers=layers, rate=sparsity.prune_rate, key=key, input_shape=shape)
    name, private = (sparsity.prune if scoring is None else getattr(scoring, "__name__", "own")), True
    if scoring is not None:
        masks: Masks = dp.from_scores(layers, scoring(model, layers), sparsity.prune_rate)
        event = _free(name, "a user's criterion, declared to read no private data", record)
    elif name == "none":
        masks, event = {}, dp_accounting.NoOpDpEvent()
    elif name in FREE:
        masks, event = FREE[name](public), _free(name, "reads no data", record)
    elif name in FROM_DATA:
        if data is None:
            raise wrong("prune", name, "it scores weights on the data", "hand in data=PrivateData(...), or use 'synflow'")
        masks, event = FROM_DATA[name](public, sparsity, data, record)
        private = name == "dp-snip"
    else:
        raise unknown("prune", name, ("none", *PRUNERS))
    return Pruned(
        masks=masks, event=event, criterion=name, rate=sparsity.prune_rate, granularity=sparsity.granularity, private=private,
        key_given=key.given, layers=layers, maskable=sparsity.maskable,
    )  # fmt: skip


def random(public: Public) -> Masks:
    """Per layer, uniformly. No data, no privacy cost."""
    return dp.random(public.layers, public.rate, public.key)


def synflow(public: Public) -> Masks:
    """Global, on the linearised model with an all-ones input. No data, no privacy cost."""
    if public.input_shape is None:
        raise wrong("input_shape", None, "SynFlow sends an all-ones input through the model", "give it, such as (3, 32, 32)")
    parameters = participating(public.model)
    weights = {layer.name: parameters[layer.name] for layer in public.layers}
    return dp.synflow(public.layers, weights, Linearised(public.model, public.layers, public.input_shape), public.rate)


def dp_snip(public: Public, sparsity: Sparsity, data: PrivateData, record: Record) -> Outcome:
    """Global, from one Gaussian release of the clipped connection gradients."""
    given, configured = data.noise_multiplier, sparsity.snip_noise_multiplier
    sigma = given if given is not None else configured
    if sigma is None:
        raise UsageError(
            "DP-SNIP's noise multiplier is not known; work it out from snip_epsilon or snip_share, and hand it in."
        )
    require(sigma > 0, "DP-SNIP's noise multiplier", sigma, "it must be above zero", "use 'snip-not-private' for no noise")
    if None not in (given, configured):
        require(
            given == configured, "DP-SNIP's noise multiplier", given, f"the configuration says {configured}", "give it once"
        )
    settings = _settings(public, sparsity, data, sigma, sparsity.snip_clip)
    return _snip_masks(public, data, settings, record), settings.event


def snip(public: Public, sparsity: Sparsity, data: PrivateData, record: Record) -> Outcome:
    """Lee, Ajanthan and Torr 2019, for comparison: the same path, with neither clipping nor noise. Not private."""
    settings = _settings(public, sparsity, data, 0.0, math.inf)
    event = dp_accounting.NonPrivateDpEvent()
    return _snip_masks(public, data, settings, lambda _, __: record("snip-not-private", event)), event


def _settings(public: Public, sparsity: Sparsity, data: PrivateData, sigma: float, clip: float) -> Settings:
    size = data.num_units if sparsity.snip_batch_size is None else sparsity.snip_batch_size
    return Settings(
        num_units=data.num_units, batch_size=size, noise_multiplier=sigma, clip=clip, layers=public.layers,
        exact=data.exact and sigma > 0,
    )  # fmt: skip


def _snip_masks(public: Public, data: PrivateData, settings: Settings, record: Record) -> Masks:
    connected = Connected(public.model, public.layers)
    if data.example is not None:
        connected.check(data.loss, data.example)
    engine = sheltered(data.engine(connected))
    released = dp_snip_release(settings, connected, data.loss, data.read, engine, public.key, record, data.reduce)
    return dp.from_scores(public.layers, connected.by_layer(dp.saliency(released)), public.rate)


def _free(name: str, reason: str, record: Record) -> dp_accounting.DpEvent:
    event = free_event(reason)
    record(f"pruning by {name}: {reason}", event)
    return event


FREE: Mapping[str, Callable[[Public], Masks]] = {"random": random, "synflow": synflow}
FROM_DATA: Mapping[str, Callable[[Public, Sparsity, PrivateData, Record], Outcome]] = {
    "dp-snip": dp_snip,
    "snip-not-private": snip,
}
PRUNERS: Mapping[str, Any] = {**FREE, **FROM_DATA}
"""All criteria by name."""
