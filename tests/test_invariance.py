"""Knobs of speed change nothing: micro-batch size, number of ranks, order of units within a part."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparsedp.dp.clipping import reference
from sparsedp.dp.mechanism import Step, private_step
from sparsedp.dp.sampling import participants, shard
from sparsedp.dp.values import ClippedSum
from tests import oracles
from tests.made_up import KEY, World, build, cross_entropy, random_masks, unit_of
from tests.replay import FrozenNoise, assert_same_bits, replayed
from tests.steps import reader, run, settings_for

COUNT = 150


def world(family: str, dtype: torch.dtype = torch.float32, prune: float = 0.3) -> World:
    model = build(family, 7, dtype)
    return World(model, tuple(unit_of(i, 1 + i % 3, 4.0) for i in range(COUNT)), random_masks(model, "weight", prune, 1), 0.5)


@pytest.mark.parametrize("drop", ["none", "random", "magnitude"])
@pytest.mark.parametrize("exact", [False, True])
def test_micro_batches(monkeypatch: pytest.MonkeyPatch, drop: str, exact: bool) -> None:
    """Sizes 1, 7, 64 and the whole batch: the same units, masks and noise to the bit, and the same sum."""
    made = world("conv")
    chosen = settings_for(made, drop=drop, drop_rate=0.0 if drop == "none" else 0.5, exact=exact)
    frozen, traces = replayed(monkeypatch, [lambda size=size: run(made, chosen, 2, size) for size in (1, 7, 64, COUNT)])
    compare_runs(frozen, exact)
    for trace in traces[1:]:
        assert_same_bits(traces[0].steps, trace.steps, "steps")


def compare_runs(frozen: FrozenNoise, exact: bool) -> None:
    first = frozen.runs[0]
    for calls in frozen.runs[1:]:
        assert len(calls) == len(first) == 2
        for one, other in zip(first, calls, strict=True):
            assert_same_bits(one.public, other.public, "what the noise function was told")
            if exact:
                assert_same_bits(one.total.tensors, other.total.tensors, "sum")
            assert oracles.distance(one.total.tensors, other.total.tensors) <= 1e-6 * oracles.norm(one.total.tensors)


def test_the_noise_of_a_step_is_added_once_whatever_the_parts() -> None:
    made = world("mlp", torch.float64)
    steps = [run(made, settings_for(made), 1, size).steps[0].gradient.tensors for size in (1, 7, COUNT)]
    for other in steps[1:]:
        assert oracles.distance(steps[0], other) < 1e-9  # noise that was drawn anew for a part would differ by far more


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("exact", [False, True])
def test_ranks(ranks: int, exact: bool) -> None:
    """Each rank sums its share; the reduced sum gets the same noise as one process would add, once."""
    made = world("linear", torch.float64)
    chosen = settings_for(made, drop="random", drop_rate=0.5, exact=exact)
    shares: list[ClippedSum] = []

    def of_rank(rank: int, reduce: object) -> Step:
        def read(units: Tensor) -> object:
            return reader(made, 5)(shard(units, rank, ranks))

        model = copy.deepcopy(made.model)
        return private_step(chosen, model, cross_entropy, read, reference, KEY, 0, lambda *event: None, reduce)  # type: ignore[arg-type]

    def collect(total: ClippedSum) -> ClippedSum:
        shares.append(total)
        return total

    def everything(total: ClippedSum) -> ClippedSum:
        return replace(total, tensors={n: torch.stack([s.tensors[n] for s in shares]).sum(0) for n in total.tensors})

    for rank in range(ranks):
        of_rank(rank, collect)
    results = [of_rank(rank, everything) for rank in range(ranks)]
    alone = run(made, chosen, 1).steps[0]
    for result in results:
        assert_same_bits(results[0].gradient.tensors, result.gradient.tensors, "gradient on every rank")
        assert_same_bits(dict(alone.masks), dict(result.masks), "masks")
        assert oracles.distance(alone.gradient.tensors, result.gradient.tensors) <= 1e-9
        if exact:
            assert_same_bits(alone.gradient.tensors, result.gradient.tensors, "gradient")


def test_a_step_can_be_recomputed_alone() -> None:
    """Step 5 run on its own draws the same units, mask and noise as after steps 0 to 4."""
    made = world("linear", torch.float64)
    chosen = settings_for(made, drop="random", drop_rate=0.5)
    seen: list[Tensor] = []
    results = []
    for steps in (range(6), [5]):
        for step in steps:
            model = copy.deepcopy(made.model)
            done = private_step(
                chosen, model, cross_entropy, reader(made, 9, seen.append), reference, KEY, step, lambda *event: None
            )
        results.append(done)
    assert_same_bits(results[0], results[1], "step 5")
    assert torch.equal(seen[5], seen[6]) and torch.equal(seen[5], participants(KEY, 5, COUNT, chosen.sampling_rate))
