"""The work of a private step that does not grow with the batch: selection, noise, division, update, moving average."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bench.workers.common import LEARNING_RATE, shipped_model
from bench.workers.serve import Took
from sparsedp import keys
from sparsedp.dp.masks import maskable_layers, participating
from sparsedp.dp.noise import add_noise
from sparsedp.dp.selection import select
from sparsedp.dp.values import ClippedSum, public
from sparsedp.optim import average_of
from sparsedp.optimisers import Guard


def load(spec: dict[str, Any]) -> None:
    """There is no data in it."""


def build(spec: dict[str, Any], data: None) -> Callable[[], Took]:
    model, key = shipped_model(spec), keys.chosen("bench")
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    average, guard = average_of(model, 0.9999), Guard(model, optimizer)
    layers, trained = maskable_layers(model, spec["granularity"]), participating(model)
    sums = {name: torch.randn(p.shape, generator=torch.Generator().manual_seed(0)) for name, p in trained.items()}
    count = 0

    def step() -> Took:
        nonlocal count
        count += 1
        phases: dict[str, float] = {}
        with timed(phases, "selection"):
            masks = select(layers, spec["drop"], spec["rate"], {}, public(trained, "made up"), key, count)
        total = ClippedSum({name: t.clone() for name, t in sums.items()}, sensitivity=1.0)
        with timed(phases, "noise"):
            noised = add_noise(total, 1.0, masks, key, "train", count)
        with timed(phases, "update"):
            guard.arm(noised.over(1024.0).tensors, masks)
            optimizer.step()
        with timed(phases, "average"):
            average.update_parameters(model)
        return Took(0, phases)

    return step


@contextmanager
def timed(phases: dict[str, float], name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    phases[name] = time.perf_counter() - began
