"""The public normalisation constants of each data set. None is computed from the images that a run is given."""

from __future__ import annotations

import math

from sparsedp.data.values import Normalisation
from sparsedp.errors import wrong

PUBLIC = {
    "mnist": Normalisation((0.1307,), (0.3081,)),
    "fashion-mnist": Normalisation((0.2860,), (0.3530,)),
    "cifar10": Normalisation((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": Normalisation((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "imagenet32": Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


def normalisation_of(name: str, choice: str, channels: int) -> Normalisation:
    """What `config.Data.normalise` means for this data set."""
    if choice == "default":
        return PUBLIC.get(name, Normalisation((0.5,) * channels, (0.5,) * channels))
    try:
        mean, std = (tuple(float(number) for number in part.split(",")) for part in choice.split(";"))
    except ValueError:
        raise _unclear(choice, channels) from None
    sound = len(mean) == len(std) == channels and all(0 <= m <= 1 for m in mean) and all(0 < s < math.inf for s in std)
    if not sound:
        raise _unclear(choice, channels)
    return Normalisation(mean, std)


def _unclear(choice: str, channels: int) -> ValueError:
    return wrong(
        "normalise", choice, f"{channels} means in [0, 1] and {channels} deviations above 0 are needed",
        f"use default, or such as {','.join(['0.5'] * channels)};{','.join(['0.5'] * channels)}",
    )  # fmt: skip
