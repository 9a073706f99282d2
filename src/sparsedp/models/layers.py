"""Convolutions with TensorFlow's "same" padding, plain and weight-standardised.

The forward passes are made of ordinary functional operators, so that whatever intercepts operators sees all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsedp.errors import require

FLOOR = 1e-4
"""The least value of variance * fan-in that a filter is divided by (its square root)."""


def same_padding(size: int, kernel: int, stride: int, dilation: int = 1) -> tuple[int, int]:
    """Padding before and after, such that ceil(size / stride) positions come out; the odd one goes after."""
    reach = dilation * (kernel - 1) + 1
    total = max((math.ceil(size / stride) - 1) * stride + reach - size, 0)
    return total // 2, total - total // 2


def centre(weight: Tensor, kept: Tensor | None = None) -> Tensor:
    """Each filter less its mean. With `kept`, mean and result concern the kept entries; the others are exactly zero."""
    axes = tuple(range(1, weight.ndim))
    if kept is None:
        return weight - weight.mean(axes, keepdim=True)
    stays = kept.reshape(-1, *[1] * len(axes)) if kept.ndim == 1 else kept
    nothing = weight.new_zeros(())
    count = stays.expand_as(weight).sum(axes, keepdim=True).clamp_min(1)
    mean = torch.where(stays, weight, nothing).sum(axes, keepdim=True) / count
    return torch.where(stays, weight - mean, nothing)


def scale_of(centred: Tensor, gain: Tensor) -> Tensor:
    """The factor of each centred filter, [out, 1, 1, 1]: gain / sqrt(max(variance * fan-in, FLOOR))."""
    axes = tuple(range(1, centred.ndim))
    spread = (centred * centred).sum(axes, keepdim=True)  # variance * fan-in
    return gain.reshape(spread.shape) * spread.clamp_min(FLOOR).rsqrt()


class SameConv2d(nn.Conv2d):
    """A convolution padded with zeros as TensorFlow's "same" has it: asymmetric where stride and size ask for it."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, dilation=dilation, groups=groups, bias=bias)
        self.padding = "same"  # F.conv2d refuses this word at stride 2, so nobody can take it for symmetric padding

    def pads(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Left, right, top and bottom padding of an image of this size, in the order of `F.pad`."""
        top, bottom = same_padding(height, self.kernel_size[0], self.stride[0], self.dilation[0])
        left, right = same_padding(width, self.kernel_size[1], self.stride[1], self.dilation[1])
        return left, right, top, bottom

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """This layer's convolution with any weight. Copies the image only where the padding is asymmetric."""
        left, right, top, bottom = self.pads(x.shape[-2], x.shape[-1])
        if (left, top) == (right, bottom):
            return functional.conv2d(x, weight, bias, self.stride, (top, left), self.dilation, self.groups)
        padded = functional.pad(x, (left, right, top, bottom))
        return functional.conv2d(padded, weight, bias, self.stride, 0, self.dilation, self.groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolve(x, self.weight, self.bias)


class WSConv2d(SameConv2d):
    """A convolution whose filters are standardised: w^ = (w - mean) * gain * rsqrt(max(variance * fan-in, 1e-4)).

    Mean and variance are over (in, height, width) of each output channel. As variance * fan-in is the centred filter's
    squared length, w^ is `gain` times a unit vector wherever the floor is not active.

    `kept`, a bool buffer of the weight's shape or with one entry per output channel, exists only after `prune`. Pruned
    entries of w^ are then exactly zero, and mean, variance and fan-in are of the entries that are left: the fan-in too,
    because only so does a filter keep length `gain`, and its output the spread that it had, however few entries are
    left. (A filter with one entry left is zero, as one number less its mean is; one with none left is zero as well.)
    A pruned raw entry is inert: it has no effect on the output and a zero gradient, whatever its value.
    """

    kept: Tensor | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, dilation, groups)
        self.gain = nn.Parameter(torch.empty(out_channels))
        self.register_buffer("kept", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight N(0, 1 / fan-in), gain 1, bias 0."""
        if not hasattr(self, "gain"):
            return  # nn.Conv2d calls this before the gain exists
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.weight[0].numel()))
        nn.init.ones_(self.gain)
        nn.init.zeros_(self.bias)

    def prune(self, kept: Tensor) -> None:
        """Remove entries (False in `kept`) from the function that this layer computes, for good."""
        legal = (tuple(self.weight.shape), (self.out_channels,))
        require(
            tuple(kept.shape) in legal, "the mask's shape", tuple(kept.shape), f"this layer takes {legal[0]} or {legal[1]}",
            "make the mask for this model",
        )  # fmt: skip
        self.kept = kept.detach().to(device=self.weight.device, dtype=torch.bool, copy=True)

    def centred(self) -> Tensor:
        """The filters less their means, zero where pruned."""
        return centre(self.weight, self.kept)

    def scale(self) -> Tensor:
        """What the centred filters are multiplied by, one number per output channel, [out, 1, 1, 1]."""
        return scale_of(self.centred(), self.gain)

    def effective_weight(self) -> Tensor:
        """The weight that the image is convolved with."""
        centred = self.centred()
        return centred * scale_of(centred, self.gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolve(x, self.effective_weight(), self.bias)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """A saved pruned layer is loaded as one, although the fresh layer has no `kept` yet."""
        saved = state_dict.get(prefix + "kept")
        if saved is not None and self.kept is None:
            self.prune(saved)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def truncated_normal_(weight: Tensor, std: float) -> Tensor:
    """Fill with a normal distribution cut at two deviations, widened so that its deviation after the cut is `std`."""
    wide = std / 0.8796256610342398  # the deviation of N(0, 1) cut at -2 and 2
    return nn.init.trunc_normal_(weight, std=wide, a=-2 * wide, b=2 * wide)
