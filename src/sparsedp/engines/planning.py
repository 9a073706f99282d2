"""The method of every use, by measurement on made-up rows; what was measured once is remembered by shape."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparsedp.dp.clipping import Loss, Rows, row_losses
from sparsedp.dp.masks import Masks, participating
from sparsedp.engines.fast import Fast, aligned
from sparsedp.engines.made_up import made_up_rows
from sparsedp.engines.memory import Saved, micro_batch
from sparsedp.engines.plan import Plan
from sparsedp.engines.self_check import cuda_devices, draws_random_numbers
from sparsedp.engines.structure import Irregular, Structure, find_structure
from sparsedp.engines.tracing import Tracer, Use
from sparsedp.engines.units import Units
from sparsedp.engines.weights import candidates, variant, weight_part

ROWS = 16
"""About how many rows a measurement takes; one unit at least, two where units are small."""

REPEATS = 3
HOPELESS = 3
"""A method that takes so many times the best one's time at its first, cold, try is not tried again."""

_measured: dict[Any, dict[str, float]] = {}


def fast_engine(model: nn.Module, loss: Loss, rows_like: Rows, masks: Masks, plan: Plan | None) -> tuple[Fast, Plan]:
    """The fast engine by the recorded plan, or by a new one. Raises Irregular where it cannot serve the model."""
    if not participating(model):
        raise Irregular("no parameter trains")
    with torch.random.fork_rng(cuda_devices(model)):
        return _planned(model, loss, rows_like, masks, plan)


def _planned(model: nn.Module, loss: Loss, rows_like: Rows, masks: Masks, plan: Plan | None) -> tuple[Fast, Plan]:
    structure = find_structure(model, loss, rows_like)
    if structure.rest and draws_random_numbers(model, loss, made_up_rows(rows_like, 2)):
        raise Irregular("the model draws random numbers, and parameters without a rule would need them a second time")
    if plan is not None:
        return Fast(structure, plan.methods), plan
    survey = measure(model, loss, rows_like, {}, structure)
    second = measure(model, loss, rows_like, masks, structure) if masks else None
    costs = survey.costs | (second.costs if second else {})
    methods = {key: min(found, key=found.__getitem__) for key, found in costs.items()}
    more = max(survey.more_bytes, second.more_bytes if second else 0.0)
    size = micro_batch(survey.activation_bytes, more, max(survey.units.counts), survey.units.index.device)
    made = Plan(engine="fast", methods=methods, costs=costs, micro_batch=size, threads=torch.get_num_threads())
    return Fast(structure, methods), made


def method_keys(structure: Structure) -> list[str]:
    """The uses that have methods to choose from."""
    return [
        k
        for k, s in structure.slots.items()
        if s.weight is not None and not s.weight.materialise and s.kind in ("conv", "linear")
    ]


def measure(model: nn.Module, loss: Loss, rows_like: Rows, masks: Masks, structure: Structure) -> Survey:
    """Try every legal method of every use."""
    each = max(rows_like.counts[:1].tolist(), default=1)
    rows = made_up_rows(rows_like, max(2, ROWS // max(1, each)))
    survey = Survey(model, rows, masks, structure)
    with (
        Saved() as saved,
        Tracer(participating(model), len(rows.unit), survey.receive, structure.rest, structure.outputs) as tracer,
    ):
        losses = row_losses(model, loss, rows.inputs, rows.targets)
    if tracer.uses:
        torch.autograd.grad(losses.mean(), [tracer.token], allow_unused=True)
    survey.activation_bytes = saved.bytes / len(rows.unit)
    return survey


@dataclass(eq=False)
class Survey:
    """Receives every use of one pass, and tries its methods."""

    model: nn.Module
    rows: Rows
    masks: Masks
    structure: Structure
    costs: dict[str, dict[str, float]] = field(default_factory=dict)
    """Seconds per unit."""
    activation_bytes: float = 0.0
    """Per row: what autograd keeps for the backward pass."""
    more_bytes: float = 0.0
    """Per row: what the chosen methods keep besides, gradients per unit or output gradients."""

    def __post_init__(self) -> None:
        self.trained = participating(self.model)
        self.units = Units(self.rows, next(iter(self.trained.values())).device)
        self.keys = set(method_keys(self.structure))

    def receive(self, use: Use, x: Tensor, dy: Tensor) -> None:
        if use.key not in self.keys:
            return
        slot = self.structure.slots[use.key].weight
        x, dy = aligned(use, x, dy)
        mask = self.masks.get(slot.name)
        legal = candidates(use, x, dy, self.units, mask, slot.gain is not None)
        assert use.weight is not None
        density = 1.0 if mask is None or mask.ndim > 1 else round(float(mask.float().mean()), 1)
        key = (
            use.call.kind, use.call.settings, tuple(use.weight.shape), tuple(x.shape), tuple(self.units.counts), x.stride(), x.dtype,
            mask is None, density, slot.gain is None, tuple(legal), torch.get_num_threads(), str(x.device),
        )  # fmt: skip
        if key not in _measured:
            way = slot.way(self.trained)
            factors = torch.full((self.units.count,), 0.5, dtype=torch.float64, device=x.device)
            taken: dict[str, float] = {}
            for method in legal if len(legal) > 1 else ():
                work = partial(weight_part, use, x, dy, self.units, self.masks, way, slot.name, method)
                best = min(taken.values(), default=float("inf")) * self.units.count
                taken[method] = _seconds(lambda work=work: work().sum(factors), x.device, best) / self.units.count  # type: ignore[misc]
            _measured[key] = taken or {legal[0]: 0.0}
        self.costs[variant(use.key, mask)] = found = dict(_measured[key])
        kept = min(found, key=found.__getitem__).endswith(":keep")
        self.more_bytes += (use.weight.nbytes * self.units.count if kept else dy.nbytes) / len(self.rows.unit)


def _seconds(work: Callable[[], object], device: torch.device, best: float) -> float:
    times: list[float] = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
        if times[0] > HOPELESS * best:
            return times[0]
    return min(times[1:])
