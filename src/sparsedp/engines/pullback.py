"""From the gradient by a weight as it was used to the gradient by the parameters behind it.

The way back is linear, so the clipped *sum* goes back once; only norms concern the units one by one. Masks lie on parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsedp.dp.masks import Masks, expand

FLOOR = 1e-4
"""The least variance * fan-in of weight standardisation (De et al.); a layer with another one is not recognised as such."""

STRETCH = 1024

Gradients = dict[str, Tensor]


class Direct:
    """The weight is a parameter."""

    def __init__(self, name: str, masks: Masks) -> None:
        self.name = name
        mask = masks.get(name)
        self.mask = None if mask is None else mask.float()

    def squares(self, gradients: Tensor, by_gain: Tensor | None = None, centred: bool = False) -> tuple[Tensor, Gradients]:
        """Squared norms of the masked gradients [units, *weight]; these are masked in place where there is a mask.

        For weight standardisation `by_gain` may be known from elsewhere, and the gradients' means over filters be zero already.
        """
        if self.mask is not None:
            gradients.mul_(expand(self.mask, gradients.shape[1:]))
        return squared_norms(gradients), {}

    def channels(self, chosen: Tensor) -> Direct:
        """The same for some output channels, without a mask."""
        return Direct(self.name, {})

    @property
    def gain_of_errors(self) -> float:
        """How much longer the way back can make a vector."""
        return 1.0

    def finish(self, total: Tensor) -> Gradients:
        """The sum of what `squares` left."""
        return {self.name: total}

    def pull(self, total: Tensor) -> Gradients:
        """The parameters' part of a sum of gradients by the weight; vectors (see `squares`) not among them."""
        return {self.name: total if self.mask is None else total * expand(self.mask, total.shape)}


class Standardised:
    """Weight standardisation: w^ = (w - mean) * gain * rsqrt(max(variance * fan-in, FLOOR)), per output channel.

    With s the scale, u the centred filter at unit length and g the gradient by w^, the gradient by w is
    s (g - mean(g) - <g, u> u), the second projection only where the floor is not active, and that by the gain is <g, w^> / gain.
    `kept` restricts all of it to some entries.
    """

    def __init__(self, name: str, gain_name: str, weight: Tensor, gain: Tensor, kept: Tensor | None, masks: Masks) -> None:
        self.name, self.gain_name = name, gain_name
        self.mask = masks.get(name)
        self.shape = weight.shape
        flat = weight.detach().flatten(1)
        self.kept = None if kept is None else expand(kept, weight.shape).expand(weight.shape).flatten(1).to(flat.dtype)
        self.fan_in = (
            flat.new_full((len(flat), 1), flat.shape[1]) if self.kept is None else self.kept.sum(1, keepdim=True).clamp_min(1)
        )
        centred = self._centre(flat)
        spread = centred.square().sum(1, keepdim=True)
        root = spread.clamp_min(FLOOR).rsqrt()
        self.gain = gain.detach().reshape(-1, 1)
        self.gain_shape = gain.shape
        self.scale = self.gain * root
        self.unscaled = centred * root
        """w^ / gain; of unit length where the floor is not active."""
        self.projects = (spread >= FLOOR).to(flat.dtype)
        self.direction = self.unscaled * self.projects
        self.factor = self.scale if self.mask is None else self.scale * expand(self.mask, self.shape).flatten(1)
        """What the projected gradient is multiplied by: the scale, zero off the mask."""

    def _centre(self, flat: Tensor) -> Tensor:
        if self.kept is None:
            return flat - flat.mean(-1, keepdim=True)
        flat = flat * self.kept
        return (flat - flat.sum(-1, keepdim=True) / self.fan_in) * self.kept

    def effective(self) -> Tensor:
        """w^, to compare with what the layer computes."""
        return (self.unscaled * self.gain).reshape(self.shape)

    def channels(self, chosen: Tensor) -> Standardised:
        """The same for some output channels, without a mask."""
        part = copy.copy(self)
        part.mask = None
        part.shape = torch.Size((len(chosen), *self.shape[1:]))
        for name in ("fan_in", "gain", "scale", "unscaled", "projects", "direction"):
            setattr(part, name, getattr(self, name)[chosen])
        part.factor = part.scale
        part.kept = None if self.kept is None else self.kept[chosen]
        part.gain_shape = torch.Size((len(chosen), *self.gain_shape[1:]))
        return part

    def _way_back(self, flat: Tensor) -> Tensor:
        along = (flat * self.direction).sum(-1, keepdim=True)
        result = self._centre(flat)
        result.addcmul_(along, self.direction, value=-1)
        return result.mul_(self.factor)

    def squares(self, gradients: Tensor, by_gain: Tensor | None = None, centred: bool = False) -> tuple[Tensor, Gradients]:
        """As `Direct.squares`; the gain's gradients come along."""
        flat = gradients.flatten(2)
        if by_gain is None:
            by_gain = (flat * self.unscaled).sum(2)
        if self.mask is None and self.kept is None:
            sums = torch.zeros_like(by_gain) if centred else flat.sum(2)
            lengths = lengths_of(flat).square()
            return self.squares_from(lengths, sums, by_gain), self.vector(by_gain)
        if self.kept is not None:
            flat.copy_(self._centre(flat))
        elif not centred:
            flat.sub_(flat.mean(2, keepdim=True))
        along = by_gain * self.projects[:, 0]
        flat.addcmul_(along[:, :, None], self.direction, value=-1).mul_(self.factor)
        return squared_norms(flat), self.vector(by_gain)

    def squares_from(self, squares: Tensor, sums: Tensor, by_gain: Tensor) -> Tensor:
        """Squared norms of the way back, from each filter's |g|^2, <g, 1> and <g, w^>/gain, [units, channels] (unmasked filters).

        What rounding may have cancelled is added on the safe side.
        """
        along = (by_gain * self.projects[:, 0]).double()
        apart = squares - sums.double().square() / self.fan_in[:, 0] - along.square()
        return (apart.clamp_min(0) + 1e-6 * squares) @ self.scale[:, 0].double().square()

    def squares_from_total(self, scaled_total: Tensor, sums: Tensor, by_gain: Tensor) -> Tensor:
        """The same from the sum over filters of (scale |g|)^2, [units]."""
        along = (by_gain * self.projects[:, 0]).double()
        away = (sums.double().square() / self.fan_in[:, 0] + along.square()) @ self.scale[:, 0].double().square()
        return (scaled_total.double() - away).clamp_min(0) + 2e-6 * scaled_total

    @property
    def gain_of_errors(self) -> float:
        """See `Direct.gain_of_errors`."""
        return float(self.scale.abs().max())

    def vector(self, by_gain: Tensor) -> Gradients:
        """The gain's gradients, [units, *gain]."""
        return {self.gain_name: by_gain.reshape(-1, *self.gain_shape)}

    def finish(self, total: Tensor) -> Gradients:
        """The sum of what `squares` left."""
        if self.mask is None and self.kept is None:
            return self.pull(total)
        return {self.name: total.reshape(self.shape)}

    def pull(self, total: Tensor) -> Gradients:
        """See `Direct.pull`."""
        return {self.name: self._way_back(total.flatten(1)).reshape(self.shape)}


class General:
    """The weight is any function of parameters alone; autograd goes back, for one unit after the other."""

    def __init__(self, names: tuple[str, ...], weight: Tensor, leaves: Mapping[str, Tensor]) -> None:
        self.names = names
        self.weight, self.leaves = weight, [leaves[n] for n in names]

    def gradients(self, gradients: Tensor) -> Gradients:
        """The gradients of units by each parameter, from those by the weight."""
        back: list[list[Any]] = [
            list(
                torch.autograd.grad(
                    self.weight,
                    self.leaves,
                    g.to(self.weight.dtype),
                    retain_graph=True,
                    allow_unused=True,
                    materialize_grads=True,
                )
            )
            for g in gradients
        ]
        return {name: torch.stack(parts) for name, *parts in zip(self.names, *back, strict=True)}


def squared_norms(gradients: Tensor) -> Tensor:
    """Squared norm per unit: float32 within short stretches at most, float64 across them."""
    if gradients.dtype == torch.float64:
        return gradients.reshape(len(gradients), -1).square().sum(1)
    flat = gradients.flatten(2) if gradients.ndim > 2 else gradients.reshape(len(gradients), 1, -1)
    return lengths_of(flat).square().sum(1)


def lengths_of(rows: Tensor) -> Tensor:
    """The lengths of the rows [.., .., n] in float64; float32 inside where a row is so short that it errs by less than 1e-6."""
    if rows.shape[2] <= STRETCH:
        return torch.linalg.vector_norm(rows, dim=2).double()
    return torch.linalg.vector_norm(rows, dim=2, dtype=torch.float64)
