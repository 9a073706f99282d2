"""Which engine and rule serves which parameter, and at what cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from sparsedp.dp.clipping import Loss, Rows
from sparsedp.dp.masks import Masks, participating
from sparsedp.engines.choice import Chosen, choose_engine
from sparsedp.engines.fast import Fast
from sparsedp.engines.plan import Plan
from sparsedp.engines.structure import Slot, Structure


@dataclass(frozen=True)
class Line:
    """One parameter: the rules that serve its uses, their methods, and microseconds per unit where they were measured."""

    parameter: str
    shape: tuple[int, ...]
    rule: str
    method: str
    microseconds: float | None


@dataclass(frozen=True)
class Explanation:
    """What `explain` found."""

    engine: str
    notes: tuple[str, ...]
    micro_batch: int | None
    lines: tuple[Line, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def text(self) -> str:
        """A table for a screen."""
        head = ("parameter", "shape", "rule", "method", "us per unit")
        rows = [
            (n.parameter, "x".join(map(str, n.shape)) or "scalar", n.rule, n.method, "" if n.microseconds is None else f"{n.microseconds:.0f}")
            for n in self.lines
        ]  # fmt: skip
        widths = [max(len(r[i]) for r in (head, *rows)) for i in range(len(head))]
        table = ["  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)).rstrip() for r in (head, *rows)]
        top = f"engine {self.engine}" + (f", {self.micro_batch} rows at a time" if self.micro_batch else "")
        return "\n".join([top, *(f"note: {note}" for note in self.notes), "", *table])


def explain(
    model: nn.Module,
    loss: Loss,
    example_rows: Rows,
    masks: Masks | None = None,
    *,
    engine: str = "auto",
    plan: Plan | None = None,
) -> Explanation:
    """Choose an engine as a run would, and say what serves what."""
    chosen = choose_engine(engine, model, loss, example_rows, masks, plan=plan)
    lines = tuple(_line(name, tuple(p.shape), chosen) for name, p in participating(model).items())
    return Explanation(chosen.name, chosen.notes, chosen.plan.micro_batch, lines)


def _line(name: str, shape: tuple[int, ...], chosen: Chosen) -> Line:
    if not isinstance(chosen.engine, Fast):
        rule = "loop over units" if chosen.name == "reference" else "torch.func"
        return Line(name, shape, rule, "gradients materialised", None)
    structure = chosen.engine.structure
    if name in structure.rest:
        return Line(name, shape, "torch.func, in a second pass", "gradients materialised", None)
    if name in structure.unused:
        return Line(name, shape, "not used by the model", "zero", None)
    served = [_served(key, name, structure, chosen.plan) for key, slots in structure.slots.items() if _serves(slots, name)]
    rules, methods, costs = zip(*served, strict=True)
    known = [c for c in costs if c is not None]
    return Line(
        name, shape, ", ".join(dict.fromkeys(rules)), ", ".join(dict.fromkeys(methods)), sum(known) * 1e6 if known else None
    )


def _serves(slots: Any, name: str) -> bool:
    return any(name in slot.names for slot in (slots.weight, slots.bias) if slot is not None)


def _served(key: str, name: str, structure: Structure, plan: Plan) -> tuple[str, str, float | None]:
    slots = structure.slots[key]
    slot: Slot = slots.weight if slots.weight is not None and name in slots.weight.names else slots.bias
    rule = slots.kind + (", standardised" if slot.gain else ", through its expression" if slot.expression else "")
    if slot is slots.bias or slots.kind not in ("conv", "linear") or slot.materialise or name != slot.name:
        return rule, "gradients materialised" + (", added over uses" if slot.shared else ""), None
    method = plan.methods.get(key, "by rule of thumb")
    return rule, method, plan.costs.get(key, {}).get(method)
