"""From a clipped sum to a released one: Gaussian noise on the selected coordinates, and on no others.

The only place that makes a `Released` out of a `ClippedSum`. The scale is noise_multiplier times the sensitivity that the
sum carries. A sum of floats gets Gaussian noise in float64; a sum on an integer grid gets discrete Gaussian noise by
exact integer arithmetic, which the attacks on floating point cannot reach.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparsedp.dp.discrete import LARGEST_SCALE, discrete_gaussian
from sparsedp.dp.masks import Masks, restrict
from sparsedp.dp.randomness import Key, normal
from sparsedp.dp.values import ClippedSum, Released
from sparsedp.errors import require, wrong


def add_noise(total: ClippedSum, noise_multiplier: float, masks: Masks, key: Key, purpose: str, step: int) -> Released:
    """The sum plus N(0, (noise_multiplier * sensitivity)^2) on every coordinate of the masks; exact zeros elsewhere.

    Guarantee: the noise of a coordinate is a function of (key, purpose, step, parameter, coordinate), whatever the masks.
    Guarantee: no two steps, purposes or parameters share noise.
    """
    require(noise_multiplier >= 0, "noise_multiplier", noise_multiplier, "noise cannot be negative", "use 0 for none")
    if noise_multiplier == 0:
        require(total.grid is None, "noise_multiplier", 0, "exact arithmetic needs noise", "use arithmetic 'float'")
        return Released(restrict(total.tensors, masks), "not private: no noise")
    noised = {
        name: _noised(tensor, total, noise_multiplier, key, purpose, step, name) for name, tensor in total.tensors.items()
    }
    return Released(restrict(noised, masks), f"Gaussian noise, multiplier {noise_multiplier}, sensitivity {total.sensitivity}")


def _noised(tensor: Tensor, total: ClippedSum, noise_multiplier: float, key: Key, purpose: str, step: int, name: str) -> Tensor:
    place = ("noise", purpose, step, name)
    if total.grid is None:
        drawn = normal(key, 0, tensor.numel(), *place).reshape(tensor.shape)
        return (tensor.double() + (noise_multiplier * total.sensitivity) * drawn.to(tensor.device)).to(tensor.dtype)
    scale = round(noise_multiplier * total.sensitivity / total.grid)
    integers = torch.from_numpy(discrete_gaussian(scale, key, 0, tensor.numel(), *place)).reshape(tensor.shape)
    return ((tensor + integers.to(tensor.device)).double() * total.grid).float()


def grid_for(noise_multiplier: float, clip: float, dimensions: int) -> float:
    """The spacing of the integer grid for exact arithmetic: noise is a whole number of it, rounding costs < clip / 1000.

    Rounding `dimensions` coordinates moves a gradient by up to grid * sqrt(dimensions) / 2, which clipping must leave room for.
    """
    require(
        noise_multiplier > 0, "noise_multiplier", noise_multiplier, "exact arithmetic needs noise", "use arithmetic 'float'"
    )
    scale: int = 1 << max(0, math.ceil(math.log2(max(512 * noise_multiplier * math.sqrt(dimensions), 1))))
    if scale > LARGEST_SCALE:
        raise wrong(
            "the number of selected coordinates", dimensions, f"exact arithmetic at noise multiplier {noise_multiplier} has a grid "
            f"for at most {int((LARGEST_SCALE / 512 / noise_multiplier) ** 2)}", "drop more, or use arithmetic 'float'",
        )  # fmt: skip
    return noise_multiplier * clip / scale
