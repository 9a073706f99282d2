"""Which coordinates take part in a step. Chosen before the batch is drawn, from public and released values only.

Guarantee: nothing here can receive a batch. The signature is the proof: weights come as `Released`, coins from the key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsedp.dp.masks import Layer, Masks, combine, expand, keep_top, kept_count
from sparsedp.dp.randomness import Key, uniform
from sparsedp.dp.values import Released
from sparsedp.errors import unknown, wrong


@dataclass(frozen=True)
class Draw:
    """Random numbers of one layer at one step, for criteria that want some."""

    key: Key
    step: int
    layer: str

    def uniform(self, count: int) -> Tensor:
        """`count` numbers in (0, 1], the same each time they are asked for."""
        return uniform(self.key, count, "selection", self.step, self.layer)


Criterion = Callable[[Layer, Tensor, Draw], Tensor]
"""(layer, its current weight with zeros where it is pruned, draw) -> scores, of the weight's shape, or one per channel under
`filter`. The highest scores stay."""


def random(layer: Layer, weight: Tensor, draw: Draw) -> Tensor:
    """A fresh subset at every step, uniform among those of its size."""
    shape = weight.shape[:1] if layer.by_filter else weight.shape
    return draw.uniform(shape.numel()).reshape(shape).to(weight.device)


def magnitude(layer: Layer, weight: Tensor, draw: Draw) -> Tensor:
    """Small weights are dropped; under `filter`, channels of small norm."""
    return weight.double().flatten(1).norm(dim=1) if layer.by_filter else weight.abs()


CRITERIA: Mapping[str, Criterion] = {"random": random, "magnitude": magnitude}


def select(
    layers: Sequence[Layer],
    criterion: str | Criterion,
    rate: float,
    pruned: Masks,
    weights: Released,
    key: Key,
    step: int,
) -> Masks:
    """The mask of every layer at this step: of what pre-pruning left, exactly the best `kept_count` by the criterion.

    `criterion` "none" or rate 0 drops nothing. Parameters that are not among `layers` always take part.
    """
    if criterion == "none" or rate == 0.0:
        return pruned
    if isinstance(criterion, str):
        if criterion not in CRITERIA:
            raise unknown("drop criterion", criterion, ["none", *CRITERIA])
        criterion = CRITERIA[criterion]
    chosen = {
        layer.name: _of_layer(
            layer, criterion, rate, pruned.get(layer.name), weights.tensors[layer.name], Draw(key, step, layer.name)
        )
        for layer in layers
    }
    return combine(pruned, chosen)


def _of_layer(layer: Layer, criterion: Criterion, rate: float, pruned: Tensor | None, weight: Tensor, draw: Draw) -> Tensor:
    alive = torch.ones_like(weight, dtype=torch.bool) if pruned is None else expand(pruned, weight.shape).expand_as(weight)
    scores = criterion(layer, torch.where(alive, weight.detach(), torch.zeros_like(weight)), draw)
    eligible = alive.flatten(1).any(dim=1) if layer.by_filter else alive
    if scores.shape != eligible.shape:
        raise wrong(
            f"the drop criterion's scores for {layer.name}", tuple(scores.shape), f"they must have shape {tuple(eligible.shape)}",
            "return one score per coordinate, or per output channel under filter",
        )  # fmt: skip
    return keep_top(scores, kept_count(int(eligible.sum()), rate), eligible)
