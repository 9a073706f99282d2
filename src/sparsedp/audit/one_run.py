"""The one-run audit: a recipe's real training job, with many of its units turned into canaries.

The job keeps its data set's size, its model, masks, noise, rate, optimiser and engine. The last m units become canaries, each
with a coordinate of its own in every step, among those that the step's mask leaves; each is in by a fair coin. The gradients
of canaries are handed to the sum as clipped vectors of length C, and the real rows get zero on the canaries' coordinates.
Nothing is kept of the run but how many guesses were right, which depends on coins and noise and not on the real data.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from sparsedp import mask_files
from sparsedp.apply_masks import prepare_for
from sparsedp.assembly import Parts
from sparsedp.audit import bounds, one_run_bounds
from sparsedp.audit.gradient import LOWER, VIOLATION, Finding
from sparsedp.beginning import step_settings
from sparsedp.dp.accounting import epsilon
from sparsedp.dp.clipping import Engine, Loss, Rows, factor_of
from sparsedp.dp.ledger import Ledger, gaussian_event
from sparsedp.dp.masks import Masks, expand, participating
from sparsedp.dp.mechanism import Settings, private_step
from sparsedp.dp.randomness import Key, normal, uniform, words
from sparsedp.dp.selection import select
from sparsedp.dp.tradeoff import profile
from sparsedp.dp.values import public
from sparsedp.engines import choose_engine
from sparsedp.engines.care import seeded
from sparsedp.errors import require
from sparsedp.optim import optimizer_for, scheduler_for
from sparsedp.optimisers import Guard
from sparsedp.planning import Budget
from sparsedp.prune_run import private_data
from sparsedp.pruning import Pruned, prune
from sparsedp.sources import parts

MOST = 5000
PRICE = 0.2
"""The most that 2 * canaries * delta may be: many canaries are paid for with delta."""
FEWEST = 20
MADE_UP, MANY = 20_000, 2000
"""Scores made up to choose the number of guesses; the steps above which the claim's Gaussian stands in for them."""


class CanaryRows(Rows):
    """Units that are canaries; `inputs` are their numbers."""

    @staticmethod
    def of(numbers: Tensor) -> CanaryRows:
        """One row each."""
        return CanaryRows(numbers, numbers, torch.arange(len(numbers)), len(numbers))


@dataclass(frozen=True, eq=False)
class Planted:
    """Where the canaries of a job stand, and the engine that knows them."""

    count: int
    engine: Engine

    def __call__(self, model: nn.Module, loss: Loss, rows: Rows, masks: Masks, clip: float) -> dict[str, Tensor]:
        if not isinstance(rows, CanaryRows):
            total = self.engine(model, loss, rows, masks, clip)
            for name, index, _ in self.places(total, masks):
                total[name] = _with(total[name], index, 0.0)
            return total
        steep = torch.tensor((64.0 * clip) ** 2, dtype=torch.float64)
        value = float(factor_of(steep, clip)) * 64.0 * clip
        total = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in participating(model).items()}
        taking_part = torch.zeros(self.count, dtype=torch.float32).index_add_(0, rows.inputs, torch.ones(len(rows.inputs)))
        for name, index, who in self.places(total, masks):
            total[name] = _with(total[name], index, value * taking_part[who])
        return total

    def places(self, tensors: dict[str, Tensor], masks: Masks) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(parameter, coordinates in it, canaries that own them), the canaries spread evenly over what the masks leave."""
        alive = {name: _alive(t, masks.get(name)) for name, t in tensors.items()}
        total, start = sum(len(a) for a in alive.values()), 0
        chosen = torch.arange(self.count) * total // self.count
        for name, own in alive.items():
            who = ((chosen >= start) & (chosen < start + len(own))).nonzero().squeeze(1)
            if len(who):
                yield name, own[(chosen[who] - start).to(own.device)], who
            start += len(own)

    def observe(self, released: dict[str, Tensor], masks: Masks) -> np.ndarray:
        """Every canary's own coordinate."""
        seen = torch.empty(self.count, dtype=torch.float64)
        for name, index, who in self.places(released, masks):
            seen[who] = released[name].reshape(-1)[index].double().cpu()
        return seen.numpy()


def _with(tensor: Tensor, index: Tensor, values: Tensor | float) -> Tensor:
    """A tensor of the same shape, whatever its layout in memory, with these entries."""
    flat = tensor.reshape(-1).clone()
    flat[index] = values.to(flat) if isinstance(values, Tensor) else values
    return flat.reshape(tensor.shape)


def _alive(tensor: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return torch.arange(tensor.numel(), device=tensor.device)
    return expand(mask, tensor.shape).expand_as(tensor).reshape(-1).nonzero().squeeze(1)


@dataclass(frozen=True, eq=False)
class Job:
    """A recipe's training job, ready to run."""

    parts: Parts
    plan: Budget
    settings: Settings
    engine: Engine
    micro_batch: int

    @staticmethod
    def of(made: Parts, plan: Budget, key: Key) -> Job:
        """Pre-prune, choose the engine, as a run does. Nothing is written anywhere."""
        run, source = made.run, made.source(key)
        pruned = pruned_for(made, plan, key)
        if pruned is not None:
            prepare_for(made.model, pruned.masks, run.sparsity.pruned_weights)
        settings = step_settings(run, plan, pruned, made.model)
        engine = choose_engine(run.runtime.engine, made.model, made.loss, source.example(), settings.pruned, clip=settings.clip)
        return Job(made, plan, settings, engine, run.runtime.micro_batch or engine.plan.micro_batch or 64)

    def family(self, factor: float) -> Ledger:
        """What training spends, with all its noise multiplied by a factor."""
        event = gaussian_event(self.settings.sampling_rate, factor * self.settings.noise_multiplier)
        return Ledger().append("train", event, self.plan.steps)

    def room(self, key: Key) -> int:
        """How many canaries fit: half of the coordinates of a step, half of the units, and a small price in delta."""
        s, model = self.settings, self.parts.model
        masks = select(s.layers, s.drop, s.drop_rate, s.pruned, public(participating(model), "initial"), key, 0)
        free = sum(len(_alive(p, masks.get(name))) for name, p in participating(model).items())
        return min(MOST, int(PRICE / (2 * self.parts.run.mechanism.delta)), s.num_units // 2, free // 2)


def pruned_for(made: Parts, plan: Budget, key: Key) -> Pruned | None:
    """The masks of the job's pre-pruning."""
    run, s = made.run, made.run.sparsity
    if s.mask_file is not None:
        return mask_files.load(s.mask_file, made.model)
    if s.prune == "none":
        return None
    data = private_data(run, plan, made.source(key, plain=True), made.loss)
    return prune(made.model, s, key, input_shape=made.shape, data=data)


def one_run_audit(
    job: Job, key: Key, canaries: int | None = None, family: int = 1, tick: Callable[[], None] = lambda: None
) -> Finding:
    """Train the job once with canaries and count the right guesses among a number fixed beforehand."""
    began = time.monotonic()
    m = canaries or job.room(key)
    require(FEWEST <= m <= job.room(key), "canaries", m, f"between {FEWEST} and {job.room(key)} fit this job", "leave it out")
    inside = words(key, 0, m, "audit coins") < np.uint64(1 << 63)
    scores = _train(job, Planted(m, job.engine), inside, key, tick)
    claim, delta = profile(job.family(1.0)), job.parts.run.mechanism.delta
    guesses = guesses_for(job.settings, job.plan.steps, m, delta, key)
    correct = int(inside[np.argsort(-scores, kind="stable")[:guesses]].sum())
    by_curve = bounds.epsilon_in_family(
        job.family, delta,
        lambda member: one_run_bounds.curve_rejected(one_run_bounds.of_profile(member), m, guesses, correct, LOWER),
    )  # fmt: skip
    return Finding(
        what=f"one run of the job itself: {correct} of {guesses} guesses right", method="one run, trade-off curve", trials=m,
        claimed=epsilon(job.plan.at_end, delta).epsilon, delta=delta, bound=by_curve,
        bound_by_rates=one_run_bounds.epsilon_bound(m, guesses, correct, delta, LOWER),
        violated=one_run_bounds.curve_rejected(one_run_bounds.of_profile(claim), m, guesses, correct, 1 - (1 - VIOLATION) / family),
        seconds=time.monotonic() - began,
    )  # fmt: skip


def _train(job: Job, planted: Planted, inside: np.ndarray, key: Key, tick: Callable[[], None]) -> np.ndarray:
    """The training loop; returns every canary's log-likelihood ratio."""
    run, s, model, m = job.parts.run, job.settings, job.parts.model, planted.count
    source, first = job.parts.source(key), s.num_units - m
    optimizer = optimizer_for(model, run.optim)
    scheduler, guard = scheduler_for(optimizer, run.optim, job.plan.steps), Guard(model, optimizer)
    takes_part = torch.from_numpy(inside)
    divisor = s.batch_size * (s.clip if s.unit_norm else 1.0)
    scores = np.zeros(m)

    def read(units: Tensor, step: int) -> Iterator[Rows]:
        present = units[units >= first] - first
        present = present[takes_part[present]]
        if len(present):
            yield CanaryRows.of(present)
        yield from parts(source, units[units < first], step, job.micro_batch)

    model.train()
    for step in range(job.plan.steps):
        engine = seeded(planted, key, step)
        done = private_step(
            s, model, job.parts.loss, lambda u, step=step: read(u, step), engine, key, step, lambda *event: None
        )
        seen = planted.observe(dict(done.gradient.tensors), done.masks) * (divisor / s.clip)
        scores += bounds.log_likelihood_ratio(seen, s.sampling_rate, s.noise_multiplier)
        guard.arm(done.gradient.tensors, done.masks)
        optimizer.step()
        scheduler.step()
        tick()
    guard.detach()
    return scores


def guesses_for(settings: Settings, steps: int, canaries: int, delta: float, key: Key) -> int:
    """The number of guesses that would prove most if the claim were exact, found from made-up scores before the run."""
    options = sorted({max(FEWEST, round(share * canaries)) for share in (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)})
    member = np.arange(MADE_UP) < MADE_UP // 2
    ranked = member[np.argsort(-_made_up_scores(settings, steps, member, key), kind="stable")]

    def expected(guesses: int) -> float:
        right = ranked[: round(guesses / canaries * MADE_UP)].mean()
        correct = int(guesses * right - math.sqrt(guesses * right * (1 - right)) / 2)
        return one_run_bounds.epsilon_bound(canaries, guesses, correct, delta, LOWER)

    return max((g for g in options if g <= canaries), key=expected)


def _made_up_scores(settings: Settings, steps: int, member: np.ndarray, key: Key) -> np.ndarray:
    rate, sigma, count = settings.sampling_rate, settings.noise_multiplier, len(member)
    if steps > MANY:
        claim = profile(Ledger().append("train", gaussian_event(rate, sigma), steps))
        return claim.gaussian() * member + normal(key, 0, count, "audit guesses").numpy()
    scores = np.zeros(count)
    for step in range(steps):
        joined = uniform(key, count, "audit guesses", step).numpy() <= rate
        seen = joined * member + sigma * normal(key, 0, count, "audit guesses", step, "noise").numpy()
        scores += bounds.log_likelihood_ratio(seen, rate, sigma)
    return scores


def shortened(plan: Budget, steps: int | None) -> Budget:
    """The same noise for fewer steps, with what those claim."""
    if steps is None or steps == plan.steps:
        return plan
    require(1 <= steps <= plan.steps, "steps", steps, f"the recipe has {plan.steps}", "give fewer, or leave it out")
    rate = plan.sampling_rate
    before = [e for e in plan.at_end.entries if e.what != "train"]
    ledger = Ledger(tuple(before)).append("train", gaussian_event(rate, plan.noise_multiplier), steps)
    spent = epsilon(ledger, plan.spent.delta, plan.spent.accountant, plan.spent.neighbouring)
    return replace(plan, steps=steps, at_end=ledger, spent=spent)
