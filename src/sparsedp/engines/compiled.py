"""The general engine, compiled: torch.func's gradients, norms, factors and sum as one graph made by torch.compile.

Graphs have fixed shapes. A chunk holds so many units, and the last one is filled up with copies of its first unit that count
nothing, so that a run compiles once for each number of rows that units have. Compiling takes seconds to minutes; `auto` never chooses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map_only

from sparsedp.dp.clipping import Loss, Rows, factor_of, wide
from sparsedp.dp.masks import Masks, expand, participating
from sparsedp.engines.functional import LossOf, equal_chunks
from sparsedp.engines.precision import in_full


class Compiled:
    """The engine for one model and loss, `units` at a time."""

    name = "compiled"

    def __init__(self, model: nn.Module, loss: Loss, units: int) -> None:
        self.units = units
        self._gradients = torch.compile(_gradients_of(LossOf(model, loss)), dynamic=False)
        self._sum = torch.compile(_sum, dynamic=False)

    def __call__(self, model: nn.Module, loss: Loss, rows: Rows, masks: Masks, clip: float) -> dict[str, Tensor]:
        trained = participating(model)
        total = {name: torch.zeros_like(p, dtype=wide(p.dtype)) for name, p in trained.items()}
        values = {name: p.detach() for name, p in trained.items()}
        for inputs, targets in equal_chunks(rows, self.units):
            count = len(next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)))
            inputs, targets = (tree_map_only(Tensor, self._filled, part) for part in (inputs, targets))
            with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
                gradients, (_, finite) = self._gradients(values, inputs, targets)
            live = finite & (torch.arange(self.units, device=finite.device) < count)
            bound = torch.tensor(clip, dtype=torch.float64, device=finite.device)
            with torch.no_grad(), in_full(model):
                for name, tensor in self._sum(gradients, dict(masks), live, bound).items():
                    total[name] += tensor
        return total

    def _filled(self, t: Tensor) -> Tensor:
        return torch.cat([t, t[:1].expand(self.units - len(t), *t.shape[1:])]) if len(t) < self.units else t


def _gradients_of(both: LossOf) -> Callable[..., Any]:
    def loss_of(values: Mapping[str, Tensor], inputs: Any, targets: Any) -> Any:
        return functional_call(both, {f"model.{n}": v for n, v in values.items()}, (inputs, targets))

    return vmap(grad_and_value(loss_of, has_aux=True), in_dims=(None, 0, 0), randomness="different")


def _sum(gradients: Mapping[str, Tensor], masks: Masks, live: Tensor, clip: Tensor) -> dict[str, Tensor]:
    """The clipped sum over the units that are `live`; zeros are chosen, not multiplied, since 0 x NaN is NaN."""
    own = {n: g.to(wide(g.dtype)) for n, g in gradients.items()}
    own = {n: torch.where(expand(masks[n], g.shape[1:]), g, 0.0) if n in masks else g for n, g in own.items()}
    squares = torch.stack([g.double().flatten(1).square().sum(1) for g in own.values()]).sum(0)
    factors = torch.where(live, factor_of(squares, clip), 0.0)
    counted = {n: torch.where((factors > 0).reshape(-1, *[1] * (g.ndim - 1)), g, 0.0) for n, g in own.items()}
    return {n: (factors.to(g.dtype) @ g.flatten(1)).reshape(g.shape[1:]) for n, g in counted.items()}
