"""What a run is: frozen values, nothing computed. `Mechanism`, `Sparsity` and `Data` change what is private or protected;
`Optim` changes what is learnt; `Runtime` changes neither.

This module imports neither torch nor numpy, so that the command line starts at once. Checks that need no data live here.
"""

from __future__ import annotations

import functools
import math
import numbers
import os
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Literal

from sparsedp.errors import require, unknown

Criterion = Literal["none", "random", "magnitude"]
PruneCriterion = Literal["none", "random", "synflow", "dp-snip", "snip-not-private"]
Granularity = Literal["weight", "filter"]
Accountant = Literal["pld", "rdp", "paper"]
Neighbouring = Literal["add-remove", "replace-one"]
LEAST_NOISE = 1e-3
"""Below it a noise multiplier hides nothing: one step costs an epsilon of half a million."""


def check_types(settings: Any) -> None:
    """Refuse a field whose value is not of its type: another word than those of a Literal, a half where a whole number is meant, NaN."""
    for name, kinds in _kinds(type(settings)):
        value = getattr(settings, name)
        several = [kind for kind in kinds if typing.get_origin(kind) is tuple]
        if several and isinstance(value, tuple | list):
            for one in value:
                _check(name, one, (typing.get_args(several[0])[0],))
        else:
            _check(name, value, kinds)


def _check(name: str, value: Any, kinds: tuple[Any, ...]) -> None:
    words = [word for kind in kinds if typing.get_origin(kind) is Literal for word in typing.get_args(kind)]
    if words and value not in words and value is not None:
        raise unknown(name, value, words)
    named = [kind for kind in kinds if kind in _NAMES]
    fits = any(isinstance(value, _NAMES[kind][0]) and (kind is bool or not isinstance(value, bool)) for kind in named)
    lists = ["a list"] if len(named) + bool(words) < len(kinds) else []
    legal = " or ".join([*lists, *(_NAMES[kind][1] for kind in named)])
    require(value in words or fits, name, value, f"it must be {legal}", "correct it")
    require(value == value, name, value, "it must be a number", "correct it")


_NAMES = {
    bool: (bool, "true or false"), int: (numbers.Integral, "a whole number"), float: (numbers.Real, "a number"),
    str: ((str, os.PathLike), "a text"), type(None): (type(None), "left out"),
}  # fmt: skip


@functools.cache
def _kinds(settings: type) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Fields and what each may be."""

    def alternatives(hint: Any) -> Iterator[Any]:
        yield from typing.get_args(hint) if typing.get_origin(hint) in (UnionType, typing.Union) else (hint,)

    return tuple((name, tuple(alternatives(hint))) for name, hint in typing.get_type_hints(settings).items())


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which images, and how they are read."""

    name: str = "mnist"
    """mnist, fashion-mnist, cifar10, cifar100, imagenet32, folder, manifest or huggingface."""
    dir: str | None = None
    """Where the files already are; left out, they are embedded, cached or downloaded."""
    evaluation: str = "test"
    """The split that accuracy is measured on; 'none' for no evaluation."""
    size: int | None = None
    """Side in pixels to which folder, manifest and Hugging Face images are resized (square). Required for them."""
    channels: int = 3
    """Channels that folder, manifest and Hugging Face images are converted to: 1 or 3."""
    normalise: str = "default"
    """default (public constants of the data set, else 0.5/0.5), or 'mean,..;std,..' as numbers in [0, 1]."""
    augment: Literal["none", "crop-flip", "crop", "imagenet"] = "none"
    views: int = 1
    """K, the augmented views of an image whose gradients are averaged before clipping."""
    pad: int = 4
    multilabel: bool = False
    limit: int | None = None
    """Use only the first so many training examples: for trying things out."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.size is None or self.size >= 1, "size", self.size, "an image has at least one pixel", "32 is common")
        require(
            self.views >= 1, "views", self.views, "every image has at least one view", "use 1 for no augmentation multiplicity"
        )
        require(
            self.views == 1 or self.augment != "none", "views", self.views,
            "several views need an augmentation that tells them apart", "set augment, or views to 1",
        )  # fmt: skip
        require(self.pad >= 0, "pad", self.pad, "padding cannot be negative", "use 4 for 32-pixel images")
        require(self.channels in (1, 3), "channels", self.channels, "images are grey or colour", "use 1 or 3")
        require(self.limit is None or self.limit >= 1, "limit", self.limit, "at least one example must stay", "raise it")


@dataclass(frozen=True, kw_only=True)
class Model:
    """Which network, where its weights start, and what of it trains."""

    name: str = "small_cnn"
    """wrn_16_4, wrn_28_10, wrn_40_4, nf_resnet50, small_cnn, norm_cnn, wrn_DEPTH_WIDTH (with _s2: a stem of stride 2),
    timm:NAME, or package.module:function."""
    weights: str | None = None
    """A safetensors or state_dict file of public weights; the classifier is replaced when the classes differ."""
    train: str = "all"
    """all, head, norm-bias, or shell-style patterns of parameter names separated by commas."""
    batchnorm: Literal["refuse", "group", "freeze"] = "refuse"
    """What to do with BatchNorm, which mixes examples: refuse, convert to GroupNorm, or freeze its statistics."""

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class Sparsity:
    """Pre-pruning once, gradient-dropping at every step. Rates are the fraction dropped."""

    prune: PruneCriterion = "none"
    prune_rate: float = 0.0
    pruned_weights: Literal["keep", "zero"] = "keep"
    mask_file: str | None = None
    """A saved mask to use instead of pruning anew."""
    drop: Criterion = "none"
    drop_rate: float = 0.0
    granularity: Granularity = "weight"
    maskable: tuple[str, ...] | None = None
    """Shell-style patterns of the parameters that may be masked; left out: the weights of convolutions and linear layers."""
    snip_noise_multiplier: float | None = None
    snip_epsilon: float | None = None
    """DP-SNIP's own epsilon (at the run's delta), from which its noise multiplier follows."""
    snip_share: float | None = None
    """Or the share of the total epsilon that DP-SNIP alone would cost."""
    snip_batch_size: int | None = None
    """Left out: one release over the whole data set. Given: one Poisson batch of this expected size."""
    snip_clip: float = 1.0

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("prune_rate", "drop_rate"):
            rate = getattr(self, name)
            require(0 <= rate < 1, name, rate, "a rate is the fraction dropped, in [0, 1)", "0.9 drops nine tenths")
        require(
            self.prune != "none" or self.prune_rate == 0 or self.mask_file is not None, "prune_rate", self.prune_rate,
            "nothing is pruned while prune is 'none'", "name a criterion, such as --sparsity.prune synflow",
        )  # fmt: skip
        require(
            self.drop != "none" or self.drop_rate == 0, "drop_rate", self.drop_rate,
            "nothing is dropped while drop is 'none'", "name a criterion, such as --sparsity.drop random",
        )  # fmt: skip
        given = [n for n in ("snip_noise_multiplier", "snip_epsilon", "snip_share") if getattr(self, n) is not None]
        wanted = 1 if self.prune == "dp-snip" else 0
        require(
            len(given) == wanted, "the DP-SNIP noise settings", given,
            f"prune {self.prune!r} takes {'exactly one' if wanted else 'none'} of snip_noise_multiplier, snip_epsilon and snip_share",
            "give one of them with prune dp-snip, and none otherwise",
        )  # fmt: skip
        for name in given:
            require(getattr(self, name) > 0, name, getattr(self, name), "it must be above zero", "raise it")
        size, sigma, share = self.snip_batch_size, self.snip_noise_multiplier, self.snip_share
        require(
            sigma is None or LEAST_NOISE <= sigma < math.inf, "snip_noise_multiplier", sigma, f"it must be finite and at least {LEAST_NOISE:g}",
            "use prune 'snip-not-private' for no noise",
        )  # fmt: skip
        require(share is None or share < 1, "snip_share", share, "it is a part of the total, between 0 and 1", "0.1 is common")
        require(
            size is None or size >= 1, "snip_batch_size", size, "at least one unit is expected", "leave it out for all units"
        )
        require(
            0 < self.snip_clip < math.inf,
            "snip_clip",
            self.snip_clip,
            "a clipping norm must be above zero and finite",
            "1.0 is usual",
        )


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """What the guarantee is made of. Of epsilon, noise_multiplier and steps, the one left out is solved for."""

    private: bool = True
    """False: no clipping and no noise on the same code path, for comparison and for pre-training on public data."""
    epsilon: float | None = None
    delta: float = 1e-5
    noise_multiplier: float | None = None
    steps: int | None = None
    batch_size: int = 256
    """B, the expected batch: every unit joins a step with probability B / N."""
    clip: float = 1.0
    accountant: Accountant = "pld"
    neighbouring: Neighbouring = "add-remove"
    unit_norm: bool = True
    """Divide by the clipping norm too, so that the learning rate does not depend on it."""
    arithmetic: Literal["float", "exact"] = "float"

    def __post_init__(self) -> None:
        check_types(self)
        require(
            self.clip > 0 and math.isfinite(self.clip),
            "clip",
            self.clip,
            "the clipping norm must be above zero",
            "1.0 is usual",
        )
        require(self.batch_size >= 1, "batch_size", self.batch_size, "the expected batch must be at least 1", "raise it")
        require(1e-14 <= self.delta < 1, "delta", self.delta, "it must lie in [1e-14, 1)", "1e-5 is usual; below 1/N is right")
        sigma, eps, steps = self.noise_multiplier, self.epsilon, self.steps
        require(
            sigma is None or sigma >= 0,
            "noise_multiplier",
            sigma,
            "noise cannot be negative",
            "leave it out to have it solved for",
        )
        require(
            not sigma or LEAST_NOISE <= sigma < math.inf, "noise_multiplier", sigma, f"it must be 0, or finite and at least {LEAST_NOISE:g}",
            "1 to 20 are common",
        )  # fmt: skip
        require(
            self.arithmetic == "float" or (self.private and sigma != 0), "arithmetic", self.arithmetic,
            "exact arithmetic is that of the noise, and this run has none", "use 'float', or train with noise",
        )  # fmt: skip
        require(eps is None or eps > 0, "epsilon", eps, "the target must be above zero", "1 to 8 are common")
        require(steps is None or steps >= 1, "steps", steps, "there must be at least one", "leave it out to have it solved for")
        if self.private:
            require(
                sum(v is not None for v in (sigma, eps, steps)) >= 2, "the privacy settings", (eps, sigma, steps),
                "two of epsilon, noise_multiplier and steps decide the third", "give two of them",
            )  # fmt: skip
        else:
            require(steps is not None, "steps", steps, "a run without privacy has no epsilon to find them from", "give steps")


@dataclass(frozen=True, kw_only=True)
class Optim:
    """Any torch.optim optimiser by name, its schedule, and the moving average of the weights."""

    name: str = "SGD"
    lr: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup: int = 0
    average_decay: float | None = 0.999
    """Decay of the moving average, warmed up as min(d, (1 + t) / (10 + t)); none for no average."""

    def __post_init__(self) -> None:
        check_types(self)
        require(
            0 < self.lr < math.inf,
            "lr",
            self.lr,
            "the learning rate must be above zero and finite",
            "1.0 is a start for SGD with unit_norm",
        )
        for name in ("momentum", "weight_decay", "warmup"):
            given = getattr(self, name)
            require(0 <= given < math.inf, name, given, "it must be finite and not negative", "0 leaves it out")
        d = self.average_decay
        require(d is None or 0 <= d < 1, "average_decay", d, "a decay lies in [0, 1)", "0.999 is usual")


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Where and how it runs; none of it changes what is computed, beyond rounding."""

    device: str = "auto"
    engine: Literal["auto", "fast", "functional", "reference", "compiled"] = "auto"
    """How clipped sums are computed; auto takes the fastest that serves the model. compiled goes through torch.compile."""
    micro_batch: int | None = None
    threads: int | None = None
    workers: int = 0
    autocast: Literal["none", "bf16"] = "none"
    evaluate_every: int = 0
    """Steps between evaluations; 0 evaluates at the end only."""
    checkpoint_every: int = 50
    key: str | None = None
    """A key of one's own makes the run reproducible up to rounding (to the bit under the same plan of the engine, which a resumed
    run keeps), and stamps it not private."""
    unsafe_metrics: bool = False
    """Write training metrics that touch private data, to private/ only."""
    tensorboard: bool = False
    export: tuple[Literal["onnx", "torch-export"], ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("micro_batch", "threads"):
            given = getattr(self, name)
            require(given is None or given >= 1, name, given, "there must be at least one", "leave it out to have it chosen")
        for name in ("workers", "evaluate_every", "checkpoint_every"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "it cannot be negative", "0 means none")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run, wholly."""

    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    sparsity: Sparsity = field(default_factory=Sparsity)
    mechanism: Mechanism = field(default_factory=lambda: Mechanism(epsilon=1.0, steps=100))
    optim: Optim = field(default_factory=Optim)
    runtime: Runtime = field(default_factory=Runtime)
