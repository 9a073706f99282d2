"""From a name to an engine that passed the self-check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sparsedp.dp.clipping import Engine, Loss, Rows, reference
from sparsedp.dp.masks import Masks, participating
from sparsedp.engines.compiled import Compiled
from sparsedp.engines.fitness import check_fitness, check_many, shaken
from sparsedp.engines.functional import functional
from sparsedp.engines.memory import free_bytes, most_rows
from sparsedp.engines.plan import Plan
from sparsedp.engines.planning import fast_engine
from sparsedp.engines.self_check import check_engine, check_model
from sparsedp.errors import UsageError, one_of

AUTO = ("fast", "functional", "reference")
"""What `auto` tries, in this order."""

NAMES = ("auto", *AUTO, "compiled")


@dataclass(frozen=True, eq=False)
class Chosen:
    """An engine that agreed with the reference on made-up units, and what was learnt on the way. Call it as an engine."""

    name: str
    engine: Engine
    plan: Plan
    notes: tuple[str, ...] = field(default=())
    """Why faster engines were refused, and what could not be checked."""

    def __call__(self, model: nn.Module, loss: Loss, rows: Rows, masks: Masks, clip: float) -> dict[str, Tensor]:
        return self.engine(model, loss, rows, masks, clip)


def choose_engine(
    name: str,
    model: nn.Module,
    loss: Loss,
    example_rows: Rows,
    masks: Masks | None = None,
    *,
    clip: float = 1.0,
    plan: Plan | None = None,
    rows: int | None = None,
) -> Chosen:
    """The engine of that name, checked against the reference on made-up units shaped like `example_rows`.

    `auto` takes the fastest that passes; an engine chosen by name must pass. `example_rows` gives shapes and types (and the highest
    integer values) only, so it need not be, and should not be, real data. With a recorded `plan` nothing is measured. `rows` are as many as will be worked on at once, where
    that is not for the plan to say.
    """
    one_of("engine", name, NAMES)
    masks = masks or {}
    check_fitness(model, loss, example_rows)
    notes = check_model(model, loss, example_rows)
    if plan is not None and name in ("auto", plan.engine):
        name = plan.engine
    for candidate in AUTO if name == "auto" else (name,):
        try:
            engine, own_plan = _BUILDERS[candidate](model, loss, example_rows, masks, plan)
            if candidate != "reference":
                check_engine(engine, model, loss, example_rows, masks, clip)
                with shaken(model):
                    check_engine(engine, model, loss, example_rows, masks, clip)
            break
        except Exception as error:  # whatever a user's model does under torch.func: refused, reported, and not swallowed
            if candidate == name:
                raise _refusal(candidate, error) from error
            notes.append(f"the engine {candidate!r} was refused: {_reason(error)}")
    else:
        raise AssertionError("the reference engine cannot be refused")
    check_many(model, loss, example_rows, rows or own_plan.micro_batch or most_rows(torch.device("cpu")))
    return Chosen(candidate, engine, own_plan, tuple(notes))


def _refusal(name: str, error: Exception) -> UsageError:
    if isinstance(error, UsageError):
        return error
    return UsageError(f"The engine {name!r} cannot serve this model ({_reason(error)}); use the engine 'auto'.")


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _functional(model: nn.Module, loss: Loss, rows: Rows, masks: Masks, plan: Plan | None) -> tuple[Engine, Plan]:
    return functional, Plan(engine="functional")


def _reference(model: nn.Module, loss: Loss, rows: Rows, masks: Masks, plan: Plan | None) -> tuple[Engine, Plan]:
    return reference, Plan(engine="reference")


def _compiled(model: nn.Module, loss: Loss, rows: Rows, masks: Masks, plan: Plan | None) -> tuple[Engine, Plan]:
    trained = participating(model).values()
    device = next(iter(trained)).device if trained else torch.device("cpu")
    each = max(rows.counts[:1].tolist(), default=1)
    fit = free_bytes(device) // max(1, 8 * sum(p.nbytes for p in trained))
    planned = plan.micro_batch if plan is not None and plan.micro_batch else min(fit * each, most_rows(device))
    units = max(1, planned // each)
    return Compiled(model, loss, units), Plan(engine="compiled", micro_batch=units * each, threads=torch.get_num_threads())


_BUILDERS: dict[str, Callable[[nn.Module, Loss, Rows, Masks, Plan | None], tuple[Engine, Plan]]] = {
    "fast": fast_engine,
    "functional": _functional,
    "compiled": _compiled,
    "reference": _reference,
}
