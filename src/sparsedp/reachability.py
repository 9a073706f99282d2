"""Which units a pruned network can still reach: those to which some path of unpruned weights leads from the input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparsedp.dp.masks import Masks, expand, maskable_layers, participating
from sparsedp.linearise import Linearised


@dataclass(frozen=True)
class Unreachable:
    """Shares of units that no unpruned path reaches: of the model's outputs, of all units, and of each layer's channels."""

    outputs: float
    units: float
    by_layer: Mapping[str, float]


def unreachable_units(model: nn.Module, masks: Masks, input_shape: Sequence[int]) -> Unreachable:
    """Send ones through the linearised network with weight 1 where the mask is True and 0 elsewhere: what is zero is cut off.

    A path goes through unpruned weights alone; residual branches and pooling let it pass. What is counted for a layer is
    its output channels. (Under `keep` a pruned weight still carries signal, but none that training can change.)
    """
    trained = participating(model)
    layers = [layer for layer in maskable_layers(model) if layer.name in masks]
    weights = {
        la.name: expand(masks[la.name], la.shape).expand(la.shape).to(trained[la.name].device, torch.float64) for la in layers
    }
    reached: dict[str, Tensor] = {}

    def observe(name: str, value: Tensor, channel: int) -> None:
        here = value.movedim(channel, 0).flatten(1).amax(1) > 0
        reached[name] = reached[name] | here if name in reached else here

    with torch.no_grad():
        outputs = Linearised(model, layers, input_shape, torch.float64).outputs(weights, observe)
    ends = torch.cat([(out.value > 0).flatten() for out in outputs])
    everywhere = torch.cat([*reached.values()])
    return Unreachable(_cut(ends), _cut(everywhere), {name: _cut(units) for name, units in reached.items()})


def _cut(reached: Tensor) -> float:
    return 1.0 - float(reached.double().mean())
