"""What the PyTorch workers share: the model, made-up data, the device's clock."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsedp import models
from sparsedp.config import Model

CLASSES = 10
LEARNING_RATE = 1e-3
"""Small, so that made-up data drives no weight to infinity in a few dozen steps."""

Data = tuple[Tensor, Tensor]


def made_up(spec: dict[str, Any]) -> Data:
    """Images and labels that a step is measured on: `batch` units of `views` rows."""
    generator = torch.Generator().manual_seed(0)
    rows = spec["batch"] * spec["views"]
    images = torch.randn(rows, *spec["shape"], generator=generator)
    labels = torch.randint(0, CLASSES, (rows,), generator=generator)
    if spec.get("layout", "channels_last") == "channels_last":
        images = images.contiguous(memory_format=torch.channels_last)
    return images.to(spec["device"]), labels.to(spec["device"])


def shipped_model(spec: dict[str, Any]) -> nn.Module:
    """The network of that name as sparsedp ships it."""
    model = models.build(Model(name=spec["model"]), tuple(spec["shape"]), CLASSES, torch.Generator().manual_seed(0))
    if spec.get("layout", "channels_last") == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    return model.to(spec["device"])


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """One loss per row."""
    return functional.cross_entropy(outputs, labels, reduction="none")


def finish(spec: dict[str, Any]) -> None:
    """Wait for the device."""
    if spec["device"].startswith("cuda"):
        torch.cuda.synchronize()


def device_memory(spec: dict[str, Any]) -> int | None:
    """The peak on a GPU; None on a CPU, where the process is asked."""
    return torch.cuda.max_memory_allocated() if spec["device"].startswith("cuda") else None
