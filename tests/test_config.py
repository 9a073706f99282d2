"""Settings that cannot be are refused where they are written, in one sentence, before any data are looked for."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest

from sparsedp import config
from sparsedp.config import Data, Mechanism, Model, Optim, Run, Runtime, Sparsity
from sparsedp.errors import UsageError

SECTIONS = {"data": Data, "model": Model, "sparsity": Sparsity, "mechanism": Mechanism, "optim": Optim, "runtime": Runtime}
SNIP: dict[str, Any] = {"prune": "dp-snip", "prune_rate": 0.5}

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("mechanism", {"arithmetic": "exct"}, "arithmetic is 'exct', which is not known; choose one of exact, float."),
    ("mechanism", {"accountant": "pdl"}, "accountant is 'pdl', which is not known"),
    ("mechanism", {"noise_multiplier": 1e-4}, "noise_multiplier is 0.0001, but it must be 0, or finite and at least 0.001"),
    ("mechanism", {"noise_multiplier": float("inf")}, "noise_multiplier is inf, but"),
    ("mechanism", {"epsilon": float("nan")}, "epsilon is nan, but it must be a number"),
    ("mechanism", {"steps": 2.5}, "steps is 2.5, but it must be a whole number or left out"),
    ("mechanism", {"steps": True}, "steps is True, but it must be a whole number"),
    ("mechanism", {"private": 1}, "private is 1, but it must be true or false"),
    ("mechanism", {"arithmetic": "exact", "noise_multiplier": 0.0}, "arithmetic is 'exact', but exact arithmetic is that of the noise"),
    ("mechanism", {"arithmetic": "exact", "private": False}, "arithmetic is 'exact', but exact arithmetic is that of the noise"),
    ("sparsity", {"drop": "randm", "drop_rate": 0.5}, "drop is 'randm', which is not known; choose one of magnitude, none, random."),
    ("sparsity", {"prune": "synflo", "prune_rate": 0.5}, "prune is 'synflo', which is not known"),
    ("sparsity", {"pruned_weights": "zeros"}, "pruned_weights is 'zeros', which is not known; choose one of keep, zero."),
    ("sparsity", {"maskable": "0.*"}, "maskable is '0.*', but it must be a list or left out"),
    ("sparsity", {"maskable": (3,)}, "maskable is 3, but it must be a text"),
    ("sparsity", {**SNIP, "snip_noise_multiplier": 1e-9}, "snip_noise_multiplier is 1e-09, but it must be finite and at least 0.001"),
    ("sparsity", {**SNIP, "snip_noise_multiplier": 1.0, "snip_batch_size": 0}, "snip_batch_size is 0, but at least one unit is expected"),
    ("sparsity", {**SNIP, "snip_share": 1.0}, "snip_share is 1.0, but it is a part of the total, between 0 and 1"),
    ("sparsity", {"snip_clip": float("inf")}, "snip_clip is inf, but a clipping norm must be above zero and finite"),
    ("optim", {"schedule": "cosin"}, "schedule is 'cosin', which is not known; choose one of constant, cosine, linear."),
    ("optim", {"momentum": -0.1}, "momentum is -0.1, but it must be finite and not negative"),
    ("optim", {"warmup": -1}, "warmup is -1, but it must be finite and not negative"),
    ("runtime", {"autocast": "fp16"}, "autocast is 'fp16', which is not known; choose one of bf16, none."),
    ("runtime", {"engine": "quick"}, "engine is 'quick', which is not known; choose one of auto"),
    ("runtime", {"export": ("onx",)}, "export is 'onx', which is not known; choose one of onnx, torch-export."),
    ("runtime", {"micro_batch": 0}, "micro_batch is 0, but there must be at least one; leave it out to have it chosen."),
    ("runtime", {"micro_batch": -4}, "micro_batch is -4, but"),
    ("runtime", {"evaluate_every": -1}, "evaluate_every is -1, but it cannot be negative; 0 means none."),
    ("model", {"batchnorm": "grup"}, "batchnorm is 'grup', which is not known; choose one of freeze, group, refuse."),
    ("data", {"augment": "flip"}, "augment is 'flip', which is not known"),
    ("data", {"size": 0}, "size is 0, but an image has at least one pixel"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "changes", "message"), BAD, ids=[f"{s}-{'-'.join(c)}" for s, c, _ in BAD])
def test_a_value_that_cannot_be_is_refused_in_one_sentence(section: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        dataclasses.replace(getattr(Run(), section), **changes)
    said = str(caught.value)
    assert said.startswith(message) and said.endswith(".") and "\n" not in said


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_with_a_list_of_words_refuses_others(section: str) -> None:
    """Whatever Literal is added is checked: no field of one accepts a word that is not its own."""
    kind = SECTIONS[section]
    for name, hint in typing.get_type_hints(kind).items():
        words = [
            w for h in (hint, *typing.get_args(hint)) if typing.get_origin(h) is typing.Literal for w in typing.get_args(h)
        ]
        wrong: Any = ("nothing-of-the-kind",) if typing.get_origin(hint) is tuple else "nothing-of-the-kind"
        if words:
            with pytest.raises(UsageError, match=f"^{name} is 'nothing-of-the-kind', which is not known; choose one of"):
                dataclasses.replace(getattr(Run(), section), **{name: wrong})


def test_the_least_noise_is_allowed_and_so_is_none() -> None:
    assert Mechanism(noise_multiplier=config.LEAST_NOISE, steps=1).noise_multiplier == 1e-3
    assert Mechanism(noise_multiplier=0.0, steps=1).noise_multiplier == 0
    assert Sparsity(**SNIP, snip_noise_multiplier=config.LEAST_NOISE).snip_noise_multiplier == 1e-3
