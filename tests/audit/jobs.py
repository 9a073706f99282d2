"""Runs that audits are tried on, and wrong versions of the code, applied from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sparsedp import keys
from sparsedp.config import Data, Mechanism, Run, Sparsity
from sparsedp.dp import mechanism, noise
from sparsedp.dp.values import Released

KEY = keys.chosen("audit")
DENSE = Run(mechanism=Mechanism(epsilon=1.0, steps=4))
SPARSE = Run(
    data=Data(augment="crop", views=2), mechanism=Mechanism(epsilon=1.0, steps=4, clip=0.5, unit_norm=False),
    sparsity=Sparsity(prune="synflow", prune_rate=0.3, drop="random", drop_rate=0.3),
)  # fmt: skip


def noise_times(patch: pytest.MonkeyPatch, factor: float) -> None:
    """Less noise than is charged."""
    real = noise.normal
    patch.setattr(noise, "normal", lambda *args: real(*args) * factor)


def rate_times(patch: pytest.MonkeyPatch, factor: float) -> None:
    """Units join more often than is charged."""
    real = mechanism.participants
    patch.setattr(
        mechanism,
        "participants",
        lambda key, step, count, rate, **more: real(key, step, count, min(1.0, factor * rate), **more),
    )


def duplicates(patch: pytest.MonkeyPatch, factor: float) -> None:
    """Every unit that joins is read twice."""
    real = mechanism.participants
    patch.setattr(mechanism, "participants", lambda *args, **more: torch.cat([real(*args, **more)] * int(factor)))


def one_tensor_without_noise(patch: pytest.MonkeyPatch, factor: float) -> None:
    """The noise passes over one parameter."""
    real = mechanism.add_noise

    def wrong(total: Any, sigma: float, masks: Any, *where: Any) -> Released:
        noised = real(total, sigma, masks, *where)
        bare = {n: total.tensors[n] if n.endswith("conv.weight") else t for n, t in noised.tensors.items()}
        return Released(bare, noised.origin)

    patch.setattr(mechanism, "add_noise", wrong)


WRONG: dict[str, tuple[Callable[[pytest.MonkeyPatch, float], None], float]] = {
    "noise x 0.71": (noise_times, 0.71),
    "q x 1.5": (rate_times, 1.5),
    "duplicates x 2": (duplicates, 2),
    "a tensor without noise": (one_tensor_without_noise, 1),
}
