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

from sparsedp.dp.clipping import Loss, Rows, row_losses
from sparsedp.dp.masks import Layer, raw_weight
from sparsedp.dp.pruning import shape_of
from sparsedp.engines.fitness import UNITS, devices_of, shaken
from sparsedp.engines.made_up import made_up_rows
from sparsedp.errors import UsageError


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

    def check(self, loss: Loss, rows_like: Rows) -> None:
        """Raise where a weight is used in a way that its connections do not see; made-up rows shaped like these tell.

        A connection by channel sits on the output of the weight's module. Attention's last layer, say, is never called.
        """
        places = [place for place, layer in enumerate(self.layers) if layer.by_filter]
        weights = [self._weights[self.layers[place].name] for place in places]
        rows = made_up_rows(rows_like, UNITS)
        try:
            self.network.requires_grad_(True)
            with shaken(self), torch.random.fork_rng(devices_of(self)):
                by_weight = self._gradients(loss, rows, weights)
                self.network.requires_grad_(False)  # as in the release itself: a model may take another path then
                by_connection = self._gradients(loss, rows, [self.connections[place] for place in places])
        finally:
            self.network.requires_grad_(False)
        blind = [
            self.layers[place].name
            for place, own, weight in zip(places, by_connection, by_weight, strict=True)
            if bool(weight.count_nonzero()) and not bool(own.count_nonzero())
        ]
        if blind:
            raise UsageError(
                f"DP-SNIP cannot score {', '.join(blind)} by filter: the model uses such a weight without calling its layer, so the "
                "connections on the layer's output change nothing; use granularity 'weight', or leave it out with maskable."
            )

    def _gradients(self, loss: Loss, rows: Rows, wanted: Sequence[Tensor]) -> Sequence[Tensor]:
        if not wanted:
            return ()
        losses = row_losses(self, loss, rows.inputs, rows.targets)
        return torch.autograd.grad(losses.sum(), list(wanted), allow_unused=True, materialize_grads=True)

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
