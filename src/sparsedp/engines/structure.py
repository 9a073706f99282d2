"""What the uses of a model's parameters are, found out once on made-up rows and confirmed in every pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsedp.dp.clipping import Loss, Rows, row_losses
from sparsedp.dp.masks import Masks, participating
from sparsedp.engines.made_up import made_up_rows
from sparsedp.engines.products import ConvolutionPair, LinearPair
from sparsedp.engines.pullback import Direct, General, Gradients, Standardised
from sparsedp.engines.tracing import Tracer, Use, graph_nodes
from sparsedp.engines.units import Units
from sparsedp.engines.weights import MakeWay, Way, needs_output


@dataclass(frozen=True)
class Slot:
    """How a use's weight or bias depends on parameters."""

    names: tuple[str, ...]
    """One name: it is that parameter. More, or `expression`: it is computed from them."""
    expression: bool
    shared: bool
    """Some of the parameters are used elsewhere too, so that gradients must be added before norms are taken."""
    gain: str | None = None
    kept: Tensor | None = None
    """For weight standardisation: the gain's name, and the entries that pruning left."""

    @property
    def name(self) -> str:
        """The parameter that masks refer to."""
        return self.names[0]

    @property
    def materialise(self) -> bool:
        """Whether every unit's gradient is needed in the end."""
        return self.shared or (self.expression and self.gain is None)

    def back(self, used: Tensor, gradients: Tensor, trained: Mapping[str, nn.Parameter]) -> Gradients:
        """Units' gradients by parameter, from those by what was used."""
        if not self.expression:
            return {self.name: gradients}
        return General(self.names, used, trained).gradients(gradients)

    def way(self, trained: Mapping[str, nn.Parameter]) -> MakeWay:
        """The way back for the masks and the layout of one step."""

        def make(masks: Masks, order: tuple[int, ...]) -> Way:
            mask = masks.get(self.name)
            own = {} if mask is None else {self.name: mask.permute(order) if mask.ndim == len(order) > 1 else mask}
            if self.gain is None:
                return Direct(self.name, own)
            kept = self.kept.permute(order) if self.kept is not None and self.kept.ndim == len(order) else self.kept
            return Standardised(self.name, self.gain, trained[self.name].permute(order), trained[self.gain], kept, own)

        return make


@dataclass(frozen=True)
class Slots:
    """Both slots of a use; a slot that does not train is absent."""

    kind: str
    weight: Any
    bias: Any

    def unit_gradients(self, use: Use, x: Tensor, dy: Tensor, units: Units) -> Tensor:
        """Every unit's gradient by the weight as it was used."""
        assert use.weight is not None
        if self.kind == "linear":
            return LinearPair(x, dy, use.weight.shape, (), units).unit_gradients(0, units.count)
        pair = ConvolutionPair(x, dy, use.weight.shape, use.call.settings, units, unfold=False, last=False)
        return pair.unit_gradients(0, units.count)


@dataclass(frozen=True)
class Structure:
    """The uses in order, what each depends on, and the parameters that no rule serves."""

    slots: Mapping[str, Slots]
    rest: frozenset[str]
    """Served by torch.func."""
    unused: frozenset[str]
    outputs: frozenset[str]
    """Keys of uses whose outputs are worth remembering."""

    def confirm(self, tracer: Tracer, losses: Tensor) -> None:
        """Refuse a pass that used its parameters in another way than the made-up rows did."""
        keys = [use.key for use in tracer.uses]
        same = all(
            key in self.slots and self.slots[key].kind == use.call.kind for key, use in zip(keys, tracer.uses, strict=True)
        )
        if not same or len(keys) != len(self.slots) or not tracer.reached(losses) <= self.rest:
            raise Irregular("the model uses its parameters in a way that depends on the data or the batch")


class Irregular(Exception):
    """The fast engine cannot serve this model."""


def find_structure(model: nn.Module, loss: Loss, rows_like: Rows) -> Structure:
    """Trace made-up batches of two sizes, and rule only what both agree on."""
    trained = participating(model)
    rest: frozenset[str] = frozenset()
    for _ in range(len(trained) + 1):
        traces = [_trace(model, loss, made_up_rows(rows_like, units), trained, rest) for units in (3, 2)]
        further = _irregular(traces[0][0], traces[1][0]) | traces[0][1] | traces[1][1]
        if further <= rest:
            break
        rest |= further
    uses = traces[0][0]
    owners = _owners(model)
    slots = {use.key: _slots(use, uses, trained, owners) for use in uses}
    used = rest | {name for use in uses for name in use.leaves}
    outputs = frozenset(u.key for u in uses if slots[u.key].weight and needs_output(u, slots[u.key].weight.gain is not None))
    return Structure(slots, rest, frozenset(trained) - used, outputs)


def _trace(
    model: nn.Module, loss: Loss, rows: Rows, trained: dict[str, nn.Parameter], rest: frozenset[str]
) -> tuple[list[Use], frozenset[str]]:
    with Tracer(trained, len(rows.unit), lambda *_: None, rest) as tracer:
        losses = row_losses(model, loss, rows.inputs, rows.targets)
    return tracer.uses, tracer.reached(losses)


def _irregular(first: list[Use], second: list[Use]) -> frozenset[str]:
    """Parameters whose uses differ between two batch sizes: what looked like rows was something else."""
    a, b = ({u.key: (u.call.kind, u.multiple, u.leaves) for u in uses} for uses in (first, second))
    odd = {key for key in a.keys() | b.keys() if a.get(key) != b.get(key)}
    return frozenset(name for use in (*first, *second) if use.key in odd for name in use.leaves)


def _slots(use: Use, uses: list[Use], trained: Mapping[str, nn.Parameter], owners: Mapping[str, nn.Module]) -> Slots:
    weight, bias = (None if t is None else _slot(t, trained) for t in (use.weight, use.bias))
    elsewhere = {name for other in uses if other is not use for name in other.leaves}
    weight_names, bias_names = (set(s[0]) if s else set() for s in (weight, bias))
    both = weight_names & bias_names
    made = []
    for slot, tensor in ((weight, use.weight), (bias, use.bias)):
        if slot is None or tensor is None:
            made.append(None)
            continue
        names, expression = slot
        shared = not set(names).isdisjoint(elsewhere | both)
        found = _standardised(tensor, names, trained, owners) if expression and tensor is use.weight and not shared else None
        made.append(Slot(found[0], True, False, found[0][1], found[1]) if found else Slot(names, expression, shared))
    return Slots(use.call.kind, made[0], made[1])


def _slot(tensor: Tensor, trained: Mapping[str, nn.Parameter]) -> tuple[tuple[str, ...], bool]:
    names = {id(p): n for n, p in trained.items()}
    if id(tensor) in names:
        return (names[id(tensor)],), False
    variables = (getattr(node, "variable", None) for node in graph_nodes(tensor.grad_fn))
    return tuple(dict.fromkeys(names[id(v)] for v in variables if v is not None)), True


def _owners(model: nn.Module) -> dict[str, nn.Module]:
    return {(f"{prefix}.{n}" if prefix else n): m for prefix, m in model.named_modules() for n in m._parameters}


def _standardised(
    used: Tensor, names: tuple[str, ...], trained: Mapping[str, nn.Parameter], owners: Mapping[str, nn.Module]
) -> tuple[tuple[str, str], Tensor | None] | None:
    """(weight, gain) and the kept entries, if `used` is their weight standardisation: in value, and in gradient."""
    if len(names) != 2 or used.ndim < 3:
        return None
    if any(t.dtype not in (torch.float32, torch.float64) for t in (used, *(trained[n] for n in names))):
        return None  # a direction of eight or eleven bits is not of unit length, as the formulas for norms want it
    weight, gain = sorted(names, key=lambda n: trained[n].shape != used.shape)
    if trained[weight].shape != used.shape or trained[gain].numel() != len(used):
        return None
    kept = getattr(owners.get(weight), "kept", None)
    way = Standardised(weight, gain, trained[weight], trained[gain], kept if isinstance(kept, Tensor) else None, {})
    if not torch.allclose(way.effective(), used, rtol=1e-4, atol=1e-6):
        return None
    probe = torch.randn(used.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(used)
    expected = torch.autograd.grad(used, [trained[weight], trained[gain]], probe, retain_graph=True)
    _, vectors = way.squares(probe[None].clone())
    close = torch.allclose(way.pull(probe)[weight], expected[0], rtol=1e-3, atol=1e-4 * float(expected[0].abs().max()))
    close &= torch.allclose(vectors[gain][0], expected[1], rtol=1e-3, atol=1e-4)
    return ((weight, gain), kept if isinstance(kept, Tensor) else None) if close else None
