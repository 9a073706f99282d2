"""A small model, small data and a loop around them, for tests of the private side of a user's own loop."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparsedp
from sparsedp.dp.masks import Masks, expand
from sparsedp.dp.selection import select
from sparsedp.dp.values import public
from tests.made_up import KEY

ROWS, WIDTH, CLASSES = 40, 6, 3


def cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
    """One loss per row."""
    return F.cross_entropy(output, labels, reduction="none")


def model_of(seed: int = 0, bias: bool = True) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDTH, 5, bias=bias), nn.Tanh(), nn.Linear(5, CLASSES, bias=bias))


def data_of(rows: int = ROWS, seed: int = 0) -> tuple[Tensor, Tensor]:
    own = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=own), torch.randint(0, CLASSES, (rows,), generator=own)


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any = cross_entropy, **changes: Any) -> sparsedp.Private:
    given = {
        "num_examples": ROWS, "batch_size": 10, "noise_multiplier": 1.0, "steps": 6, "delta": 1e-3, "key": KEY, "engine": "functional",
    }  # fmt: skip
    return sparsedp.attach(model, optimizer, loss, **(given | changes))


def ready(**changes: Any) -> tuple[nn.Module, torch.optim.Optimizer, sparsedp.Private]:
    """A model, SGD and the private side."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, attach(model, optimizer, **changes)


def loop(private: sparsedp.Private, optimizer: torch.optim.Optimizer, data: Any = None, **how: Any) -> None:
    for batch in private.batches(data_of() if data is None else data, **how):
        private.backward(batch)
        optimizer.step()


def masks_of(private: sparsedp.Private) -> Masks:
    """What the next step may move, worked out anew."""
    s = private.settings
    weights = public({n: p for n, p in private.model.named_parameters() if p.requires_grad}, "a test's")
    return select(s.layers, s.drop, s.drop_rate, s.pruned, weights, private.key, private.taken)


def elementwise(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """All parameters and every state entry of a parameter's shape, copied."""
    found = {}
    for name, p in model.named_parameters():
        found[name] = p.detach().clone()
        for entry, value in optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor) and value.shape == p.shape:
                found[f"{name}/{entry}"] = value.detach().clone()
    return found


def dropped(masks: Masks, name: str, tensor: Tensor) -> Tensor:
    """The coordinates of a parameter, or of one of its state entries, that must not move."""
    owner = name.split("/")[0]
    if owner not in masks:
        return torch.zeros(tensor.shape, dtype=torch.bool)
    return ~expand(masks[owner], tensor.shape).expand(tensor.shape)
