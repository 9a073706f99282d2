"""Which coordinates of a model can be masked, how many stay, and what a mask looks like.

A mask is a bool tensor, True where the coordinate takes part. It has the shape of its weight, or, when whole output
channels are masked (granularity `filter`), one entry per output channel; it is never expanded for storage. A parameter
without a mask takes part entirely. Rates are always the fraction that is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import Tensor, nn

from sparsedp.errors import require, wrong

Masks = Mapping[str, Tensor]
GRANULARITIES = ("weight", "filter")


@dataclass(frozen=True)
class Layer:
    """One maskable weight: its parameter's name and shape, and whether it may be masked by whole output channels."""

    name: str
    shape: tuple[int, ...]
    by_filter: bool

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def participating(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that take part, by name, tied ones once. What the user froze is absent."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def maskable_layers(model: nn.Module, granularity: str = "weight", patterns: Sequence[str] | None = None) -> tuple[Layer, ...]:
    """The weights of convolutions and linear layers that train; `patterns` (shell-style, on parameter names) choose others.

    Under `filter` the last linear layer stays masked by weight: a class whose output is dropped would get no update.
    """
    require(granularity in GRANULARITIES, "granularity", granularity, "it must be 'weight' or 'filter'", "choose one of them")
    trained = participating(model)
    owners = {id(p): name for name, p in trained.items()}
    found: dict[str, bool] = {}
    last_linear = None
    for module in model.modules():
        if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear):
            continue
        name = owners.get(id(raw_weight(module)))
        if name is not None:
            found[name] = True
            last_linear = name if isinstance(module, nn.Linear) else last_linear
    if patterns is not None:
        for want in patterns:
            require(any(fnmatchcase(n, want) for n in trained), "the maskable pattern", want, "no trained parameter has such a name",
                    "correct it, or leave it out")  # fmt: skip
        found = {n: n in found for n, p in trained.items() if any(fnmatchcase(n, want) for want in patterns)}
        for n in found:
            if trained[n].ndim < 1 or trained[n].numel() < 1:
                raise wrong(
                    f"maskable parameter {n}", tuple(trained[n].shape), "a mask needs at least one coordinate", "leave it out"
                )
    return tuple(
        Layer(n, tuple(trained[n].shape), granularity == "filter" and known and n != last_linear) for n, known in found.items()
    )


def check_maskable(layers: Sequence[Layer], name: str, rate: float) -> None:
    """Refuse a rate above zero where nothing can be masked: it would be stated, and not be done."""
    require(
        rate == 0 or bool(layers), name, rate, "the model has no weight that may be masked",
        "give maskable patterns of parameter names, or set it to 0",
    )  # fmt: skip


def unmasked(model: nn.Module, layers: Sequence[Layer]) -> tuple[str, ...]:
    """The matrices and kernels that train and are not among `layers`: a parameter with one long side at most is none."""
    masked = {layer.name for layer in layers}
    return tuple(n for n, p in participating(model).items() if n not in masked and p.ndim > 1 and p.numel() > max(p.shape))


def told_unmasked(model: nn.Module, layers: Sequence[Layer]) -> tuple[str, ...]:
    """That in a sentence for whoever prunes or drops; nothing where there is nothing to tell."""
    names = unmasked(model, layers)
    shown = f"{', '.join(names[:5])}{', ..' if len(names) > 5 else ''}"
    return (f"not masked, and take part in every step: {shown}; give maskable patterns to mask them.",) if names else ()


def raw_weight(module: nn.Module) -> Tensor | None:
    """The parameter behind a layer's weight, also when it is parametrised by one tensor."""
    parametrised = getattr(module, "parametrizations", None)
    if parametrised is not None and "weight" in parametrised:
        original: Tensor | None = getattr(parametrised["weight"], "original", None)
        return original
    return module._parameters.get("weight")


def dropped_count(n: int, rate: float) -> int:
    """How many of n coordinates a rate drops: floor(rate * n + 1/2), but never the last one."""
    require(0.0 <= rate < 1.0, "rate", rate, "a rate is the fraction dropped, in [0, 1)", "0.9 drops nine tenths")
    return min(math.floor(rate * n + 0.5), max(n - 1, 0))


def kept_count(n: int, rate: float) -> int:
    """How many of n coordinates stay at a drop rate: n - floor(rate * n + 1/2), never fewer than one (of at least one)."""
    return n - dropped_count(n, rate)


def expand(mask: Tensor, shape: Sequence[int]) -> Tensor:
    """A view of the mask that broadcasts to the weight's shape."""
    if mask.ndim == len(shape):
        return mask
    return mask.reshape(-1, *([1] * (len(shape) - 1)))


def restrict(tensors: Mapping[str, Tensor], masks: Masks) -> dict[str, Tensor]:
    """The tensors with exact zeros (also for NaN) where a mask is False."""
    return {
        name: torch.where(expand(masks[name], t.shape), t, torch.zeros((), dtype=t.dtype, device=t.device))
        if name in masks
        else t
        for name, t in tensors.items()
    }


def combine(first: Masks, second: Masks) -> dict[str, Tensor]:
    """Coordinates in both. Two channel masks stay one; a channel mask meeting a weight mask becomes a weight mask."""
    both = dict(first)
    for name, mask in second.items():
        other = first.get(name)
        if other is None:
            both[name] = mask
        elif other.ndim == mask.ndim:
            both[name] = other & mask
        else:
            wide, narrow = (other, mask) if other.ndim > mask.ndim else (mask, other)
            both[name] = wide & expand(narrow, wide.shape)
    return both


def keep_top(scores: Tensor, count: int, eligible: Tensor | None = None) -> Tensor:
    """A mask of exactly `count` entries: the highest scores among the eligible; ties fall to the lowest index, NaN is lowest."""
    flat = torch.nan_to_num(scores.detach().reshape(-1), nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    places = None if eligible is None else eligible.reshape(-1).nonzero().squeeze(1)
    ranked = flat if places is None else flat[places]
    if not 0 <= count <= ranked.numel():
        raise AssertionError(f"{count} of {ranked.numel()} cannot be kept")
    chosen = _top(ranked, count)
    if places is None:
        return chosen.reshape(scores.shape)
    mask = torch.zeros(flat.numel(), dtype=torch.bool, device=flat.device)
    mask[places[chosen]] = True
    return mask.reshape(scores.shape)


def _top(ranked: Tensor, count: int) -> Tensor:
    if count == 0 or count == ranked.numel():
        return torch.full(ranked.shape, count > 0, dtype=torch.bool, device=ranked.device)
    threshold = _kth_largest(ranked, count)
    chosen = ranked > threshold
    missing = count - int(torch.count_nonzero(chosen))
    ties = (ranked == threshold).nonzero().squeeze(1)[:missing]
    chosen[ties] = True
    return chosen


def _kth_largest(ranked: Tensor, count: int) -> Tensor:
    if ranked.device.type != "cpu":
        return torch.kthvalue(ranked, ranked.numel() - count + 1).values
    place = ranked.numel() - count
    values = ranked.float() if ranked.dtype == torch.bfloat16 else ranked  # which numpy does not know
    return torch.tensor(kth(values.detach(), place), dtype=values.dtype)


_MANY, _SAMPLE, _MARGIN = 2**20, 2**16, 2**10


def kth(values: Tensor, place: int) -> float:
    """What stands at `place` when the values (on the CPU, none of them NaN) are sorted; of many, only a narrow range is sorted.

    A sample says where to look. Should it mislead, all are sorted: the answer is exact in any case.
    """
    if len(values) < _MANY:
        return float(np.partition(values.numpy(), place)[place])
    sample = values[:: len(values) // _SAMPLE].sort().values
    near = place * len(sample) // len(values)
    low, high = sample[max(near - _MARGIN, 0)], sample[min(near + _MARGIN, len(sample) - 1)]
    below = int(torch.count_nonzero(values <= low))
    if place < below:
        if place >= int(torch.count_nonzero(values < low)):
            return float(low)  # many are alike there, such as all that an earlier round has pruned
        below, inside = 0, values
    else:
        inside = values[(values > low) & (values <= high)]
        if place >= below + len(inside):
            below, inside = 0, values
    return float(np.partition(inside.numpy(), place - below)[place - below])
