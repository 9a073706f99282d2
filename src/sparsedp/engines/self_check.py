"""Before any private record is read: is this model fit for clipping by example, and does this engine get it right?

Both questions are answered on a few made-up units. The judge is the reference engine, one unit at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparsedp.dp.clipping import Engine, Loss, Rows, clip_factor, reference, row_losses
from sparsedp.dp.masks import GRANULARITIES, Masks, combine, maskable_layers, participating, restrict
from sparsedp.engines.made_up import made_up_rows
from sparsedp.engines.precision import exact_products
from sparsedp.errors import UsageError

UNITS = 4
CAREFUL = 1e-4
"""An engine may clip so much further than need be, lest rounding carry a unit past the norm; this shows in a float64 model."""


def self_check(engine: Engine, model: nn.Module, loss: Loss, rows_like: Rows, masks: Masks, clip: float) -> list[str]:
    """Raise UsageError unless model and engine are right on made-up units; what had to be left unchecked is returned."""
    notes = check_model(model, loss, rows_like)
    check_engine(engine, model, loss, rows_like, masks, clip)
    return notes


def check_model(model: nn.Module, loss: Loss, rows_like: Rows) -> list[str]:
    """One loss per row, rows that do not see each other, buffers that stay."""
    rows = made_up_rows(rows_like, UNITS)
    notes = []
    if draws_random_numbers(model, loss, rows):
        notes.append("the model draws random numbers: checked with its modules in evaluation mode")
    before = {name: b.clone() for name, b in model.named_buffers()}
    with _quiet(model, loss, rows), torch.no_grad():
        together = row_losses(model, loss, rows.inputs, rows.targets)
        apart = torch.cat([row_losses(model, loss, x, y) for x, y in rows.of_each_unit()])
    changed = [name for name, b in model.named_buffers() if not torch.equal(b, before[name])]
    with torch.no_grad():
        for name, b in model.named_buffers():
            b.copy_(before[name])
    if changed:
        raise UsageError(
            f"The model changes its buffers {_list(changed)} in a forward pass, which no privacy accounting covers; "
            "convert BatchNorm to GroupNorm or freeze its statistics."
        )
    if not torch.allclose(together, apart, rtol=_tolerance(together.dtype) * 10, atol=1e-5, equal_nan=True):
        raise UsageError(
            "The loss of a row depends on the other rows of the batch, so that no example's influence is bounded; "
            "convert BatchNorm to GroupNorm or freeze it, and let no module or loss mix examples."
        )
    return notes


def check_engine(engine: Engine, model: nn.Module, loss: Loss, rows_like: Rows, masks: Masks, clip: float) -> None:
    """The engine's clipped sums equal those of the loop over units: with the masks given and with made-up ones of both
    granularities, at the clip in use and at one that is sure to bind.
    """
    rows = made_up_rows(rows_like, UNITS)
    with _quiet(model, loss, rows):
        gradients = [
            reference(model, loss, Rows.make(x, y, torch.zeros(len(u), dtype=torch.int64)), {}, 1e30)
            for x, y, u in _units(rows)
        ]
        for some in (masks, *(combine(masks, made_up_masks(model, granularity)) for granularity in GRANULARITIES)):
            own = [restrict(g, some) for g in gradients]
            norms = [_norm(g) for g in own]
            for bound in (clip, max(min(norms) / 2, 1e-20)):
                expected = {
                    n: sum((g[n] * clip_factor(g, bound).to(g[n].device) for g in own), torch.zeros_like(t))
                    for n, t in own[0].items()
                }
                wrong = disagreements(engine(model, loss, rows, some, bound), expected, _tolerance_of(model))
                if wrong:
                    raise UsageError(
                        f"The engine {engine_name(engine)!r} computes another clipped sum than the loop over examples for "
                        f"{_list(wrong)}; choose the engine 'reference', and report this model."
                    )


def made_up_masks(model: nn.Module, granularity: str) -> dict[str, Tensor]:
    """Masks that drop about half of every maskable weight."""
    generator = torch.Generator().manual_seed(1)
    masks = {}
    for layer in maskable_layers(model, granularity):
        shape = layer.shape[:1] if layer.by_filter else layer.shape
        masks[layer.name] = torch.rand(shape, generator=generator) < 0.5
        masks[layer.name].reshape(-1)[0] = True
    trained = participating(model)
    return {name: mask.to(trained[name].device) for name, mask in masks.items()}


def _units(rows: Rows) -> Iterator[tuple[Any, Any, Tensor]]:
    for unit, (inputs, targets) in enumerate(rows.of_each_unit()):
        yield inputs, targets, rows.unit[rows.unit == unit]


def _norm(gradient: Mapping[str, Tensor]) -> float:
    return float(torch.stack([t.double().norm().cpu() for t in gradient.values()]).norm()) if gradient else 0.0


def disagreements(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> list[str]:
    """The parameters for which two clipped sums differ by more than rounding explains, or which one of them lacks."""
    scale = torch.stack([t.double().norm().cpu() for t in expected.values()]).norm() if expected else torch.zeros(())
    wrong = sorted(set(found) ^ set(expected))
    for name in expected.keys() & found.keys():
        ours, theirs = found[name].double(), expected[name].double()
        gap = (ours - theirs).norm().cpu()
        slack = tolerance * theirs.norm().cpu() + 0.02 * tolerance * scale  # the latter for gradients that cancel to nothing
        if ours.shape != theirs.shape or not bool(gap <= slack):
            wrong.append(name)
    return sorted(wrong)


def draws_random_numbers(model: nn.Module, loss: Loss, rows: Rows) -> bool:
    """Whether a forward pass moves torch's random state (dropout, stochastic depth)."""
    with torch.random.fork_rng(cuda_devices(model)), torch.no_grad():
        before = _random_state(model)
        row_losses(model, loss, rows.inputs, rows.targets)
        return any(not torch.equal(a, b) for a, b in zip(before, _random_state(model), strict=True))


def engine_name(engine: Engine) -> str:
    """The name that users know an engine by."""
    return str(getattr(engine, "name", None) or getattr(engine, "__name__", type(engine).__name__))


@contextmanager
def _quiet(model: nn.Module, loss: Loss, rows: Rows) -> Iterator[None]:
    """A model that draws random numbers is put into evaluation mode meanwhile; torch's random state is left as it was.

    Products are not shortened, so that the judge and the judged differ by rounding alone.
    """
    modes = [(module, module.training) for module in model.modules()]
    with torch.random.fork_rng(cuda_devices(model)), exact_products():
        if draws_random_numbers(model, loss, rows):
            model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode


def _random_state(model: nn.Module) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in cuda_devices(model))]


def cuda_devices(model: nn.Module) -> list[int]:
    """The CUDA devices whose random state a model may move."""
    return sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})


def _tolerance_of(model: nn.Module) -> float:
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return 0.05
    return max((max(_tolerance(p.dtype), CAREFUL) for p in participating(model).values()), default=1e-3)


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-9, torch.float32: 1e-3}.get(dtype, 0.05)


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
