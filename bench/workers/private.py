"""Whole private steps as a user takes them: selection, sampling, micro-batches, clipping, noise, update, moving average."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import sparsedp
from bench.workers.common import LEARNING_RATE, Data, cross_entropy, finish, made_up, shipped_model
from bench.workers.common import device_memory as device_memory
from bench.workers.serve import Took
from sparsedp import keys
from sparsedp.dp.sampling import participants
from sparsedp.optim import average_of


def load(spec: dict[str, Any]) -> Data:
    return made_up({**spec, "batch": spec["examples"]})


def build(spec: dict[str, Any], data: Data) -> Callable[[], Took]:
    """`batch` is the expected batch of `examples`; with both equal, every example joins every step."""
    model, key = shipped_model(spec), keys.chosen("bench")
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    average = average_of(model, 0.9999)
    private = sparsedp.attach(
        model, optimizer, cross_entropy, num_examples=spec["examples"], batch_size=spec["batch"], noise_multiplier=1.0, steps=100,
        drop="random" if spec["rate"] else "none", drop_rate=spec["rate"], granularity=spec["granularity"], key=key,
        micro_batch=spec.get("micro_batch"),
    )  # fmt: skip
    batches: Iterator[Any] = private.batches(data, units=units(spec))

    def step() -> Took:
        joined = len(participants(key, private.taken, spec["examples"], private.settings.sampling_rate))
        private.backward(next(batches))
        optimizer.step()
        average.update_parameters(model)
        finish(spec)
        return Took(joined * spec["views"])

    return step


def units(spec: dict[str, Any]) -> Tensor:
    """Which example each row belongs to."""
    return torch.arange(spec["examples"]).repeat_interleave(spec["views"])
