"""Private training around a loop of one's own: the model, the optimiser and the scheduler stay what they are.

private = sparsedp.attach(model, optimizer, loss, num_examples=50_000, batch_size=1024, epsilon=3.0, steps=1000)
for batch in private.batches(data):
    private.backward(batch)
    optimizer.step()
print(private.spent())
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import dp_accounting
import torch
from torch import Tensor, nn

from sparsedp import keys
from sparsedp.apply_masks import beside
from sparsedp.config import Mechanism, Run, Runtime, Sparsity
from sparsedp.dp import accounting, mechanism
from sparsedp.dp.accounting import Spent
from sparsedp.dp.clipping import Engine, Loss
from sparsedp.dp.ledger import Ledger
from sparsedp.dp.masks import Masks, check_maskable, maskable_layers, participating, told_unmasked
from sparsedp.dp.mechanism import Settings
from sparsedp.dp.randomness import Key
from sparsedp.dp.selection import Criterion, select
from sparsedp.dp.values import public
from sparsedp.engines import Plan, choose_engine
from sparsedp.engines.care import drawing_from, out_of_memory, seeded, sheltered
from sparsedp.engines.fitness import versions
from sparsedp.engines.trial import checksum_of_sums
from sparsedp.errors import BudgetError, UsageError, require
from sparsedp.models.preparation import check_model
from sparsedp.optimisers import Guard
from sparsedp.planning import budget
from sparsedp.sources import Collate, Source, as_source, check_labels, parts


@dataclass(frozen=True, eq=False, repr=False)
class Batch:
    """Step `step` on `source`, not read yet. Its members are private, and so is their number."""

    source: Source
    step: int


class Private:
    """The private side of one training run: it knows the settings, counts the steps and keeps the ledger.

    Made by `attach` (for a loop of one's own) or by `sparsedp.train`. `on_spend` is called with the ledger before each
    step reads anything; `on_plan` with the engine's plan before the first step that it serves.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        settings: Settings,
        *,
        steps: int | None,
        key: Key,
        ledger: Ledger | None = None,
        engine: str | Engine = "auto",
        micro_batch: int | None = None,
        delta: float = 1e-5,
        notes: Sequence[str] = (),
        on_spend: Callable[[Ledger], None] = lambda ledger: None,
        on_plan: Callable[[int, Plan], None] = lambda step, plan: None,
    ) -> None:
        check_model(model)
        _check_masks(model, settings.pruned)
        settings = dataclasses.replace(settings, pruned=beside(settings.pruned, model))
        self.model, self.loss, self.settings, self.steps, self.key = model, loss, settings, steps, key
        self.ledger = ledger or Ledger()
        self.taken = 0
        self.plans: dict[int, Plan] = {}
        self.notes: tuple[str, ...] = tuple(notes)
        self._delta, self._told = delta, self.notes
        self._charged, self._replayed = 0, 0
        self._engine_asked, self._micro_batch = engine, micro_batch
        self._engine: Engine | None = None
        self._on_spend, self._on_plan = on_spend, on_plan
        self._modes: tuple[bool, ...] = ()
        self._known: tuple[tuple[Any, ...], Source] | None = None
        self._guard = Guard(
            model, optimizer, drops=bool(settings.pruned) or (settings.drop != "none" and settings.drop_rate > 0)
        )

    def batches(self, data: Any, units: Tensor | None = None, collate: Collate | None = None) -> Iterator[Batch]:
        """Poisson-sampled batches until the steps are taken. `data`: two tensors or a map-style data set; `units` numbers each
        row's privacy unit, one row each by default."""
        source = self._source_of(data, units, collate)
        require(
            source.num_units == self.settings.num_units, "the data's number of privacy units", source.num_units,
            f"num_examples says {self.settings.num_units}", "state the number that is there",
        )  # fmt: skip
        while self.steps is None or self.taken < self.steps:
            taken = self.taken
            yield Batch(source, taken)
            if self.taken != taken + 1:
                raise UsageError(
                    f"private.backward was called {self.taken - taken} times for one batch, but every batch is used exactly once; "
                    "call private.backward(batch) once in the loop."
                )

    def backward(self, batch: Batch) -> None:
        """Put the private gradient of a batch into `.grad`. The cost is in the ledger before anything is read."""
        require(
            batch.step == self.taken,
            "the batch's step",
            batch.step,
            f"the next step is {self.taken}",
            "use each batch once, in order",
        )
        self._guard.refuse_waste()
        torch.clear_autocast_cache()  # in a loop that is wholly under autocast it would hold the weights of the step before
        engine = self.prepare(batch.source)
        before = versions(self.model)
        while True:
            try:
                with drawing_from(self.key, batch.step, -1):
                    result = mechanism.private_step(
                        self.settings, self.model, self.loss,
                        lambda units: parts(batch.source, units, batch.step, self.micro_batch),
                        seeded(sheltered(engine), self.key, batch.step), self.key, batch.step, self._record,
                    )  # fmt: skip
                break
            except (MemoryError, RuntimeError, OSError) as error:
                self._shrink(error)
        if versions(self.model) != before:
            raise UsageError(
                "The model changed its own weights or buffers while gradients were computed, without clipping and noise, so it is not "
                "private any more; find what writes to them in its forward pass, and start again from fresh weights."
            )
        self.taken += 1
        self._guard.arm(result.gradient.tensors, result.masks)

    def _source_of(self, *given: Any) -> Source:
        """The source of what was given, made once: a data set is looked through before anything is spent, and not again."""
        if self._known is None or not all(a is b for a, b in zip(self._known[0], given, strict=True)):
            self._known = given, as_source(*given)
        return self._known[1]

    def prepare(self, source: Source) -> Engine:
        """Choose and check everything on made-up rows; done by the first `backward`, and again when modules change their mode."""
        planned = self._plan_in_force()
        modes = tuple(module.training for module in self.model.modules())
        if self._engine is None or modes != self._modes:
            check_model(self.model)
            self._try_selection()
            check_labels(self.model, self.loss, source)
            if callable(self._engine_asked):
                self._engine, chosen_plan = self._engine_asked, Plan(engine="custom")
            else:
                chosen = choose_engine(
                    self._engine_asked, self.model, self.loss, source.example(), self.settings.pruned,
                    clip=min(self.settings.clip, 1e30), plan=planned, rows=self._micro_batch,
                )  # fmt: skip
                self._engine, chosen_plan, self.notes = chosen, chosen.plan, (*self._told, *chosen.notes)
            self._modes = modes
            if planned is None:
                self._serve(dataclasses.replace(chosen_plan, micro_batch=self._micro_batch or chosen_plan.micro_batch or 64))
        return self._engine

    def trial(self, source: Source) -> str:
        """A checksum of what the engine sums on made-up rows: where it is another one, steps would not be what they were."""
        return checksum_of_sums(self.prepare(source), self.model, self.loss, source.example(), self.settings.pruned)

    @property
    def micro_batch(self) -> int:
        """Rows that are worked on at once: given, or planned by the engine from the memory that is free."""
        plan = self._plan_in_force()
        return (plan.micro_batch if plan is not None else self._micro_batch) or 64

    def resume(self, taken: int, ledger: Ledger, charged: int, plans: dict[int, Plan]) -> None:
        """Go on after `taken` steps. Of the ledger's steps, the first `charged` may be replayed, to the bit, at no new cost."""
        self.taken, self.ledger, self._charged, self.plans = taken, ledger, charged, dict(plans)
        self._replayed = charged

    def spent(self, delta: float | None = None, accountant: str = "pld", neighbouring: str = "add-remove") -> Spent:
        """What the ledger amounts to by now, at the delta of `attach` unless another is given."""
        return accounting.epsilon(self.ledger, self._delta if delta is None else delta, accountant, neighbouring)

    @property
    def ledger_by_now(self) -> Ledger:
        """The ledger as it was when the run first stood here: without steps ahead, which a replay has not come to yet."""
        ahead = self._charged - self.taken
        if ahead <= 0:
            return self.ledger
        *before, last = self.ledger.entries
        assert ahead <= last.count, "steps are charged one by one, and a fresh key replays none"
        return Ledger((*before, *([] if ahead == last.count else [dataclasses.replace(last, count=last.count - ahead)])))

    def detach(self) -> None:
        """Let the optimiser go; it is an ordinary one again."""
        self._guard.detach()

    def _record(self, what: str, event: dp_accounting.DpEvent) -> None:
        if self.steps is not None and self.taken >= self.steps:
            raise BudgetError(
                f"step {self.taken + 1} is past the {self.steps} that the privacy target allows; stop here, or start a new run "
                "with a higher target."
            )
        if self.taken < self._charged:
            return
        ledger = self.ledger.append(what, event)
        self._on_spend(ledger)  # first: what could not be written down was not charged, and must not be read either
        self.ledger, self._charged = ledger, self.taken + 1

    def _try_selection(self) -> None:
        """What a criterion of the user's own gets wrong is found before anything is spent. The outcome is not used."""
        s = self.settings
        weights = public(participating(self.model), "weights before this step are released or initial")
        select(s.layers, s.drop, s.drop_rate, s.pruned, weights, self.key, self.taken)

    def _plan_in_force(self) -> Plan | None:
        served = [step for step in self.plans if step <= self.taken]
        return self.plans[max(served)] if served else None

    def _serve(self, plan: Plan) -> None:
        self.plans[self.taken] = plan
        self._on_plan(self.taken, plan)

    def _shrink(self, error: MemoryError | RuntimeError | OSError) -> None:
        """After a failed allocation: half the rows at once. Nothing of the step was released, so nothing new is spent."""
        plan = self._plan_in_force()
        if not out_of_memory(error) or plan is None or self.micro_batch <= 1:
            raise error
        if self.taken < self._replayed:
            raise UsageError(
                f"Memory ran out in step {self.taken}, which is done again after a crash and must be done as it was the first time, "
                f"{self.micro_batch} rows at once; free memory and start again, nothing new was spent."
            ) from error
        self._serve(dataclasses.replace(plan, micro_batch=self.micro_batch // 2))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _check_masks(model: nn.Module, masks: Masks) -> None:
    trained = participating(model)
    for name, mask in masks.items():
        if name not in trained:
            raise UsageError(f"pruned has a mask for {name!r}, but no trained parameter has that name; leave it out.")
        shape = tuple(trained[name].shape)
        require(
            mask.dtype == torch.bool and tuple(mask.shape) in (shape, shape[:1]), f"the mask of {name}",
            f"{mask.dtype} {tuple(mask.shape)}", f"it must be bool of shape {shape}, or {shape[:1]} for whole filters",
            "make it with sparsedp prune",
        )  # fmt: skip


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    *,
    num_examples: int,
    batch_size: int,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    steps: int | None = None,
    delta: float = 1e-5,
    clip: float = 1.0,
    drop: str | Criterion = "none",
    drop_rate: float = 0.0,
    granularity: str = "weight",
    maskable: Sequence[str] | None = None,
    pruned: Masks | None = None,
    ledger: Ledger | None = None,
    unit_norm: bool = True,
    exact: bool = False,
    engine: str | Engine = "auto",
    micro_batch: int | None = None,
    key: Key | None = None,
) -> Private:
    """Make a training loop private. Two of `epsilon`, `noise_multiplier` and `steps` decide the third.

    `loss(output, targets)` returns one number per row. `num_examples` counts the privacy units; it is public, and stated
    rather than inferred. `ledger` holds what was spent on the data before, such as DP-SNIP's release.
    """
    Sparsity(drop="random" if callable(drop) else drop, drop_rate=drop_rate, granularity=granularity)  # type: ignore[arg-type]
    Runtime(micro_batch=micro_batch)
    require(
        num_examples >= 1, "num_examples", num_examples, "there must be at least one", "state the number of training examples"
    )
    asked = Mechanism(
        epsilon=epsilon, noise_multiplier=noise_multiplier, steps=steps, delta=delta, batch_size=batch_size, clip=clip,
        arithmetic="exact" if exact else "float",
    )  # fmt: skip
    layers = maskable_layers(model, granularity, maskable)
    check_maskable(layers, "drop_rate", drop_rate)
    dropped = drop != "none" and maskable is None
    solved = budget(Run(mechanism=asked), num_examples, before=ledger)
    if delta >= 1 / num_examples:
        warnings.warn(
            f"delta {delta} is at least 1/{num_examples}: it would allow one record to be published; choose a smaller one.",
            stacklevel=2,
        )
    settings = Settings(
        num_units=num_examples, batch_size=batch_size, noise_multiplier=solved.noise_multiplier, clip=clip, drop=drop,
        drop_rate=drop_rate, layers=layers, pruned=pruned or {}, unit_norm=unit_norm, exact=exact,
    )  # fmt: skip
    return Private(
        model, optimizer, loss, settings, steps=solved.steps if epsilon is not None else steps, key=key or keys.fresh(),
        ledger=ledger, engine=engine, micro_batch=micro_batch, delta=delta, notes=told_unmasked(model, layers) if dropped else (),
    )  # fmt: skip
