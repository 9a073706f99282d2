"""Norms and sums in full float32, whatever shortcuts a model is allowed: autocast, TensorFloat-32, bfloat16 inside products.

A clip factor bounds the gradient that its norm was taken of. Where the sum is formed again from its factors by a product of
ten or eight bits, it is another gradient, and may be longer. So norms and sums never take these shortcuts; the model may.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def in_full(where: nn.Module | Tensor) -> Iterator[None]:
    """No autocast and no shortened products in this block; afterwards all is as it was."""
    tensor = next(where.parameters()) if isinstance(where, nn.Module) else where
    with ExitStack() as stack:
        stack.enter_context(torch.autocast(tensor.device.type, enabled=False))
        if tensor.dtype != torch.float64:
            stack.enter_context(exact_products())
        yield


@contextmanager
def exact_products() -> Iterator[None]:
    """Products and convolutions of float32 numbers in float32."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in _SWITCHES]
    changed = [(switch, found) for switch, found in zip(_SWITCHES, before, strict=True) if switch[2] != found[2]]
    for (owner, name, exact), _ in changed:
        setattr(owner, name, exact)
    try:
        yield
    finally:
        for _, (owner, name, value) in changed:
            setattr(owner, name, value)


def made_in_full(output: Tensor) -> bool:
    """Whether what a convolution made just now is as precise as norms must be: under autocast, say, it is not."""
    if output.dtype != torch.float32:
        return output.dtype == torch.float64
    backend = torch.backends.cudnn if output.device.type == "cuda" else torch.backends.mkldnn
    if hasattr(backend, "conv"):
        return backend.conv.fp32_precision in ("ieee", "none")
    return backend is torch.backends.mkldnn or not torch.backends.cudnn.allow_tf32


def _switches() -> list[tuple[Any, str, Any]]:
    """(where, the switch's name, its exact position), in this version of torch."""
    backends = torch.backends
    if hasattr(backends.cudnn, "conv"):
        owners = [backends.cudnn.conv, backends.cuda.matmul, backends.mkldnn.conv, backends.mkldnn.matmul]
        return [(owner, "fp32_precision", "ieee") for owner in owners]
    return [(backends.cudnn, "allow_tf32", False), (backends.cuda.matmul, "allow_tf32", False)]


_SWITCHES = _switches()
