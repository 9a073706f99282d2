"""The audit of DP-SNIP's own release: a million coordinates, a canary on each, half of them in.

The release is made by `dp_snip_release`, as pre-pruning makes it. Noise is independent between coordinates, so that one
release is as good as half a million runs of each world; the shift of the mean between them is mu = 1 / sigma.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import numpy as np
import torch
from scipy import special
from torch import Tensor, nn

from sparsedp.audit import bounds
from sparsedp.audit.gradient import LOWER, VIOLATION, Finding
from sparsedp.connectivity import Connected
from sparsedp.dp.accounting import epsilon
from sparsedp.dp.clipping import Loss, Rows, factor_of
from sparsedp.dp.ledger import Ledger, gaussian_event
from sparsedp.dp.masks import Masks, maskable_layers
from sparsedp.dp.mechanism import Settings, dp_snip_release
from sparsedp.dp.randomness import Key, words
from sparsedp.dp.tradeoff import profile

CANARIES = 1 << 20
STEEP = 64.0


def snip_audit(noise_multiplier: float, rate: float, clip: float, granularity: str, delta: float, key: Key, family: int = 1,
               canaries: int = CANARIES) -> Finding:  # fmt: skip
    """Attack one DP-SNIP release of this noise, sampling rate and clip: is the shift of the mean what was charged?"""
    began = time.monotonic()
    inside = torch.from_numpy(words(key, 0, canaries, "audit coins") < np.uint64(1 << 63))
    seen, spent = _release(noise_multiplier, rate, clip, granularity, inside, key)
    scores, members = bounds.log_likelihood_ratio(seen, rate, noise_multiplier), inside.numpy()
    counts = bounds.attack(scores[~members], scores[members])
    found, family_of = bounds.limits(counts, LOWER), _family(noise_multiplier, rate)
    if rate == 1:
        method, bound = "shift of the mean", bounds.epsilon_of_mu(shift(seen, members, 1 - LOWER), delta)
        violated = shift(seen, members, (1 - VIOLATION) / family) > 1 / noise_multiplier
    else:
        method = "within the family"
        bound = bounds.epsilon_in_family(family_of, delta, lambda claim: bounds.violates(claim, found))
        violated = bounds.violates(profile(spent), bounds.limits(counts, VIOLATION, family))
    return Finding(
        what="DP-SNIP's release", method=method, trials=canaries, claimed=epsilon(spent, delta).epsilon, delta=delta, bound=bound,
        bound_by_rates=bounds.epsilon_by_rates(found, delta), violated=violated, seconds=time.monotonic() - began,
    )  # fmt: skip


def _family(sigma: float, rate: float) -> bounds.Family:
    return lambda factor: Ledger().append("dp-snip", gaussian_event(rate, factor * sigma))


def shift(seen: bounds.Scores, members: np.ndarray, alpha: float) -> float:
    """A lower confidence limit of mu: the difference of the means in standard deviations, less its error."""
    inside, out = seen[members], seen[~members]
    spread = math.sqrt((inside.var() + out.var()) / 2)
    mu = (inside.mean() - out.mean()) / spread
    error = math.sqrt(1 / len(inside) + 1 / len(out) + mu**2 / (2 * len(seen)))
    return max(0.0, float(mu + special.ndtri(alpha) * error))


def _release(sigma: float, rate: float, clip: float, granularity: str, inside: Tensor, key: Key) -> tuple[np.ndarray, Ledger]:
    """What is released of canaries that each push one connection with all their might, in units of the clip."""
    count = len(inside)
    network = nn.utils.skip_init(nn.Conv2d, 1, count, 1, bias=False)
    with torch.no_grad():
        network.weight.fill_(1.0)
    layers = maskable_layers(network, granularity)
    connected, ledger = Connected(network, layers), Ledger()

    def read(units: Tensor) -> Iterator[Rows]:
        for part in units[inside[units]].split(1 << 16):
            yield Rows(part, part, torch.arange(len(part)), len(part))

    def engine(model: nn.Module, loss: Loss, rows: Rows, masks: Masks, limit: float) -> dict[str, Tensor]:
        steep = STEEP * limit * torch.ones(len(rows.inputs), dtype=torch.float64)
        clipped = (steep * factor_of(steep**2, limit)).float()
        total = torch.zeros(count).index_add_(0, rows.inputs, clipped)
        return {"connections.0": total.reshape(connected.connections[0].shape)}

    def record(what: str, event: object) -> None:
        nonlocal ledger
        ledger = ledger.append(what, event)  # type: ignore[arg-type]

    settings = Settings(num_units=count, batch_size=rate * count, noise_multiplier=sigma, clip=clip, layers=layers)
    released = dp_snip_release(settings, connected, lambda output, targets: output, read, engine, key, record)
    return released.tensors["connections.0"].reshape(-1).double().numpy() * (settings.batch_size / clip), ledger
