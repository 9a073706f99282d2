"""What the answer must be, computed in the most obvious way: one row at a time, plain backward, numpy, float64.

Nothing here uses `sparsedp`, so that an error there cannot hide behind the same error here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

Arrays = dict[str, np.ndarray]
Unit = Sequence[tuple[Tensor, Tensor]]
"""The (input, target) rows of one privacy unit."""


def unit_gradient(model: nn.Module, loss: Callable[[Any, Any], Tensor], unit: Unit) -> Arrays | None:
    """The gradient of the mean loss over the unit's rows, of each trained parameter; None when a loss is not finite."""
    twin = copy.deepcopy(model).double()
    mean: Arrays = {n: np.zeros(tuple(p.shape)) for n, p in twin.named_parameters() if p.requires_grad}
    for row, target in unit:
        twin.zero_grad(set_to_none=True)
        value = loss(twin(row.double().unsqueeze(0) if row.is_floating_point() else row.unsqueeze(0)), target.unsqueeze(0))
        if not math.isfinite(value.item()):
            return None
        value.sum().backward()
        for name, parameter in twin.named_parameters():
            if parameter.requires_grad and parameter.grad is not None:
                mean[name] += parameter.grad.numpy() / len(unit)
    return mean


def clip_to(
    gradient: Arrays | None, shapes: Mapping[str, tuple[int, ...]], masks: Mapping[str, np.ndarray], clip: float
) -> Arrays:
    """The gradient on the masks' coordinates, scaled to norm `clip` if it is longer; zero if it is not finite there."""
    if gradient is None:
        return {name: np.zeros(shape) for name, shape in shapes.items()}
    kept = {}
    for name, g in gradient.items():
        kept[name] = g.copy()
        if name in masks:
            mask = masks[name]
            full = mask if mask.shape == g.shape else np.broadcast_to(mask.reshape(-1, *[1] * (g.ndim - 1)), g.shape)
            kept[name][~full] = 0.0
    length = norm(kept)
    if not math.isfinite(length):
        return {name: np.zeros(shape) for name, shape in shapes.items()}
    return {name: g * min(1.0, clip / length) if length > 0 else g for name, g in kept.items()}


def clipped_sum(
    model: nn.Module, loss: Callable[[Any, Any], Tensor], units: Sequence[Unit], masks: Mapping[str, Tensor], clip: float
) -> Arrays:
    """The sum over units of their clipped gradients."""
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad}
    plain = {name: mask.numpy() for name, mask in masks.items()}
    total = {name: np.zeros(shape) for name, shape in shapes.items()}
    for unit in units:
        for name, g in clip_to(unit_gradient(model, loss, unit), shapes, plain, clip).items():
            total[name] += g
    return total


def norm(tensors: Mapping[str, Any]) -> float:
    """L2 norm over all tensors together, in float64."""
    return math.sqrt(sum(float(np.sum(np.asarray(t, dtype=np.float64) ** 2)) for t in tensors.values()))


def distance(first: Mapping[str, Any], second: Mapping[str, Any]) -> float:
    """L2 distance over all tensors together, in float64."""
    assert first.keys() == second.keys()
    return norm({n: np.asarray(first[n], np.float64) - np.asarray(second[n], np.float64) for n in first})


def discrete_gaussian_pmf(scale: float, reach: int) -> np.ndarray:
    """Probabilities of -reach..reach under the discrete Gaussian, normalised over a far wider range."""
    wide = np.arange(-20 * max(reach, int(10 * scale)), 20 * max(reach, int(10 * scale)) + 1, dtype=np.float64)
    weights = np.exp(-(wide**2) / (2 * scale**2))
    middle = len(wide) // 2
    return weights[middle - reach : middle + reach + 1] / weights.sum()
