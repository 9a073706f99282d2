"""The weight of one use of a convolution or linear layer: its units' squared norms now, its clipped sum later.

A method is `source:fate`. Source: `direct` and `unfold` form each unit's gradient, `batched` and `grouped` those of many units at once, `gram`
finds its length without forming it, `outer` too where a unit has one position. Fate: `keep` stores the gradients until the clip factors are known; `fold` forgets them, and multiplies
the factors into the output gradient for one ordinary weight gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsedp.dp.clipping import wide
from sparsedp.dp.masks import Masks
from sparsedp.engines.functional import weighted_sum
from sparsedp.engines.products import BatchedPair, ConvolutionPair, GroupedPair, LinearPair, Pair, position_sums
from sparsedp.engines.pullback import Direct, Gradients, Standardised
from sparsedp.engines.tracing import Use
from sparsedp.engines.units import Units, channels_last

Way = Direct | Standardised
MakeWay = Callable[[Masks, tuple[int, ...]], Way]
"""(masks, order of the weight's dimensions) -> the way back to the parameters."""

METHODS = (
    "direct:keep", "direct:fold", "unfold:keep", "unfold:fold", "gram:fold", "batched:keep", "batched:fold", "grouped:keep", "grouped:fold",
)  # fmt: skip

UNIT_BY_UNIT = ("direct", "unfold")
"""Sources of a convolution's gradients that take one unit after the other, as a CPU likes it."""

TOGETHER = ("batched", "grouped")
"""Those that take many units at once, as a GPU likes it."""

ROUNDING = 5e-7
"""Error of a folded float32 sum, as a part of the lengths of its products together (measured: up to 4e-7)."""

LEAST_GAIN = 1e-2
"""Below this gain, inner products with the filter are not read off the layer's output."""


@dataclass(eq=False)
class Part:
    """What one use contributes: squared norms, per-unit gradients of small parameters, and how to sum the weight's."""

    squares: Tensor
    vectors: Gradients
    sum: Callable[[Tensor], Gradients]
    """The clip factors per unit -> the clipped sum by parameter."""
    by_bias: Tensor | None = None
    """The bias's gradients, where they came along."""


def possible(use: Use, x: Tensor, dy: Tensor, units: Units, mask: Tensor | None, standardised: bool) -> list[str]:
    """The methods that give the right result for such a use; the first is a fair guess on a CPU."""
    assert use.weight is not None
    one_position = use.call.kind == "linear" and dy.numel() == units.count * dy.shape[-1]
    if one_position and not standardised:
        return ["outer:fold"]
    conv = use.call.kind == "conv"
    plain_image = conv and dy.ndim == 4 and use.call.settings[3] == 1
    sources = ["direct", *(["unfold", "batched"] if plain_image else []), *(["grouped"] if conv else [])]
    found = [f"{source}:{fate}" for source in sources for fate in ("keep", "fold")]
    if use.weight.numel() * units.count > KEEPABLE * (x.numel() + dy.numel()):
        found = [m for m in found if not m.endswith(":keep")]
    if mask is not None and mask.ndim > 1 or units.each is None or not (plain_image or use.call.kind == "linear"):
        return found
    if standardised and use.intact_output() is None:
        return found
    positions, channels = dy.numel() // units.count // use.weight.shape[0], use.weight.shape[0]
    gram, formed = positions * (channels + use.weight[0].numel()), channels * use.weight[0].numel()
    return ["gram:fold", *found] if gram < formed else [*found, "gram:fold"] if gram < 4 * formed else found


def candidates(use: Use, x: Tensor, dy: Tensor, units: Units, mask: Tensor | None, standardised: bool) -> list[str]:
    """Of the possible methods, those that can be fast on the device at hand."""
    slow = TOGETHER if x.device.type == "cpu" else UNIT_BY_UNIT if use.call.kind == "conv" else ()
    found = possible(use, x, dy, units, mask, standardised)
    return [method for method in found if method.split(":")[0] not in slow]


KEEPABLE = 20
"""Gradients may be kept where they are at most so many times larger than the activations that they replace."""


def variant(key: str, mask: Tensor | None) -> str:
    """The name of a use in a plan: the method may differ with how its weight is masked."""
    return key if mask is None else f"{key}@{'filter' if mask.ndim == 1 else 'weight'}"


def needs_output(use: Use, standardised: bool) -> bool:
    """Whether some method reads the gain's gradient off the output."""
    return standardised and use.call.kind == "conv"


def weight_part(
    use: Use, x: Tensor, dy: Tensor, units: Units, masks: Masks, make_way: MakeWay, name: str, method: str
) -> Part:  # fmt: skip
    """The part of the weight `name` of a use, by a method that is among its `candidates`."""
    source, fate = method.split(":")
    mask = masks.get(name)
    pair = _pair(use, x, dy, units, source)
    way = make_way(masks, _order(pair))
    standardised = isinstance(way, Standardised)
    grouped = use.call.kind == "conv" and use.call.settings[3] != 1
    by_channel = mask is not None and mask.ndim == 1 and not grouped
    short = dy[0, 0].numel() < pair.weight_shape[1:].numel()
    by_gain, by_bias = _gain_gradients(use, dy, units, way) if by_channel or source == "gram" or short else (None, None)
    if mask is not None and by_channel and (by_gain is not None or not standardised):
        part = _channels_part(use, x, dy, units, way, mask, by_gain, method)
        part.by_bias = by_bias
        return part
    if source == "gram" and standardised and by_gain is None:
        source, pair = "direct", _pair(use, x, dy, units, "direct")
        way = make_way(masks, _order(pair))
    part = _part(pair, way, source, fate, by_gain, mask)
    part.by_bias = by_bias
    return part


def _channels_part(
    use: Use, x: Tensor, dy: Tensor, units: Units, way: Way, mask: Tensor, by_gain: Tensor | None, method: str
) -> Part:
    """Only the chosen output channels are looked at, so that everything shrinks with the drop rate."""
    chosen = mask.nonzero().squeeze(1)
    dim = 1 if use.call.kind == "conv" else dy.ndim - 1
    source, fate = method.split(":")
    few = _pair(use, x, _select(dy, dim, chosen), units, source)
    part = _part(few, way.channels(chosen), source, fate, None if by_gain is None else by_gain[:, chosen], None)
    if isinstance(way, Standardised):
        assert by_gain is not None
        part.vectors = {way.gain_name: by_gain.reshape(-1, *way.gain_shape)}
    return Part(part.squares, part.vectors, lambda factors: {n: _scatter(t, mask) for n, t in part.sum(factors).items()})


def _select(t: Tensor, dim: int, chosen: Tensor) -> Tensor:
    """Some channels. Channels that lie side by side are picked by a product: reading all of them is faster than gathering few.

    A value that is not finite then spreads over its position, and its unit goes to the reference engine.
    """
    if not (channels_last(t) and t.device.type == "cpu"):
        return t.index_select(dim, chosen)
    rows, channels, *sides = t.shape
    picks = t.new_zeros((channels, len(chosen)))
    picks[chosen, torch.arange(len(chosen))] = 1
    flat = t.permute(0, 2, 3, 1).reshape(-1, channels) @ picks
    return flat.reshape(rows, *sides, len(chosen)).permute(0, 3, 1, 2)


def _scatter(rows: Tensor, mask: Tensor) -> Tensor:
    whole = rows.new_zeros((len(mask), *rows.shape[1:]))
    whole[mask] = rows
    return whole


def _part(pair: Pair, way: Way, source: str, fate: str, by_gain: Tensor | None, mask: Tensor | None) -> Part:
    if source == "outer":
        assert isinstance(pair, LinearPair)
        return Part(pair.masked_outer_squares(mask), {}, _folding(pair, way))
    if source == "gram":
        return _gram_part(pair, way, by_gain)
    pair.centre = isinstance(way, Standardised) and way.kept is None
    squares, vectors, kept = [], [], []
    step = pair.scratch_units
    for first in range(0, units := pair.units.count, step):
        last = min(first + step, units)
        gradients = pair.unit_gradients(first, last)
        found, small = way.squares(gradients, None if by_gain is None else by_gain[first:last], pair.centred)
        squares.append(found)
        vectors.append(small)
        if fate == "keep":
            kept.append(gradients)
    together = {name: torch.cat([v[name] for v in vectors]) for name in vectors[0]} if vectors else {}
    if fate == "keep":
        return Part(torch.cat(squares), together, _keeping(kept, way, pair))
    return Part(_with_rounding(torch.cat(squares), pair, way), together, _folding(pair, way))


def _with_rounding(squares: Tensor, pair: Pair, way: Way) -> Tensor:
    """Squared norms with room for the rounding of the folded sum, which matters where products cancel."""
    return (squares.clamp_min(0).sqrt() + ROUNDING * way.gain_of_errors * pair.mass()).square()


def _gram_part(pair: Pair, way: Way, by_gain: Tensor | None) -> Part:
    assert isinstance(pair, ConvolutionPair | LinearPair)
    if isinstance(way, Direct):
        return Part(_with_rounding(pair.squared_lengths(None), pair, way), {}, _folding(pair, way))
    assert isinstance(pair, ConvolutionPair) and by_gain is not None
    squares = way.squares_from_total(pair.squared_lengths(way.scale), pair.filter_sums(), by_gain)
    return Part(_with_rounding(squares, pair, way), way.vector(by_gain), _folding(pair, way))


def _folding(pair: Pair, way: Way) -> Callable[[Tensor], Gradients]:
    return lambda factors: _in_weight_order(way.pull(pair.sum(factors)), way, pair)


def _keeping(kept: list[Tensor], way: Way, pair: Pair) -> Callable[[Tensor], Gradients]:
    def total(factors: Tensor) -> Gradients:
        if factors.device.type != "cpu":
            parts = zip(kept, factors.split([len(gradients) for gradients in kept]), strict=True)
            return _in_weight_order(way.finish(torch.stack([weighted_sum(*part) for part in parts]).sum(0)), way, pair)
        values, place = factors.tolist(), 0
        result = torch.zeros_like(kept[0][0])
        for gradients in kept:
            for gradient in gradients:
                if values[place] > 0:
                    result.add_(gradient, alpha=values[place])
                place += 1
        return _in_weight_order(way.finish(result), way, pair)

    return total


def _in_weight_order(gradients: Gradients, way: Way, pair: Pair) -> Gradients:
    order = _order(pair)
    back = sorted(range(len(order)), key=order.__getitem__)
    return {n: t.permute(back) if n == way.name else t for n, t in gradients.items()}


def _order(pair: Pair) -> tuple[int, ...]:
    return pair.order if isinstance(pair, ConvolutionPair) else tuple(range(len(pair.weight_shape)))


def _pair(use: Use, x: Tensor, dy: Tensor, units: Units, source: str) -> Pair:
    assert use.weight is not None
    channels = dy.shape[1 if use.call.kind == "conv" else -1]
    shape = torch.Size((channels, *use.weight.shape[1:]))
    if use.call.kind == "conv":
        kind = {"batched": BatchedPair, "grouped": GroupedPair}.get(source, ConvolutionPair)
        last = channels_last(x) and source not in TOGETHER
        return kind(x, dy, shape, use.call.settings, units, source == "unfold", last)
    return LinearPair(x, dy, shape, (), units)


def _gain_gradients(use: Use, dy: Tensor, units: Units, way: Way) -> tuple[Tensor | None, Tensor | None]:
    """<g, w^> / gain per unit and channel, from the layer's own output: (<dy, output> - bias * sum dy) / gain; and the sum of dy."""
    output = use.intact_output()
    if not isinstance(way, Standardised) or output is None or use.call.kind != "conv":
        return None, None
    bias: Any = use.call.bias
    if float(way.gain.abs().min()) < LEAST_GAIN * (1 + (float(bias.abs().max()) if bias is not None else 0.0)):
        return None, None
    products = units.sum(position_sums(dy * output.to(dy.dtype)))
    sums = units.sum(position_sums(dy))
    if bias is not None:
        products = products - sums * bias.to(wide(bias.dtype))
    return products / way.gain[:, 0], sums
