"""Pre-pruning, once, before training: from scores to masks. What nothing here can receive, nothing here can leak.

Random and SynFlow get no data: their signatures are the proof that they are free. DP-SNIP's mask is made from a `Released`
value, which is post-processing of the one noised release in `mechanism.py`: normalisation, threshold, ties and the repair
of emptied layers all see the noised scores alone.

Random works per layer; the others rank globally. Layers that are masked by whole output channels and layers that are masked
by weight are ranked in two separate groups, each at the same rate: a channel's score stands for thousands of weights, so in
one ranking the last linear layer, which stays masked by weight, would always be emptied first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from sparsedp.dp.masks import Layer, Masks, keep_top, kept_count, kth
from sparsedp.dp.randomness import Key, uniform
from sparsedp.dp.values import Released
from sparsedp.errors import require, wrong

Scores = Mapping[str, Tensor]
"""One tensor per layer, by name: of the weight's shape, or one number per output channel. The highest stay."""
Flow = Callable[[Mapping[str, Tensor]], Scores]
"""Non-negative weights -> weight * dR/dweight, up to one common factor, R being the sum of the linearised network's outputs."""
Scope = Literal["global", "layer"]

ROUNDS = 100


def shape_of(layer: Layer) -> tuple[int, ...]:
    """The shape of a layer's mask and scores."""
    return layer.shape[:1] if layer.by_filter else layer.shape


def random(layers: Sequence[Layer], rate: float, key: Key) -> dict[str, Tensor]:
    """Of every layer, a subset drawn uniformly among those of its exact size.

    Guarantee: the mask is a function of (layers, rate, key); it cannot receive data.
    """
    scores = {la.name: uniform(key, math.prod(shape_of(la)), "pruning", la.name).reshape(shape_of(la)) for la in layers}
    return from_scores(layers, scores, rate, scope="layer")


def synflow(
    layers: Sequence[Layer], weights: Mapping[str, Tensor], flow: Flow, rate: float, rounds: int = ROUNDS, floor: bool = True
) -> dict[str, Tensor]:
    """Tanaka et al. 2020: after round k a fraction keep^(k / rounds) is left, each round ranking what the last one kept.

    Guarantee: no data: `weights` are the initial (or public) ones, `flow` is the linearised network on an all-ones input.
    Guarantee: no layer empties before the whole network does, except by rounding; `floor` then gives one back.
    """
    require(rounds >= 1, "rounds", rounds, "there must be at least one", "100 are usual")
    current = {layer.name: weights[layer.name].detach().abs().contiguous() for layer in layers}
    alive = {la.name: torch.ones(shape_of(la), dtype=torch.bool, device=current[la.name].device) for la in layers}
    scores: dict[str, Tensor] = {}
    for done in range(1, rounds + 1):
        scores = _scores_of_masks(layers, flow(current))
        now = rate if done == rounds else 1.0 - (1.0 - rate) ** (done / rounds)
        alive = _ranked(layers, scores, now, alive)
        for layer in layers:
            weight, mask = current[layer.name], alive[layer.name]
            weight *= mask.reshape(mask.shape + (1,) * (weight.ndim - mask.ndim))
    return _with_floor(layers, scores, alive) if floor else alive


def saliency(released: Released) -> dict[str, Tensor]:
    """|g| / sum |g|, over all layers together: numerator, denominator and all that follows come from the noised scores."""
    total = torch.stack([g.double().abs().sum().cpu() for g in released.tensors.values()]).sum()
    scale = 1.0 / float(total.clamp_min(torch.finfo(torch.float64).tiny))
    return {name: g.double().abs() * scale for name, g in released.tensors.items()}


def from_scores(layers: Sequence[Layer], scores: Scores, rate: float, scope: Scope = "global") -> dict[str, Tensor]:
    """Exactly the best: per layer, or ranked over all layers (of one granularity), never fewer than one in a layer.

    Counts are exact in both scopes: a layer that a global ranking empties gets its best entry back, and the lowest of the
    others goes in exchange. Ties fall to the lowest index; NaN is lowest.
    """
    for layer in layers:
        _check_shape(layer, scores)
    if scope == "layer":
        return {la.name: keep_top(scores[la.name], kept_count(math.prod(shape_of(la)), rate)) for la in layers}
    return _with_floor(layers, scores, _ranked(layers, scores, rate))


def _check_shape(layer: Layer, scores: Scores) -> None:
    found = tuple(scores[layer.name].shape) if layer.name in scores else None
    if found != shape_of(layer):
        raise wrong(
            f"the pruning scores for {layer.name}", found, f"they must have shape {shape_of(layer)}",
            "return one score per coordinate, or per output channel under filter",
        )  # fmt: skip


def _scores_of_masks(layers: Sequence[Layer], found: Scores) -> dict[str, Tensor]:
    """Scores in the shapes of the masks: a channel's is the sum over its filter, which is c * dR/dc for a c on the filter."""
    scores = {}
    for layer in layers:
        score = found[layer.name].flatten(1).sum(1) if layer.by_filter else found[layer.name]
        if not bool(score.amax().isfinite()):
            raise wrong(f"the flow through {layer.name}", "not finite", "its weights must be finite", "check the weights")
        scores[layer.name] = score
    return scores


def _groups(layers: Sequence[Layer]) -> list[list[Layer]]:
    """Layers that are ranked together."""
    kinds = ([la for la in layers if la.by_filter], [la for la in layers if not la.by_filter])
    return [group for group in kinds if group]


def _ranked(layers: Sequence[Layer], scores: Scores, rate: float, alive: Masks | None = None) -> dict[str, Tensor]:
    """The exact global ranking, of what is alive if that is given, before any floor: a layer may come out empty."""
    masks = {}
    for group in _groups(layers):
        flat = _flat(group, scores)
        count = kept_count(len(flat), rate)
        if alive is not None and int(torch.count_nonzero(flat)) < count:
            # Scores are zero where an earlier round pruned, and here also on some of what is left, which goes first.
            flat = torch.where(_flat(group, alive), flat, torch.full((), -1.0, dtype=flat.dtype, device=flat.device))
        parts = torch.split(top(flat, count), [math.prod(shape_of(la)) for la in group])
        masks.update({la.name: part.reshape(shape_of(la)) for la, part in zip(group, parts, strict=True)})
    return {la.name: masks[la.name] for la in layers}


def _flat(group: Sequence[Layer], tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensors[layer.name].detach().reshape(-1) for layer in group])


def _with_floor(layers: Sequence[Layer], scores: Scores, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One entry back for every empty layer; the lowest kept ones of layers that can spare them go in exchange."""
    fixed = dict(masks)
    for group in _groups(layers):
        empty = [la.name for la in group if not bool(masks[la.name].any())]
        for name in empty:
            fixed[name] = keep_top(scores[name], 1)
        if empty:
            fixed.update(_without_lowest(group, scores, fixed, len(empty), spared=empty))
    return fixed


def _without_lowest(
    group: Sequence[Layer], scores: Scores, masks: Mapping[str, Tensor], count: int, spared: Sequence[str]
) -> dict[str, Tensor]:
    """The masks less their `count` lowest entries (as far as there are any), the best of each layer set aside."""
    names = [la.name for la in group if la.name not in spared]
    best = {name: keep_top(scores[name], 1, eligible=masks[name]) for name in names}
    if not names:
        return {}
    flat = torch.cat([scores[name].reshape(-1) for name in names])
    free = torch.cat([(masks[name] & ~best[name]).reshape(-1) for name in names])
    stay = torch.split(keep_top(flat, max(int(free.sum()) - count, 0), free), [masks[name].numel() for name in names])
    return {name: part.reshape(masks[name].shape) | best[name] for name, part in zip(names, stay, strict=True)}


def top(flat: Tensor, count: int) -> Tensor:
    """`keep_top`, with fewer passes over tens of millions of scores."""
    if flat.device.type != "cpu" or not 0 < count < flat.numel() or bool(flat.amax().isnan()):
        return keep_top(flat, count)
    threshold = kth(flat, flat.numel() - count)
    chosen = flat >= threshold
    surplus = int(torch.count_nonzero(chosen)) - count
    if surplus:
        ties = (flat == threshold).nonzero().squeeze(1)
        chosen[ties[len(ties) - surplus :]] = False
    return chosen
