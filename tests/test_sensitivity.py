"""Neighbouring batches by the thousand: no engine, mask, number of views, part size or number type lets a unit move a sum too far."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from sparsedp.dp import clipping
from sparsedp.dp.clipping import Engine, Rows, clipped_sum, clipped_sum_on_grid, reference
from sparsedp.dp.masks import Masks, participating
from sparsedp.dp.noise import grid_for
from sparsedp.engines.fast import Fast
from sparsedp.engines.functional import functional
from sparsedp.engines.structure import find_structure
from tests import oracles
from tests.made_up import BAD_VALUES, FAMILIES, as_rows, build, cross_entropy, random_masks, unit_of

Unit = tuple[tuple[Tensor, Tensor], ...]
RELATIONS = {"added": 1, "removed": 1, "emptied": 1, "doubled": 1, "replaced": 2}
"""By how many clipping norms a sum may move."""
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
ENGINES = ("reference", "functional", "fast", "grid")
PARTS, EACH = 25, 400
"""10,000 pairs in all, of which every test run takes the first part."""


@cache
def model_of(family: str, seed: int, dtype: torch.dtype) -> nn.Module:
    return build(family, seed, dtype)


@cache
def engine_of(name: str, family: str, seed: int, dtype: torch.dtype) -> Engine:
    """The engine of that name; bfloat16 is for the two that take any model as it is."""
    if name == "fast" and dtype != torch.bfloat16:
        rows = as_rows([unit_of(1, 2), unit_of(2, 2)], dtype)
        return Fast(find_structure(model_of(family, seed, dtype), cross_entropy, rows), {})
    return functional if name == "functional" and dtype != torch.bfloat16 else reference


def neighbour(own: random.Random, units: list[Unit], relation: str, new: Unit) -> list[Unit]:
    place = own.randrange(len(units))
    before, one, after = units[:place], units[place], units[place + 1 :]
    middle = {"added": [one, new], "removed": [], "emptied": [()], "doubled": [one, one], "replaced": [new]}[relation]
    return [*before, *middle, *after]


def parts_of(units: list[Unit], size: int, dtype: torch.dtype) -> list[Rows]:
    return [as_rows(units[i : i + size], dtype) for i in range(0, len(units), size)]


def sum_by(
    name: str, family: str, seed: int, dtype: torch.dtype, parts: list[Rows], masks: Masks, clip: float
) -> dict[str, Tensor]:
    model = model_of(family, seed, dtype)
    if name != "grid":
        return clipped_sum(engine_of(name, family, seed, dtype), model, cross_entropy, parts, masks, clip).tensors
    grid = grid_for(1.0, clip, clipping.selected(participating(model), masks))
    total = clipped_sum_on_grid(model, cross_entropy, parts, masks, clip, grid).tensors
    return {n: t.double() * grid for n, t in total.items()}


def moved(number: int) -> tuple[float, float, str]:
    """How far the sum of one pair lies apart, how far it may, and which pair it is; every choice follows from the number."""
    own = random.Random(number)
    family, seed, dtype = own.choice(sorted(FAMILIES)), own.randrange(3), own.choice(sorted(DTYPES))
    engine, relation = own.choice(ENGINES), own.choice(sorted(RELATIONS))
    clip, grain, rate = (
        own.choice((1e-3, 0.1, 1.0, 7.5, 1e3)),
        own.choice(("weight", "filter")),
        own.choice((0.0, 0.3, 0.9, 0.999)),
    )
    masks = random_masks(model_of(family, seed, DTYPES[dtype]), grain, rate, number) if rate else {}
    each = own.choice((None, 1, 2, 4))

    def unit(place: int) -> Unit:
        bad = own.choice((None, None, *BAD_VALUES))
        return unit_of(100 * number + place, each or own.randint(1, 4), own.choice((0.0, 1e-3, 1.0, 30.0)), bad)

    units = [unit(place) for place in range(own.randint(1, 5))]
    other = neighbour(own, units, relation, unit(99))
    sizes = own.choice((1, 2, 7))
    first, second = (
        sum_by(engine, family, seed, DTYPES[dtype], parts_of(some, sizes, DTYPES[dtype]), masks, clip)
        for some in (units, other)
    )
    words = f"pair {number}: {engine}, {family}, {dtype}, {relation}, {grain} at {rate}, clip {clip}, parts of {sizes}"
    return oracles.distance(first, second), RELATIONS[relation] * clip, words


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.release) for n in range(1, PARTS))])
def test_no_pair_of_neighbours_is_too_far_apart(part: int) -> None:
    """Guarantee: adding a unit to the batch, or taking one away, moves the result by at most `clip` in L2."""
    near = 0
    for number in range(EACH * part, EACH * (part + 1)):
        found, allowed, words = moved(number)
        assert found <= allowed * (1 + 1e-6), f"{words}: {found / allowed - 1:.3g} too far"
        near += found > 0.99 * allowed
    assert near > EACH / 20, "hardly a pair is at its limit, so the test shows little"


def test_a_unit_weighs_the_same_beside_one_that_cannot_be_trusted() -> None:
    """In this pair a record that is not finite sends another unit of its part to the reference engine, in one of two worlds."""
    found, allowed, words = moved(894)
    assert found <= allowed * (1 + 1e-6), words
