"""A small training job with a canary in it, run by the private step that trains every model, where an audit sees far.

Nothing of the step is replaced. The canary is data: rows whose loss is a steep function of one coordinate of the weights, so
that autograd and clipping make of it a gradient of length C along that coordinate. The other rows are ordinary, but for that
one coordinate, on which their gradient is zero: the most that an attacker who may choose all data can do for a clear view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from sparsedp.audit.bounds import log_likelihood_ratio
from sparsedp.config import Run
from sparsedp.dp.clipping import Engine, Rows, reference
from sparsedp.dp.ledger import Ledger, gaussian_event
from sparsedp.dp.masks import Masks, expand, maskable_layers, participating
from sparsedp.dp.mechanism import Settings, Step, private_step
from sparsedp.dp.randomness import Key, raw, uniform
from sparsedp.dp.selection import select
from sparsedp.dp.values import public
from sparsedp.models.layers import WSConv2d
from sparsedp.pruning import PrivateData, prune

CLASSES, SIDE = 3, 4
STEEP = 64.0
"""How many times longer than C the canary's gradient is before clipping."""
LEARNING_RATE = 0.05


@dataclass(frozen=True, kw_only=True)
class Power:
    """Settings at which few runs tell much: an epsilon of 4 to 8 in a handful of steps."""

    noise_multiplier: float
    sampling_rate: float
    steps: int

    def ledger(self, factor: float = 1.0) -> Ledger:
        """What the job spends, with all noise multiplied by a factor."""
        return Ledger().append("train", gaussian_event(self.sampling_rate, factor * self.noise_multiplier), self.steps)


EVERYONE = Power(noise_multiplier=2.0, sampling_rate=1.0, steps=4)
"""All units in every step: a Gaussian mechanism, mu = 1."""
SAMPLED = Power(noise_multiplier=1.0, sampling_rate=0.5, steps=6)
"""Poisson sampling, with enough of it at stake that a wrong rate shows."""


ONCE = Power(noise_multiplier=1.0, sampling_rate=1.0, steps=1)
ONCE_SAMPLED = Power(noise_multiplier=0.4, sampling_rate=0.5, steps=1)
"""For exact arithmetic, whose noise takes a hundred times longer to draw."""


def powers(run: Run) -> tuple[tuple[str, Power], ...]:
    """The settings at which a run's kind of step is attacked."""
    exact = run.mechanism.arithmetic == "exact"
    return ("all units", ONCE if exact else EVERYONE), ("sampled", ONCE_SAMPLED if exact else SAMPLED)


class Small(nn.Module):
    """A weight-standardised convolution and a linear layer: weights, gains and biases, 95 numbers."""

    def __init__(self, draw: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.conv, self.head = WSConv2d(1, 4, 3), nn.Linear(4 * SIDE * SIDE // 4, CLASSES)
        with torch.no_grad():
            for name, p in self.named_parameters():
                if not name.endswith("gain"):
                    p.copy_(draw(p.numel()).reshape(p.shape) - 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.avg_pool2d(functional.relu(self.conv(x)), 2).flatten(1))


class Watched(nn.Module):
    """The network, and a single coordinate of it as the canary sees it. Ordinary rows see that coordinate as a constant."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.watched = ("", 0)
        """Name of a parameter, and the coordinate in it."""

    def forward(self, x: Tensor | None = None, views: Tensor | None = None) -> Tensor:
        name, index = self.watched
        owner, _, own = name.rpartition(".")
        parameter = getattr(self.network.get_submodule(owner), own)  # a tensor in its place, under torch.func
        coordinate = parameter.reshape(-1)[index]
        if views is not None:
            return coordinate.expand(len(views))
        others = torch.ones(parameter.numel(), dtype=torch.bool)
        others[index] = False
        held = torch.where(others.reshape(parameter.shape), parameter, parameter.detach())
        return functional_call(self.network, {name: held}, (x,))


def watched_loss(output: Tensor, targets: Any) -> Tensor:
    """Cross entropy of an ordinary row; of the canary, the coordinate times its steepness, or a root at its edge."""
    if isinstance(targets, dict):
        return (output - output.detach()).sqrt()
    return output * targets if output.ndim == 1 else functional.cross_entropy(output, targets, reduction="none")


@dataclass(frozen=True)
class Canary:
    """What unit 0 does, where it takes part: `copies` of a gradient of `push` times C along a coordinate of `parameter`."""

    parameter: str = "conv.weight"
    push: float = STEEP
    copies: int = 1
    edge: bool = False
    """A loss that is finite while its gradient is not."""
    dropped: bool = False
    """Aim at a coordinate that the step's mask puts aside."""


class Trial:
    """The job of one sparsity, clipping norm, arithmetic and number of views, at settings with power.

    Without `company` the canary's is the only unit that has rows, which is quicker.
    """

    def __init__(self, run: Run, power: Power, key: Key, engine: Engine = reference, company: bool = True) -> None:
        self.power, self.engine, self.company, self.views = power, engine, company, run.data.views
        self.model = Watched(Small(lambda count: uniform(key, count, "audit weights", count)))
        self._start = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        units = round(2 / power.sampling_rate)
        self._rows = [self._ordinary(key, unit) for unit in range(units)]
        s, m = run.sparsity, run.mechanism
        self.settings = Settings(
            num_units=units, batch_size=units * power.sampling_rate, noise_multiplier=power.noise_multiplier, clip=m.clip,
            layers=maskable_layers(self.model, s.granularity), drop=s.drop, drop_rate=s.drop_rate, pruned=self._pruned(run, key),
            unit_norm=m.unit_norm, exact=m.arithmetic == "exact",
        )  # fmt: skip

    def play(self, key: Key, canary: Canary | None, record: Callable[[str, Any], None] = lambda what, event: None) -> float:
        """Train once; returns the log-likelihood ratio of "in" against "out" for what was released. No canary: out."""
        seen = np.array([self.observe(step, at) for step, at in self.steps(key, canary, record)])
        return float(log_likelihood_ratio(seen, self.settings.sampling_rate, self.power.noise_multiplier).sum())

    def steps(
        self, key: Key, canary: Canary | None, record: Callable[[str, Any], None]
    ) -> Iterator[tuple[Step, tuple[str, int]]]:
        """Every private step, and the coordinate that the attacker watches in it."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self._start[name])
        for number in range(self.power.steps):
            at = self._target(self.masks(key, number), canary or Canary(), number)
            self.model.watched = at
            step = private_step(
                self.settings,
                self.model,
                watched_loss,
                lambda units: self._read(units, canary),
                self.engine,
                key,
                number,
                record,
            )
            yield step, at
            with torch.no_grad():
                for name, p in self.model.named_parameters():
                    p -= LEARNING_RATE * step.gradient.tensors[name]

    def masks(self, key: Key, step: int) -> Masks:
        """The masks of a step, which the attacker may know: they are chosen from released weights."""
        s = self.settings
        return select(s.layers, s.drop, s.drop_rate, s.pruned, public(participating(self.model), "released"), key, step)

    @property
    def divisor(self) -> float:
        """What the released sum was divided by."""
        return self.settings.batch_size * (self.settings.clip if self.settings.unit_norm else 1.0)

    def observe(self, step: Step, at: tuple[str, int]) -> float:
        """The watched coordinate of the released sum, in units of C."""
        return float(step.gradient.tensors[f"network.{at[0]}"].reshape(-1)[at[1]]) * self.divisor / self.settings.clip

    def _target(self, masks: Masks, canary: Canary, step: int) -> tuple[str, int]:
        p = self.model.network.get_parameter(canary.parameter)
        name = f"network.{canary.parameter}"
        mask = expand(masks[name], p.shape).expand_as(p) if name in masks else torch.ones_like(p, dtype=torch.bool)
        places = (mask != canary.dropped).reshape(-1).nonzero().squeeze(1)
        return canary.parameter, int(places[(7919 * step) % len(places)])

    def _read(self, units: Tensor, canary: Canary | None) -> Iterator[Rows]:
        """The canary, as unit 0, where it is in and was sampled (as often as it was), and the others."""
        for unit in units.tolist():
            if unit > 0 and self.company:
                yield self._rows[unit]
            elif unit == 0 and canary is not None:
                push = torch.full((self.views,), canary.push * self.settings.clip)
                rows = Rows.make({"views": torch.zeros(self.views)}, {"edge": push} if canary.edge else push, views=self.views)
                yield from [rows] * canary.copies

    def _ordinary(self, key: Key, unit: int) -> Rows:
        pixels = uniform(key, self.views * SIDE * SIDE, "audit images", unit).float().reshape(self.views, 1, SIDE, SIDE)
        return Rows.make({"x": pixels}, torch.full((self.views,), unit % CLASSES), views=self.views)

    def _pruned(self, run: Run, key: Key) -> Masks:
        """The recipe's pre-pruning of the small network, on the small job's rows; its own release is audited by itself."""
        s = run.sparsity
        if s.prune == "none" or s.mask_file is not None:
            return {}
        rows = [replace(r, inputs=r.inputs["x"]) for r in self._rows]
        data = PrivateData(
            num_units=len(rows), read=lambda units: (rows[u] for u in units.tolist()),
            loss=lambda output, targets: functional.cross_entropy(output, targets, reduction="none"),
            noise_multiplier=1.0 if s.prune == "dp-snip" else None,
        )  # fmt: skip
        alone = replace(s, maskable=None, snip_noise_multiplier=1.0 if s.prune == "dp-snip" else None, snip_epsilon=None,
                        snip_share=None, snip_batch_size=None)  # fmt: skip
        found = prune(self.model.network, alone, key, input_shape=(1, SIDE, SIDE), data=data)
        return {f"network.{name}": mask for name, mask in found.masks.items()}


def own_key(key: Key, *place: int | str) -> Key:
    """A key for one of many independent runs."""
    return Key(raw(key, 32, "audit run", *place), given=True)


def parameters(trial: Trial) -> Mapping[str, int]:
    """The small network's parameters and their sizes."""
    return {name: p.numel() for name, p in trial.model.network.named_parameters()}
