"""Record and replay: freeze what the noise function returns, run on a neighbouring data set, and compare everything.

Of two neighbouring runs with equal noise outputs, the inputs of the noise function may differ by the declared sensitivity.
All else (masks, weights, optimiser, ledger, logs) must be the same to the bit: any difference is a leak. One test thus covers
every mask that looks at gradients, every tensor without noise, and every count of a realised batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from sparsedp.dp import mechanism
from sparsedp.dp.masks import Masks
from sparsedp.dp.noise import add_noise
from sparsedp.dp.randomness import Key
from sparsedp.dp.values import ClippedSum, Released
from tests import oracles

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Call:
    """What one call of the noise function was given."""

    total: ClippedSum
    public: dict[str, Any]


class FrozenNoise:
    """Stands where `add_noise` stood. The first run draws and keeps; every later run gets what was kept."""

    def __init__(self) -> None:
        self.runs: list[list[Call]] = []
        self._kept: list[Released] = []

    def __call__(self, total: ClippedSum, noise_multiplier: float, masks: Masks, key: Key, purpose: str, step: int) -> Released:
        calls = self.runs[-1]
        copied = {name: t.detach().clone() for name, t in total.tensors.items()}
        public = {"sigma": noise_multiplier, "masks": dict(masks), "key": key, "purpose": purpose, "step": step}
        public |= {"sensitivity": total.sensitivity, "grid": total.grid}
        calls.append(Call(dataclasses.replace(total, tensors=copied), public))
        if len(self.runs) == 1:
            self._kept.append(add_noise(_of_floats(total), noise_multiplier, masks, key, purpose, step))
        assert len(calls) <= len(self._kept), "a neighbouring data set called for noise more often"
        kept = self._kept[len(calls) - 1]
        return Released({name: t.clone() for name, t in kept.tensors.items()}, kept.origin)


def _of_floats(total: ClippedSum) -> ClippedSum:
    """A sum on a grid as floats: what is frozen may be any noise, and float noise is drawn a hundred times faster."""
    if total.grid is None:
        return total
    return ClippedSum({name: (t.double() * total.grid).float() for name, t in total.tensors.items()}, total.sensitivity)


def replayed(
    monkeypatch: pytest.MonkeyPatch, runs: Sequence[Callable[[], Result]], where: Sequence[Any] = (mechanism,)
) -> tuple[FrozenNoise, list[Result]]:
    """The runs, one after the other, under one frozen noise; `where` are the modules that call `add_noise`."""
    frozen = FrozenNoise()
    results = []
    with monkeypatch.context() as patched:
        for module in where:
            patched.setattr(module, "add_noise", frozen)
        for run in runs:
            frozen.runs.append([])
            results.append(run())
    return frozen, results


def assert_no_leak(frozen: FrozenNoise, results: Sequence[Any], units_replaced: bool = False) -> None:
    """Every later run against the first: noise inputs within the sensitivity (twice it for a replaced unit), all else equal."""
    first = frozen.runs[0]
    assert first, "no noise was added at all"
    for calls, result in zip(frozen.runs[1:], results[1:], strict=True):
        assert len(calls) == len(first), f"noise was asked for {len(calls)} times, not {len(first)}"
        for one, other in zip(first, calls, strict=True):
            assert_same_bits(one.public, other.public, "what the noise function was told")
            unit = one.total.grid or 1.0
            bound = (2 if units_replaced else 1) * one.total.sensitivity * (1 + 1e-6) + 1e-12
            moved = oracles.distance(one.total.tensors, other.total.tensors) * unit
            assert moved <= bound, f"one unit moved the noise input by {moved}, above {bound}"
        assert_same_bits(results[0], result, "result")


def assert_same_bits(first: Any, second: Any, place: str) -> None:
    """Equal trees: tensors and arrays to the bit, also where they hold NaN."""
    assert type(first) is type(second), f"{place}: {type(first).__name__} against {type(second).__name__}"
    if isinstance(first, Tensor | np.ndarray):
        one, other = (t.detach().cpu().numpy() if isinstance(t, Tensor) else t for t in (first, second))
        same = one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        assert same, f"{place} is not the same to the bit"
    elif dataclasses.is_dataclass(first) and not isinstance(first, type):
        for field in dataclasses.fields(first):
            assert_same_bits(getattr(first, field.name), getattr(second, field.name), f"{place}.{field.name}")
    elif isinstance(first, Mapping):
        assert list(first) == list(second), f"{place}: other keys"
        for name in first:
            assert_same_bits(first[name], second[name], f"{place}[{name!r}]")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), f"{place}: {len(first)} entries against {len(second)}"
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            assert_same_bits(one, other, f"{place}[{index}]")
    else:
        assert first == second or (first != first and second != second), f"{place}: {first!r} against {second!r}"


def tensors_of(module: torch.nn.Module) -> dict[str, Tensor]:
    """A model's parameters and buffers, copied."""
    return {name: t.detach().clone() for name, t in module.state_dict().items()}
