"""The general engine: torch.func takes the gradient of every unit, whatever the model is made of.

It needs a forward pass that torch.func can trace (no control flow on values, no writing into captured tensors), which
the start-up self-check finds out. Memory: one gradient per unit of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from sparsedp.dp.clipping import Loss, Rows, factor_of, row_losses, wide
from sparsedp.dp.masks import Masks, expand, participating
from sparsedp.engines.precision import in_full

CHUNK_BYTES = 256 * 2**20
"""How much memory the gradients of one chunk of units may take."""


class LossOf(nn.Module):
    """Model and loss as one module, so that a loss that reads the model's parameters sees the differentiated ones."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        self.training = model.training

    def forward(self, inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        losses = row_losses(self.model, self.loss, inputs, targets)
        return losses.mean(), losses.isfinite().all()


def functional(model: nn.Module, loss: Loss, rows: Rows, masks: Masks, clip: float) -> dict[str, Tensor]:
    """Units of equal row count together, a chunk at a time."""
    trained = participating(model)
    total = {name: torch.zeros_like(p, dtype=wide(p.dtype)) for name, p in trained.items()}
    size = sum(p.numel() * p.element_size() for p in trained.values())
    for inputs, targets in equal_chunks(rows, max(1, CHUNK_BYTES // max(1, size))):
        gradients, finite = unit_gradients(model, loss, inputs, targets, trained)
        squares = torch.zeros(len(finite), dtype=torch.float64, device=finite.device)
        for name, g in gradients.items():
            gradients[name] = g = _masked(g, masks.get(name))
            squares += g.double().reshape(len(g), -1).pow(2).sum(1)
        factors = torch.where(finite, factor_of(squares, clip), 0.0)
        with in_full(model):
            for name, g in gradients.items():
                total[name] += weighted_sum(g, factors)
    return total


def unit_gradients(
    model: nn.Module, loss: Loss, inputs: Any, targets: Any, wanted: dict[str, nn.Parameter]
) -> tuple[dict[str, Tensor], Tensor]:
    """The mean gradient of each unit, by the wanted parameters; and whether its losses were finite. First dimension: units."""
    both = LossOf(model, loss)
    gradient: Callable[..., Any] = grad_and_value(
        lambda values, x, y: functional_call(both, {f"model.{n}": v for n, v in values.items()}, (x, y)), has_aux=True
    )
    values = {name: p.detach() for name, p in wanted.items()}
    with (
        torch.no_grad(),
        sdpa_kernel(SDPBackend.MATH),
    ):  # no graph outside of torch.func's own; the fused kernels have no batching rule
        gradients, (_, finite) = vmap(gradient, in_dims=(None, 0, 0), randomness="different")(values, inputs, targets)
    return {n: g.to(wide(g.dtype)) for n, g in gradients.items()}, finite


def equal_chunks(rows: Rows, most: int) -> Iterator[tuple[Any, Any]]:
    """Inputs and targets as [units, rows of a unit, ...], at most so many units at a time, unit by unit in groups of equal size."""
    counts = rows.counts
    starts = counts.cumsum(0) - counts
    for count in counts.unique().tolist():
        for group in (counts == count).nonzero().squeeze(1).split(most):
            places = (starts[group, None] + torch.arange(count)).reshape(-1)
            yield tree_map_only(
                Tensor, lambda t, at=places, n=len(group), c=count: t[at.to(t.device)].unflatten(0, (n, c)),
                (rows.inputs, rows.targets),
            )  # fmt: skip


def weighted_sum(gradients: Tensor, factors: Tensor) -> Tensor:
    """The sum over units of factor * gradient; a unit whose factor is zero adds nothing, also if its gradient is not finite."""
    live = factors > 0
    flat = gradients.reshape(len(gradients), -1)
    if not bool(live.all()):
        flat, factors = flat[live], factors[live]
    return (factors.to(flat.dtype) @ flat).reshape(gradients.shape[1:])


def _masked(gradients: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return gradients
    return torch.where(expand(mask, gradients.shape[1:]), gradients, torch.zeros((), dtype=gradients.dtype, device=mask.device))
