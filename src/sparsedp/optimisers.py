"""Keeps an optimiser honest: dropped coordinates and their state stay where they are, and only private gradients are applied.

Works through torch.optim's public step hooks; the optimiser, the model and their methods are not replaced or rebound.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparsedp.dp.masks import Masks, expand, participating
from sparsedp.errors import UsageError


class Guard:
    """Watches one optimiser. `arm` hands it a private gradient; the optimiser's next step applies it, exactly once checked."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, drops: bool = True) -> None:
        _check_kind(optimizer, drops)
        _check_parameters(model, optimizer)
        self._model, self._optimizer = model, optimizer
        self._masks: Masks = {}
        self._given: dict[str, tuple[Tensor, int]] = {}
        self._saved: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}
        self._initial: dict[tuple[int, int], dict[str, float]] = {}
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def detach(self) -> None:
        """Let the optimiser go; it is an ordinary one again."""
        for handle in self._handles:
            handle.remove()

    def arm(self, gradient: Mapping[str, Tensor], masks: Masks) -> None:
        """Put the private gradient where the optimiser reads it, and remember what it must not move."""
        self._masks = masks
        for p in self._untrained():
            p.grad = None
        for name, p in participating(self._model).items():
            p.grad = gradient[name].to(dtype=p.dtype, device=p.device)
            self._given[name] = (p.grad, p.grad._version)

    def refuse_waste(self) -> None:
        """Raise if a private gradient was handed out and never applied: what it cost would be lost."""
        if self._given:
            raise UsageError(
                "private.backward was called again before optimizer.step(), so the gradient that was paid for before would be lost; "
                "call optimizer.step() once after every private.backward(batch)."
            )

    def _untrained(self) -> list[Tensor]:
        """What the optimiser holds and the private step does not train: frozen parameters, which must not move at all."""
        trained = {id(p) for p in participating(self._model).values()}
        return [p for group in self._optimizer.param_groups for p in group["params"] if id(p) not in trained]

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(callable(a) for a in (*args[1:], *kwargs.values())):
            raise UsageError(
                "optimizer.step was given a closure, but a closure evaluates the loss outside the private step; call step() without one."
            )
        trained = participating(self._model)
        if self._given.keys() != trained.keys():
            raise UsageError(
                "optimizer.step was called before a private gradient was computed, so it would apply one that is not private; "
                "call private.backward(batch) first, once for every optimizer.step()."
            )
        if any(p.grad is not None for p in self._untrained()):
            raise UsageError(
                "a frozen parameter in the optimiser has a gradient, which is not private; leave .grad alone between "
                "private.backward(batch) and optimizer.step(), or take frozen parameters out of the optimiser."
            )
        for name, p in trained.items():
            given, version = self._given[name]
            if p.grad is not given or p.grad._version != version:
                raise UsageError(
                    f"the gradient of {name} was changed after private.backward, so it may not be private any more; "
                    "leave .grad alone between private.backward(batch) and optimizer.step()."
                )
        self._saved = {
            name: (trained[name].detach().clone(), _elementwise_state(optimizer, trained[name], clone=True))
            for name, mask in self._masks.items()
            if name in trained and not bool(mask.all())
        }

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trained = participating(self._model)
        with torch.no_grad():
            for name, (value, state) in self._saved.items():
                p = trained[name]
                keep = expand(self._masks[name], p.shape).to(p.device)
                p.copy_(torch.where(keep, p, value))
                for entry, tensor in _elementwise_state(optimizer, p).items():
                    before = state.get(entry)
                    if before is None:
                        before = torch.full_like(tensor, self._first_value(optimizer, p, entry))
                    tensor.copy_(torch.where(keep, tensor, before))
        self._saved, self._given = {}, {}

    def _first_value(self, optimizer: torch.optim.Optimizer, p: nn.Parameter, entry: str) -> float:
        """What a state entry starts from, before it has seen anything: read off the same optimiser on a zero that got a zero."""
        group = next(g for g, group in enumerate(optimizer.param_groups) if any(q is p for q in group["params"]))
        place = (group, p.ndim)
        if place not in self._initial:
            probe = nn.Parameter(torch.zeros((2,) * p.ndim, dtype=p.dtype, device=p.device))
            probe.grad = torch.zeros_like(probe)
            takes = inspect.signature(type(optimizer)).parameters
            options = {k: v for k, v in optimizer.param_groups[group].items() if k in takes and k != "params"}
            fresh = type(optimizer)([probe], **options)
            fresh.step()
            self._initial[place] = {k: float(v.flatten()[0]) for k, v in _elementwise_state(fresh, probe).items()}
        return float(self._initial[place].get(entry, 0.0))


def _elementwise_state(optimizer: torch.optim.Optimizer, p: nn.Parameter, clone: bool = False) -> dict[str, Tensor]:
    state = optimizer.state.get(p, {})
    return {
        k: (v.detach().clone() if clone else v)
        for k, v in state.items()
        if isinstance(v, Tensor) and v.shape == p.shape and v.ndim
    }


def _check_kind(optimizer: torch.optim.Optimizer, drops: bool) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"optimizer is a {type(optimizer).__name__}, but only torch.optim optimisers have the hooks that keep dropped "
            "coordinates still; use one of them or a subclass."
        )
    if drops and _factored(optimizer):
        raise UsageError(
            "optimizer is Adafactor, whose state is kept by row and column, so that a dropped coordinate's state could not stay where "
            "it is; use another optimiser, or drop and prune nothing."
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"optimizer is {type(optimizer).__name__}, which evaluates the loss by itself through a closure, outside the "
            "private step; use one that does not, such as SGD or Adam."
        )


def _factored(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__name__ == "Adafactor"


def _check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    trained = participating(model)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in trained.items() if id(p) not in held]
    known = {id(p) for p in model.parameters()}
    strangers = sum(1 for one in held if one not in known)
    if missing:
        raise UsageError(
            f"the optimiser lacks {len(missing)} trained parameters, {', '.join(missing[:5])} first, but every parameter with requires_grad "
            "is part of the private gradient; add them to the optimiser or freeze them with requires_grad_(False)."
        )
    if strangers:
        raise UsageError(
            f"the optimiser holds {strangers} parameters that are not the model's, but only the model's gradients are private; "
            "build the optimiser from model.parameters()."
        )
