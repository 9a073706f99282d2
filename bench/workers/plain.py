"""Plain SGD: the shipped model in an ordinary loop. The limit that privacy is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.workers.common import LEARNING_RATE, Data, cross_entropy, finish, made_up, shipped_model
from bench.workers.common import device_memory as device_memory
from bench.workers.serve import Took


def load(spec: dict[str, Any]) -> Data:
    return made_up(spec)


def build(spec: dict[str, Any], data: Data) -> Callable[[], Took]:
    model = shipped_model(spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    images, labels = data

    def step() -> Took:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).mean().backward()
        optimizer.step()
        finish(spec)
        return Took(len(images))

    return step
