"""The copy of a model whose only trained parameters are connectivity variables c = 1, for SNIP and DP-SNIP.

The gradient by c of the ordinary engines, clipped and noised by the ordinary code, is then the connection gradient. Masked
by weight, a layer has one c per entry, and the raw weight theta is replaced by theta * c (before any weight standardisation),
so that the gradient is theta * dL/dtheta. Masked by channel, it has one c per output channel on the whole *effective*
filter: the layer's output, less its bias, is multiplied by it, which under weight standardisation gives gain * dL/dgain.
(A c on the raw filter would have the gradient zero there: standardisation undoes every scaling.)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sparsedp.dp.masks import Layer, raw_weight
from sparsedp.dp.pruning import shape_of


class Connected(nn.Module):
    """A model seen as a function of its connectivity variables. Everything else is frozen, a copy, and in evaluation mode.

    In evaluation mode dropout is off and BatchNorm uses its stored statistics, so no example sees another.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.layers = tuple(layers)
        self.network = copy.deepcopy(model).requires_grad_(False)
        self._weights = dict(self.network.named_parameters())
        self.connections = nn.ParameterList(
            nn.Parameter(torch.ones(shape_of(la), dtype=self._weights[la.name].dtype, device=self._weights[la.name].device))
            for la in layers
        )
        self.eval()
        owners = {id(self._weights[layer.name]): place for place, layer in enumerate(layers) if layer.by_filter}
        for module in self.network.modules():
            place = owners.get(id(raw_weight(module)))
            if place is not None:
                module.register_forward_hook(self._scale_channels(place))

    def train(self, mode: bool = True) -> Connected:
        """Stays in evaluation mode, whatever an engine or a user asks for."""
        return super().train(False)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        scaled = {
            layer.name: self._weights[layer.name] * c
            for layer, c in zip(self.layers, self.connections, strict=True)
            if not layer.by_filter
        }
        return functional_call(self.network, scaled, inputs, keywords)

    def by_layer(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What belongs to each connectivity variable, under the name of its layer."""
        return {layer.name: tensors[f"connections.{place}"] for place, layer in enumerate(self.layers)}

    def _scale_channels(self, place: int) -> Any:
        def hook(module: nn.Module, _: Any, output: Tensor) -> Tensor:
            c, bias = self.connections[place], getattr(module, "bias", None)
            spatial = 0 if isinstance(module, nn.Linear) else self._spatial(module)
            c = c.reshape(-1, *[1] * spatial)
            if bias is None:
                return output * c
            shift = bias.reshape(-1, *[1] * spatial)
            return (output - shift) * c + shift

        return hook

    @staticmethod
    def _spatial(module: nn.Module) -> int:
        """How many dimensions follow the channels of a convolution's output."""
        weight = raw_weight(module)
        return 0 if weight is None else weight.ndim - 2
