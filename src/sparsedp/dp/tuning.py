"""The best of a random number of trials (Papernot and Steinke 2022): how many there are, what they are, how they are scored.

Every trial is the same private mechanism, with one of the candidate settings drawn for it alone. Only the best is released. What
that costs is the event `ledger.search_event`; everything random about it is drawn here from the search's own key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import dp_accounting as dp
import numpy as np
from torch import Tensor

from sparsedp.dp.discrete import LARGEST_SCALE, discrete_gaussian
from sparsedp.dp.ledger import Ledger, gaussian_event, search_event
from sparsedp.dp.randomness import Key, raw, uniform
from sparsedp.errors import one_of, require

Law = Literal["geometric", "logarithmic", "poisson"]
LAWS: dict[str, float] = {"geometric": 1.0, "logarithmic": 0.0, "poisson": math.inf}
"""Laws of the number of trials, and their shape in dp_accounting. Only the Poisson law can say zero."""
MOST_MEAN = 500.0
SCALE = 1024
"""The grid of a score: units that are right in part count in parts of this."""
_NEGLIGIBLE = 2.0**-60


def check_law(law: str, mean: float) -> None:
    """Raise unless it is a law that can be drawn from, with a mean that makes it a search."""
    one_of("distribution", law, tuple(LAWS))
    require(1 < mean <= MOST_MEAN, "trials_mean", mean, "the mean number of trials lies above 1, up to 500", "10 is usual")


def search(trial: Ledger, law: str, mean: float, score_noise: float | None = None) -> Ledger:
    """The ledger of a whole search whose every trial is `trial`, then a score with this noise (None: scored on public data).

    Guarantee: a search costs at least as much as one of its trials, its score included.
    """
    check_law(law, mean)
    once = trial if score_noise is None else trial.append("score on held-out units", gaussian_event(1.0, score_noise))
    return Ledger().append(f"the best of a random number of trials ({law}, mean {mean:g})", _event(once, law, mean))


def _event(once: Ledger, law: str, mean: float) -> dp.DpEvent:
    return search_event(once.event(), mean, LAWS[law])


def chances(law: str, mean: float) -> Iterator[tuple[int, float]]:
    """(number of trials, its probability), ascending, until what is left is nothing to speak of."""
    check_law(law, mean)
    gamma = _logarithmic_gamma(mean) if law == "logarithmic" else 1 / mean
    first, chance = {
        "poisson": (0, math.exp(-mean)), "geometric": (1, gamma), "logarithmic": (1, (1 - gamma) / -math.log(gamma)),
    }[law]  # fmt: skip
    count = first
    while count <= mean or chance > _NEGLIGIBLE:
        yield count, chance
        chance *= mean / (count + 1) if law == "poisson" else (1 - gamma) * (1 if law == "geometric" else count / (count + 1))
        count += 1


def _logarithmic_gamma(mean: float) -> float:
    """The gamma at which the logarithmic law, with Pr[k] in proportion to (1 - gamma)^k / k, has this mean."""
    low, high = -50.0, -1e-12  # of log gamma
    for _ in range(200):
        middle = (low + high) / 2
        found = math.expm1(-middle) / -middle
        low, high = (low, middle) if found < mean else (middle, high)
    return math.exp(high)


def number_of_trials(law: str, mean: float, key: Key) -> int:
    """How many trials there are: drawn before any of them, by inversion of a uniform number of 53 bits.

    Guarantee: the number of trials is a function of the law and the key alone.
    """
    drawn, below, count = float(uniform(key, 1, "number of trials")[0]), 0.0, 0
    for count, chance in chances(law, mean):  # noqa: B007 - the last one stands for the tail beyond it
        below += chance
        if drawn <= below:
            return count
    return count


def choice(candidates: int, key: Key, trial: int) -> int:
    """Which candidate a trial is: uniform, and of no other trial's concern."""
    return int.from_bytes(raw(key, 32, "candidate", trial), "little") % candidates  # 256 bits: uneven by less than 2^-200


def held_out(units: int, count: int, key: Key) -> np.ndarray:
    """`count` of the units 0, 1, .., chosen by the key alone, ascending."""
    order = np.argsort(uniform(key, units, "held out").numpy(), kind="stable")
    return np.sort(order[:count])


def noised_count(right: Tensor, rows: Tensor, noise_multiplier: float, key: Key, trial: int) -> float:
    """How many units are right, with Gaussian noise: integers and the discrete Gaussian, on a grid of 1/1024.

    `right` and `rows` count, for each unit, its rows that are right and all its rows.

    Guarantee: emptying one unit moves the count before the noise by at most one, however many rows the unit has.
    """
    noise = math.ceil(noise_multiplier * SCALE)
    require(
        1 <= noise <= LARGEST_SCALE,
        "score_noise",
        noise_multiplier,
        "it must lie above zero, up to 65536",
        "1 to 100 are common",
    )
    whole = rows.clamp(min=1)
    shares = right.clamp(max=whole) * SCALE // whole
    drawn = int(discrete_gaussian(noise, key, 0, 1, "score", trial)[0])
    return (int(shares.sum()) + drawn) / SCALE
