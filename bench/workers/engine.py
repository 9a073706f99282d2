"""An engine of ours: the clipped sum of one micro-batch on given masks, and the optimiser's step with it. No noise, as the peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.workers.common import LEARNING_RATE, Data, cross_entropy, finish, made_up, shipped_model
from bench.workers.common import device_memory as device_memory
from bench.workers.serve import Took
from sparsedp import keys
from sparsedp.dp.clipping import Rows
from sparsedp.dp.masks import maskable_layers, participating
from sparsedp.dp.selection import select
from sparsedp.dp.values import public
from sparsedp.engines import choose_engine


def load(spec: dict[str, Any]) -> Data:
    return made_up(spec)


def build(spec: dict[str, Any], data: Data) -> Callable[[], Took]:
    model = shipped_model(spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    layers = maskable_layers(model, spec["granularity"])
    weights = public(participating(model), "made up")
    masks = select(layers, "random", spec["rate"], {}, weights, keys.chosen("bench"), 0)
    rows = Rows.make(*data, views=spec["views"])
    engine = choose_engine(spec["engine"], model, cross_entropy, rows, masks)

    def step() -> Took:
        total = engine(model, cross_entropy, rows, masks, 1.0)
        for name, p in participating(model).items():
            p.grad = total[name].to(p.dtype) / spec["batch"]
        optimizer.step()
        finish(spec)
        return Took(len(rows.unit))

    step.notes = {"engine": engine.name, "refused": list(engine.notes)}  # type: ignore[attr-defined]
    return step
