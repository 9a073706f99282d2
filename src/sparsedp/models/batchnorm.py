"""Two ways out of BatchNorm, which mixes examples: GroupNorm in its place, or its statistics frozen. Both are said aloud."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparsedp.errors import together

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
GROUPS = 16
Made = TypeVar("Made", bound=nn.Module)


@dataclass(frozen=True)
class BatchNormReport:
    """What was done, and what became of each BatchNorm, by its path in the model."""

    done: str
    modules: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        parts = ", ".join(f"{path or 'the model'} -> {what}" for path, what in self.modules)
        return f"{self.done}: {parts}" if self.modules else "the model has no BatchNorm"


class FrozenStatistics:
    """Mixed into a BatchNorm: its statistics are used as they are and never change, whatever `train()` says."""

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)  # type: ignore[misc]
        self.training = False
        return self  # type: ignore[return-value]


class GroupNormAct(nn.GroupNorm):
    """What a BatchNormAct2d of timm becomes: it normalises, and then applies that module's own `drop` and `act`."""

    drop: nn.Module
    act: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        activated: Tensor = self.act(self.drop(super().forward(x)))
        return activated


def convert_batchnorm(model: nn.Module, groups: int | Literal["auto"] = "auto") -> tuple[nn.Module, BatchNormReport]:
    """Put GroupNorm in the place of every BatchNorm, with its gain and bias; running statistics are lost.

    timm's BatchNorm with an activation inside keeps that activation.
    `auto` takes 16 groups, or as many up to 16 as divide the channels (for BatchNorm1d, with two channels a group at least).
    """
    found = batchnorms(model)
    problems = [problem for path, module in found.items() if (problem := _why_not_group(path, module, groups))]
    if problems:
        raise together("BatchNorm cannot be converted to GroupNorm here:", problems)
    model, made = _replace(model, lambda module: _group_norm(module, groups))
    return model, BatchNormReport("BatchNorm became GroupNorm", tuple((p, f"{m.num_groups} groups") for p, m in made.items()))


def freeze_batchnorm(model: nn.Module) -> tuple[nn.Module, BatchNormReport]:
    """Fix the statistics of every BatchNorm at what they are now. Its gain and bias may still train; names stay."""
    found = batchnorms(model)
    problems = [problem for path, module in found.items() if (problem := _why_not_freeze(path, module))]
    if problems:
        raise together("BatchNorm cannot be frozen here:", problems)
    model, made = _replace(model, _frozen)
    return model, BatchNormReport("BatchNorm keeps its statistics", tuple((path, "frozen") for path in made))


def batchnorms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Every BatchNorm whose statistics are not frozen, by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, FrozenStatistics)
    }


def _why_not_group(path: str, module: _BatchNorm, groups: int | str) -> str:
    if type(module) not in PLAIN and not _activates(module):
        return f"{path} is a {type(module).__name__}, which may do more than normalise; freeze it, or take a model without it."
    if groups != "auto" and (int(groups) < 1 or module.num_features % int(groups)):
        return f"{path} has {module.num_features} channels, which {groups} groups do not divide; use groups='auto'."
    if isinstance(module, nn.BatchNorm1d) and module.num_features == 1:
        return f"{path} has one channel, whose GroupNorm would be zero; freeze it, or remove it."
    return ""


def _activates(module: nn.Module) -> bool:
    """Whether it is timm's BatchNorm with an activation, known by its name, so that timm need not be there."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("timm.layers.norm_act", "BatchNormAct2d")


def _why_not_freeze(path: str, module: _BatchNorm) -> str:
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        return f"{path} has no size yet; run the model once on a blank image."
    if module.running_mean is None or module.running_var is None:
        return f"{path} has no running statistics to freeze (track_running_stats is False); convert it to GroupNorm."
    return ""


def _groups_for(module: _BatchNorm) -> int:
    per_group = 2 if isinstance(module, nn.BatchNorm1d) else 1
    most = min(GROUPS, module.num_features // per_group)
    return max(count for count in range(1, most + 1) if module.num_features % count == 0)


def _group_norm(module: _BatchNorm, groups: int | str) -> nn.GroupNorm:
    count = _groups_for(module) if groups == "auto" else int(groups)
    kind = GroupNormAct if _activates(module) else nn.GroupNorm
    made = kind(count, module.num_features, eps=module.eps, affine=module.affine)
    made.train(module.training)
    for name, child in module.named_children():
        made.add_module(name, child)
    for name in ("weight", "bias") if module.affine else ():
        old = getattr(module, name)
        setattr(made, name, nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad))
    return made


def _frozen(module: _BatchNorm) -> nn.Module:
    """The same module, parameters and buffers included, as an instance of its class with frozen statistics."""
    made: nn.Module = object.__new__(_frozen_class(type(module)))
    made.__dict__.update(module.__dict__)
    return made.train(module.training)


@functools.cache
def _frozen_class(kind: type[_BatchNorm]) -> type[nn.Module]:
    return type(f"Frozen{kind.__name__}", (FrozenStatistics, kind), {"__doc__": FrozenStatistics.__doc__})


def _replace(model: nn.Module, make: Callable[[_BatchNorm], Made]) -> tuple[nn.Module, dict[str, Made]]:
    """Replace every BatchNorm, one that is used in several places by one; returns the model and what was made, by path."""
    old = batchnorms(model)
    new = {id(module): make(module) for module in old.values()}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if id(child) in new:
                setattr(parent, name, new[id(child)])
    return new.get(id(model), model), {path: new[id(module)] for path, module in old.items()}
