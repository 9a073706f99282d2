"""The fast engine: one forward, one backward pass, per-unit norms on the way, and a clipped sum out of what was kept.

What no rule covers is served by torch.func in a second pass over the same rows, for those parameters alone. A unit whose numbers
leave the range in which float32 products can be trusted is computed again by the reference engine, which decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sparsedp.dp.clipping import Loss, Rows, factor_of, reference, row_losses, wide
from sparsedp.dp.masks import Masks, expand, participating
from sparsedp.engines.functional import equal_chunks, unit_gradients, weighted_sum
from sparsedp.engines.norms import bias_gradients, scale_gradients
from sparsedp.engines.precision import in_full
from sparsedp.engines.pullback import squared_norms
from sparsedp.engines.structure import Slot, Structure
from sparsedp.engines.tracing import Tracer, Use
from sparsedp.engines.units import Units, channels_last
from sparsedp.engines.weights import Part, candidates, possible, variant, weight_part

LARGEST = 1e15
"""Above this norm, or where it is not finite, a unit is left to the reference engine."""

SAFE = 1 - 4e-6
"""Clip factors are that much smaller, so that rounding cannot carry a unit past the clipping norm."""


@dataclass(eq=False)
class Fast:
    """The engine for one model, as `structure` found it, by one method per use.

    Guarantee: adding a unit to the batch moves the result by at most `clip` in L2, rounding included.
    """

    structure: Structure
    methods: Mapping[str, str]
    name: str = "fast"

    def __call__(self, model: nn.Module, loss: Loss, rows: Rows, masks: Masks, clip: float) -> dict[str, Tensor]:
        trained = participating(model)
        total = {name: torch.zeros_like(p, dtype=wide(p.dtype)) for name, p in trained.items()}
        if rows.units == 0:
            return total
        work = _Pass(self, trained, rows, masks)
        work.run(model, loss)
        with in_full(model):
            squares = work.squares()
            trusted = squares <= LARGEST**2
            factors = torch.where(trusted, factor_of(squares, clip) * SAFE, 0.0)
            for name, tensor in work.sums(factors):
                total[name] += tensor
        for unit in (~trusted).nonzero().squeeze(1).tolist():
            for name, tensor in reference(model, loss, _one_unit(rows, unit), masks, clip).items():
                total[name] += tensor * SAFE  # as if it had been trusted: another unit of its part may be why it was not
        return total


@dataclass(eq=False)
class _Pass:
    """One forward and backward pass over some rows."""

    engine: Fast
    trained: dict[str, nn.Parameter]
    rows: Rows
    masks: Masks
    parts: list[Part] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of small, shared and unruled parameters: materialised, [units, *parameter]."""

    def run(self, model: nn.Module, loss: Loss) -> None:
        structure = self.engine.structure
        self.units = Units(self.rows, next(iter(self.trained.values())).device)
        with Tracer(self.trained, len(self.rows.unit), self._receive, structure.rest, structure.outputs, self.units) as tracer:
            losses = row_losses(model, loss, self.rows.inputs, self.rows.targets)
        structure.confirm(tracer, losses)
        self._lost = self.units.sum((~losses.detach().isfinite()).to(torch.float64)) > 0
        if tracer.uses:
            weights = self.units.row_weights().to(losses.dtype)
            torch.autograd.grad((losses * weights).sum(), [tracer.token], allow_unused=True)
        if structure.rest:
            self._run_rest(model, loss)

    def _receive(self, use: Use, x: Tensor, dy: Tensor) -> None:
        """A use's output gradient has arrived."""
        with in_full(dy):
            self._contribute(use, x, dy)
        use.output = None

    def _contribute(self, use: Use, x: Tensor, dy: Tensor) -> None:
        slots = self.engine.structure.slots[use.key]
        x, dy = aligned(use, x, dy)
        by_bias = use.vectors[1] if use.vectors is not None else None
        if use.weight is not None:
            if use.call.kind in ("group_norm", "layer_norm"):
                by_weight = use.vectors[0] if use.vectors is not None else scale_gradients(use.call, x, dy, self.units)
                self._add(slots.weight.back(use.weight, by_weight, self.trained))
            elif slots.weight.materialise:
                self._add(slots.weight.back(use.weight, slots.unit_gradients(use, x, dy, self.units), self.trained))
            else:
                part = self._weight_part(use, slots.weight, x, dy)
                by_bias = part.by_bias
                self.parts.append(part)
                self._add(part.vectors)
        if use.bias is not None:
            by_bias = bias_gradients(use.call, dy, self.units) if by_bias is None else by_bias
            self._add(slots.bias.back(use.bias, by_bias, self.trained))

    def _weight_part(self, use: Use, slot: Slot, x: Tensor, dy: Tensor) -> Part:
        mask = self.masks.get(slot.name)
        what = (use, x, dy, self.units, mask, slot.gain is not None)
        planned = self.engine.methods.get(variant(use.key, mask))
        method = planned if planned in possible(*what) else candidates(*what)[0]
        return weight_part(use, x, dy, self.units, self.masks, slot.way(self.trained), slot.name, method)

    def _add(self, gradients: Mapping[str, Tensor]) -> None:
        for name, tensor in gradients.items():
            tensor = tensor.to(wide(tensor.dtype))  # norms and sums of eight bits would not fit each other
            self.gradients[name] = self.gradients[name] + tensor if name in self.gradients else tensor

    def _run_rest(self, model: nn.Module, loss: Loss) -> None:
        wanted = {name: self.trained[name] for name in sorted(self.engine.structure.rest)}
        found: dict[str, list[Tensor]] = {name: [] for name in wanted}
        order = []
        counts = self.rows.counts
        for inputs, targets in equal_chunks(self.rows, max(1, self.rows.units)):
            gradients, _ = unit_gradients(model, loss, inputs, targets, wanted)
            for name, tensor in gradients.items():
                found[name].append(tensor)
        for count in counts.unique().tolist():
            order.append((counts == count).nonzero().squeeze(1))
        places = torch.cat(order).argsort().to(self.units.index.device)
        self._add({name: torch.cat(parts)[places] for name, parts in found.items()})

    def squares(self) -> Tensor:
        """Squared norms of the selected gradients, one per unit; infinite where a loss is not finite."""
        total = torch.zeros(self.units.count, dtype=torch.float64, device=self.units.index.device)
        for part in self.parts:
            total += part.squares
        for name, tensor in self.gradients.items():
            mask = self.masks.get(name)
            if mask is not None:
                tensor = tensor * expand(mask, tensor.shape[1:])
                self.gradients[name] = tensor
            total += squared_norms(tensor)
        return torch.where(self._lost, torch.inf, total)

    def sums(self, factors: Tensor) -> list[tuple[str, Tensor]]:
        """The clipped sums; a parameter may occur more than once."""
        result = [(name, weighted_sum(tensor, factors)) for name, tensor in self.gradients.items()]
        while self.parts:
            result += self.parts.pop().sum(factors).items()
        return result


def aligned(use: Use, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the type that sums are made in, and laid out alike; a linear layer's with one dimension of positions."""
    x, dy = x.to(wide(dy.dtype)), dy.to(wide(dy.dtype))
    if use.call.kind == "linear":
        return (t.unsqueeze(1) if t.ndim == 2 else t.flatten(1, -2) for t in (x, dy))  # type: ignore[return-value]
    if channels_last(x):
        return x, dy.contiguous(memory_format=torch.channels_last)
    return x.contiguous(), dy.contiguous()


def _one_unit(rows: Rows, unit: int) -> Rows:
    start = int((rows.unit < unit).sum())
    inputs, targets = rows.part(start, start + int((rows.unit == unit).sum()))
    return Rows.make(inputs, targets, torch.zeros(int((rows.unit == unit).sum()), dtype=torch.int64))
