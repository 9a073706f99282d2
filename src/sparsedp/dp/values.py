"""The two kinds of tensor in differentially private training: a sum that is sensitive, and a value that is released.

`ClippedSum` carries its own sensitivity, so that noise is scaled by what the sum really is and no second copy of the
clipping norm exists. `Released` is made in two places only: `noise.add_noise`, and `public` with a stated reason. A test
holds this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

Gradient = Mapping[str, Tensor]
"""One tensor per parameter that takes part, by the parameter's name."""


@dataclass(frozen=True, eq=False, repr=False)
class ClippedSum:
    """A sum over privacy units. Sensitive: nothing but `add_noise` may turn it into something that leaves the step.

    `sensitivity` bounds, in L2 over all tensors together, how far the sum moves when one unit's data is added or made
    empty; replacing a unit moves it by at most twice that. With a `grid`, tensors are int64 multiples of it.
    """

    tensors: Gradient
    sensitivity: float
    grid: float | None = None


@dataclass(frozen=True, eq=False)
class Released:
    """Values that may be seen by anyone: noised, or public to begin with. `origin` says which."""

    tensors: Gradient
    origin: str

    def over(self, divisor: float) -> Released:
        """Divided by a public constant."""
        return Released({name: tensor / divisor for name, tensor in self.tensors.items()}, self.origin)


def public(tensors: Gradient, reason: str) -> Released:
    """Declare values public; `reason` says why no private datum went into them."""
    return Released(tensors, f"public: {reason}")
