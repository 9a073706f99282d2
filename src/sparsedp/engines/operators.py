"""The operators that have rules, and how their arguments are read. Anything unusual is declined, and autograd keeps it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsedp.engines.units import channels_last


@dataclass(eq=False)
class Call:
    """A call of an operator, its arguments sorted. `statistics` is what a norm remembers of its input, where it says so."""

    kind: str
    input: Any
    weight: Tensor | None
    bias: Tensor | None
    settings: tuple[Any, ...]
    statistics: tuple[Tensor, Tensor] | None = None

    def run(self, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The operator's output with these weights."""
        return _RUN[self.kind](self, weight, bias)


def _convolution(dims: int) -> Callable[..., Call | None]:
    def read(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Call | None:
        stride, dilation = _tuple(stride, dims), _tuple(dilation, dims)
        if input.ndim != dims + 2 or input.is_complex():
            return None
        if padding == "valid":
            padding = 0
        elif padding == "same":
            reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
            if any(r % 2 for r in reach) or any(s != 1 for s in stride):
                return None
            padding = [r // 2 for r in reach]
        return Call("conv", input, weight, bias, (stride, _tuple(padding, dims), dilation, groups))

    return read


def _run_convolution(call: Call, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    stride, padding, dilation, groups = call.settings
    run = {3: torch.conv1d, 4: torch.conv2d, 5: torch.conv3d}[call.input.ndim]
    return run(call.input, weight, bias, stride, padding, dilation, groups)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Call | None:
    return Call("linear", input, weight, bias, ()) if input.ndim >= 2 and weight.ndim == 2 else None


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Call | None:
    if input.ndim < 2:
        return None
    return Call("group_norm", input, weight, bias, (num_groups, eps))


def _run_group_norm(call: Call, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    groups, eps = call.settings
    rows, channels = call.input.shape[:2]
    if channels % groups or not _plain(call.input, weight, bias):
        return F.group_norm(call.input, groups, weight, bias, eps)
    output, mean, scale = torch.native_group_norm(
        _dense(call.input), weight, bias, rows, channels, math.prod(call.input.shape[2:]), groups, eps
    )  # fmt: skip
    call.statistics = (mean.detach(), scale.detach())
    return output


def _dense(x: Tensor) -> Tensor:
    """In a layout that the native norm takes: on a CPU channels last as well, elsewhere the usual one alone."""
    return x if x.device.type == "cpu" and channels_last(x) else x.contiguous()


def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Call | None:  # fmt: skip
    if input.ndim <= len(normalized_shape):
        return None
    return Call("layer_norm", input, weight, bias, (tuple(normalized_shape), eps))


def _run_layer_norm(call: Call, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if not _plain(call.input, weight, bias):
        return F.layer_norm(call.input, call.settings[0], weight, bias, call.settings[1])
    output, mean, scale = torch.native_layer_norm(call.input, call.settings[0], weight, bias, call.settings[1])
    call.statistics = (mean.detach(), scale.detach())
    return output


def _plain(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """One type throughout: the native norms take no mixture that autocast would make."""
    return all(t is None or t.dtype == input.dtype for t in (weight, bias)) and not torch.is_autocast_enabled(input.device.type)


def _tuple(value: Any, length: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, tuple | list) else (value,)
    return values * length if len(values) == 1 else values


OPERATORS: dict[Any, Callable[..., Call | None]] = {
    torch.conv1d: _convolution(1),
    torch.conv2d: _convolution(2),
    torch.conv3d: _convolution(3),
    F.linear: _linear,
    F.group_norm: _group_norm,
    torch.group_norm: _group_norm,
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
}

_RUN: dict[str, Callable[[Call, Tensor | None, Tensor | None], Tensor]] = {
    "conv": _run_convolution,
    "linear": lambda call, weight, bias: F.linear(call.input, weight, bias),
    "group_norm": _run_group_norm,
    "layer_norm": _run_layer_norm,
}
