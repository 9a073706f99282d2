"""Runs of a few private steps on made-up data: what the tests of the mechanism, of invariance and of replay have in common."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsedp.dp.clipping import Rows, reference
from sparsedp.dp.masks import maskable_layers
from sparsedp.dp.mechanism import Settings, Step, private_step
from sparsedp.dp.sampling import micro_batches
from tests.made_up import KEY, World, as_rows, cross_entropy
from tests.replay import tensors_of


def settings_for(world: World, granularity: str = "weight", **changes: Any) -> Settings:
    """Settings of a step on this world: its masks are what pre-pruning left."""
    given = {
        "num_units": len(world.units), "batch_size": max(1.0, len(world.units) / 2), "noise_multiplier": 1.0, "clip": world.clip,
        "layers": maskable_layers(world.model, granularity), "pruned": world.masks,
    }  # fmt: skip
    return Settings(**(given | changes))


@dataclass
class Trace:
    """Everything that a run leaves behind, but for what went into the noise function."""

    events: list[tuple[str, Any]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    optimiser: dict[str, Any] = field(default_factory=dict)


def reader(
    world: World, micro_batch: int = 3, seen: Callable[[Tensor], None] = lambda units: None
) -> Callable[[Tensor], Iterator[Rows]]:
    """Reads a world's units, some at a time; tells which."""

    def read(units: Tensor) -> Iterator[Rows]:
        seen(units)
        for part in micro_batches(units, micro_batch):
            yield as_rows([world.units[i] for i in part.tolist()], world.dtype)

    return read


def run(world: World, settings: Settings, steps: int = 3, micro_batch: int = 3, momentum: float = 0.9) -> Trace:
    """A few private steps on a copy of the model, with an ordinary optimiser."""
    model, trace = copy.deepcopy(world.model), Trace()
    optimiser = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1, momentum=momentum)
    for step in range(steps):
        done = private_step(
            settings,
            model,
            cross_entropy,
            reader(world, micro_batch),
            reference,
            KEY,
            step,
            lambda *event: trace.events.append(event),
        )
        trace.steps.append(done)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.grad = done.gradient.tensors[name].to(parameter.dtype)
        optimiser.step()
    trace.weights, trace.optimiser = tensors_of(model), copy.deepcopy(optimiser.state_dict())
    return trace
