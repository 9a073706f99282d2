"""Optimisers, schedules and the moving average, by name, from torch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel

from sparsedp.config import Optim
from sparsedp.errors import UsageError, unknown

NAMES = sorted(
    name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    and kind not in (torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam)
)  # fmt: skip


def optimizer_for(model: nn.Module, settings: Optim) -> torch.optim.Optimizer:
    """The torch.optim optimiser of that name over the parameters that train."""
    if settings.name not in NAMES:
        raise unknown("optim.name", settings.name, NAMES)
    kind: type[torch.optim.Optimizer] = getattr(torch.optim, settings.name)
    takes = inspect.signature(kind).parameters
    options = {"lr": settings.lr}
    for name in ("momentum", "weight_decay"):
        value = getattr(settings, name)
        if name in takes:
            options[name] = value
        elif value:
            raise UsageError(f"optim.{name} is {value}, but {settings.name} has no such setting; leave it at 0 or use SGD.")
    return kind([p for p in model.parameters() if p.requires_grad], **options)


def schedule(settings: Optim, steps: int) -> Callable[[int], float]:
    """Step -> factor on the learning rate."""

    def factor(step: int) -> float:
        if step < settings.warmup:
            return (step + 1) / settings.warmup
        done = (step - settings.warmup) / max(1, steps - settings.warmup)
        if settings.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        return 1.0 if settings.schedule == "constant" else max(0.0, 1.0 - done)

    return factor


def scheduler_for(optimizer: torch.optim.Optimizer, settings: Optim, steps: int) -> LambdaLR:
    """torch's scheduler for that factor."""
    return LambdaLR(optimizer, schedule(settings, steps))


def average_of(model: nn.Module, decay: float) -> AveragedModel:
    """torch's averaged model, once per logical step, starting from the initial weights, with decay min(d, (1 + t) / (10 + t))."""

    def blend(average: Tensor, current: Tensor, count: Tensor | int) -> Tensor:
        t = int(count) - 1
        d = min(decay, (1 + t) / (10 + t))
        return average + (current - average) * (1 - d)

    averaged = AveragedModel(model, avg_fn=blend)
    averaged.n_averaged += 1  # the initial weights count as the first, or torch would overwrite them with the second
    return averaged
