"""Who takes part in a step: true Poisson sampling, recomputable from (key, step).

Every unit joins every step by a coin of its own, so the batch has a random size, and an empty batch is a normal step.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from sparsedp.dp.randomness import Key, words
from sparsedp.errors import require


def sampling_rate(num_units: int, batch_size: float) -> float:
    """q = B / N, the probability with which every unit joins a step."""
    require(num_units >= 1, "num_examples", num_units, "there must be at least one", "state the number of training examples")
    require(
        0 < batch_size <= num_units, "batch_size", batch_size,
        f"the expected batch must be above 0 and at most the number of examples, {num_units}", "lower it",
    )  # fmt: skip
    return batch_size / num_units


def participants(key: Key, step: int, num_units: int, rate: float, purpose: str = "train") -> Tensor:
    """The units of step `step`, ascending: each of `num_units` joins independently with probability `rate`.

    Guarantee: the coin of unit i at step t is a function of (key, t, i) alone.
    Guarantee: the probability is `rate` rounded down to a multiple of 2**-64, never above `rate`.
    """
    require(0.0 <= rate <= 1.0, "sampling rate", rate, "it is a probability", "use batch_size / num_examples")
    if rate == 1.0:
        return torch.arange(num_units)
    bound = np.uint64(int(rate * 2.0**64))
    coins = words(key, 0, num_units, "sampling", purpose, step)
    return torch.from_numpy(np.flatnonzero(coins < bound))


def micro_batches(units: Tensor, size: int) -> Iterator[Tensor]:
    """The same units in the same order, at most `size` at a time. An empty batch gives nothing."""
    require(size >= 1, "micro_batch", size, "it must hold at least one unit", "leave it out to have it chosen")
    for start in range(0, len(units), size):
        yield units[start : start + size]


def shard(units: Tensor, rank: int, world_size: int) -> Tensor:
    """The units that one of several ranks works on: disjoint, and together all of them."""
    return units[rank::world_size]
