"""Is a model fit for clipping by unit? Tried on made-up rows, at the real weights and at shaken ones, in the mode in use.

Shaken weights matter: where the head starts at zero, all gradients below it are zero, and any engine would agree with any
other. The mode matters: dropout, and mixing that happens in training mode only, are not to be seen in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sparsedp.dp.clipping import Loss, Rows, row_losses
from sparsedp.dp.masks import participating
from sparsedp.engines.made_up import made_up_rows
from sparsedp.errors import UsageError, out_of_memory, together

UNITS = 4
MOST = 512
"""Rows of one try at most: what mixes in larger batches alone is not looked for."""

State = dict[str, Tensor]


def check_fitness(model: nn.Module, loss: Loss, rows_like: Rows) -> None:
    """Raise unless a pass writes nothing and no unit changes the loss of another."""
    problems = [f"{name} is an embedding with max_norm, which rewrites its weights for the tokens it sees; set max_norm=None."
                for name, module in model.named_modules() if getattr(module, "max_norm", None) is not None]  # fmt: skip
    if problems:
        raise together("The model cannot be trained privately as it is:", problems)
    rows, others = made_up_rows(rows_like, UNITS), made_up_rows(rows_like, UNITS, seed=1)
    _check_passes(model, loss, rows, others)
    with shaken(model):
        _check_passes(model, loss, rows, others)


def check_many(model: nn.Module, loss: Loss, rows_like: Rows, size: int) -> None:
    """The same with as many rows as a pass will have, at shaken weights: what mixes examples may do so in large batches alone."""
    units = min(size, MOST) // max(rows_like.counts[:1].tolist(), default=1)
    while units > UNITS:
        rows, others = made_up_rows(rows_like, units), made_up_rows(rows_like, units, seed=1)
        try:
            with shaken(model):
                kept = int((rows.unit < units // 2).sum())
                changed = _with_another_end(rows, others, kept)
                first, second = (_losses(model, loss, *both, backward=False) for both in ((rows.inputs, rows.targets), changed))
            _compare(first, second, kept)
            break
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
        units //= 2  # as a step would do


def _check_passes(model: nn.Module, loss: Loss, rows: Rows, others: Rows) -> None:
    before = written(model)
    first = _losses(model, loss, rows.inputs, rows.targets)
    changed = sorted(name for name, tensor in written(model).items() if not _equal(tensor, before[name]))
    if changed:
        with torch.no_grad():
            for name, tensor in _state(model).items():
                tensor.copy_(before[name])
        raise UsageError(
            f"The model changes {', '.join(changed[:5])} in a forward or backward pass, without clipping and noise; convert BatchNorm "
            "to GroupNorm or freeze its statistics, and remove what else updates itself."
        )
    kept = int((rows.unit < rows.units - 1).sum())
    _compare(first, _losses(model, loss, *_with_another_end(rows, others, kept)), kept)


def _compare(first: Tensor, second: Tensor, kept: int) -> None:
    """The losses of the rows that were kept are what they were."""
    if not torch.allclose(first[:kept], second[:kept], rtol=1e-4, atol=1e-6, equal_nan=True):
        raise UsageError(
            "The loss of a row depends on the other rows of the batch, so that no example's influence is bounded; "
            "convert BatchNorm to GroupNorm or freeze it, and let no module or loss mix examples."
        )


def _with_another_end(rows: Rows, others: Rows, kept: int) -> tuple[Any, Any]:
    """The rows with those after the first so many replaced by other values."""

    def join(a: Any, b: Any) -> Any:
        return torch.cat([a[:kept], b[kept:]]) if isinstance(a, Tensor) else a

    return tree_map(join, rows.inputs, others.inputs), tree_map(join, rows.targets, others.targets)


def _losses(model: nn.Module, loss: Loss, inputs: Any, targets: Any, backward: bool = True) -> Tensor:
    """One pass forward and backward as in training, with the random numbers that such a pass would have, always the same."""
    with torch.random.fork_rng(devices_of(model)):
        torch.manual_seed(0)
        losses = row_losses(model, loss, inputs, targets)
        if backward and losses.requires_grad:
            torch.autograd.grad(losses.sum(), list(participating(model).values()), allow_unused=True)
    return losses.detach().float()


@contextmanager
def shaken(model: nn.Module) -> Iterator[None]:
    """Meanwhile every trained weight is moved a little, so that none is zero by construction; then all are as before."""
    trained = participating(model)
    before = {name: p.detach().clone() for name, p in trained.items()}
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in trained.values():
            size = max(float(p.detach().double().pow(2).mean().sqrt()) / 2, 0.05)
            p.add_(torch.randn(p.shape, generator=generator).to(p) * size)
    torch.clear_autocast_cache()  # which would go on with the weights as they were
    try:
        yield
    finally:
        with torch.no_grad():
            for name, p in trained.items():
                p.copy_(before[name])
        torch.clear_autocast_cache()


def written(model: nn.Module) -> State:
    """A copy of all that a pass might write to."""
    return {name: tensor.detach().clone() for name, tensor in _state(model).items()}


def versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Which tensors the model holds, and how often each was written to: costs nothing, and tells whether anything was."""
    return {name: (id(tensor), tensor._version) for name, tensor in _state(model).items()}


def devices_of(model: nn.Module) -> list[int]:
    """The numbers of the GPUs that hold the model."""
    return sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})


def _state(model: nn.Module) -> State:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(torch.nan_to_num(a.float()), torch.nan_to_num(b.float())))
