"""Per-unit gradients of what is added or multiplied per channel: biases, and the affine parameters of norms."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparsedp.engines.operators import Call
from sparsedp.engines.products import position_sums
from sparsedp.engines.units import Units


def bias_gradients(call: Call, dy: Tensor, units: Units) -> Tensor:
    """The gradients by the bias, [units, *bias]."""
    if call.kind == "linear":
        return units.sum(dy.flatten(1, -2).sum(1) if dy.ndim > 2 else dy)
    if call.kind == "layer_norm":
        return units.sum(_over_positions(dy, call))
    return units.sum(position_sums(dy))


def scale_gradients(call: Call, x: Tensor, dy: Tensor, units: Units) -> Tensor:
    """The gradients by a norm's weight, [units, *weight]."""
    mean, scale = call.statistics if call.statistics is not None else _statistics(call, x)
    if call.kind == "layer_norm":
        return units.sum(_over_positions(dy * ((x - mean) * scale), call))
    groups = call.settings[0]
    products, sums = (position_sums(t).unflatten(1, (groups, -1)) for t in (dy * x, dy))
    return units.sum(((products - mean.reshape(len(x), groups, 1) * sums) * scale.reshape(len(x), groups, 1)).flatten(1))


def _over_positions(t: Tensor, call: Call) -> Tensor:
    leading = t.ndim - len(call.settings[0])
    return t.sum(tuple(range(1, leading))) if leading > 1 else t


def _statistics(call: Call, x: Tensor) -> tuple[Tensor, Tensor]:
    if call.kind == "layer_norm":
        dims = tuple(range(x.ndim - len(call.settings[0]), x.ndim))
        variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    else:
        grouped = x.reshape(len(x), call.settings[0], math.prod(x.shape[1:]) // call.settings[0])
        variance, mean = torch.var_mean(grouped, 2, correction=0)
    return mean, (variance + call.settings[1]).rsqrt()
