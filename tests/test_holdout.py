"""Units put aside to score on: every unit is in exactly one of the two parts with all its rows, and rows are those of the whole."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from sparsedp.data import DataSet, Normalisation
from sparsedp.data.augment import Augmentation
from sparsedp.data.values import ArrayImages, UnitIndex
from sparsedp.dp import tuning
from sparsedp.dp.randomness import Key
from sparsedp.errors import UsageError
from sparsedp.holdout import Part, held_out_units, part_of, right_rows, split

CLASSES = 3
SPEC = Augmentation("none", Normalisation((0.0,), (1.0,)))
CPU = torch.device("cpu")


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big"), given=True)


def images(rows: int, units: list[int] | None = None) -> ArrayImages:
    """Image number i has the pixels i and the label i % 3."""
    pixels = torch.arange(rows, dtype=torch.uint8).reshape(rows, 1, 1, 1).expand(rows, 1, 2, 2).contiguous()
    index = None if units is None else UnitIndex.of(torch.tensor(units))
    return ArrayImages(pixels, torch.arange(rows) % CLASSES, CLASSES, index)


def data_set(train: ArrayImages) -> DataSet:
    return DataSet("made up", train, None, tuple("abc"), SPEC.normalisation)


def which(part: object) -> list[int]:
    """The rows of the whole that a part reads."""
    return part.read(torch.arange(len(part))).pixels[:, 0, 0, 0].tolist()  # type: ignore[attr-defined,arg-type]


@st.composite
def wholes(draw: st.DrawFn) -> ArrayImages:
    """Up to 60 rows, each its own unit, or of units of several rows in any order."""
    units = draw(st.integers(2, 20))
    if draw(st.booleans()):
        return images(units)
    extra = draw(st.lists(st.integers(0, units - 1), max_size=40))
    return images(units + len(extra), draw(st.permutations([*range(units), *extra])))


@given(wholes(), st.floats(0.05, 0.95), st.integers(0, 10**6))
def test_every_unit_is_in_one_part_with_all_its_rows(whole: ArrayImages, share: float, number: int) -> None:
    """Guarantee: a unit that is held out is in no batch that is trained on."""
    aside = round(share * whole.num_units)
    if not 1 <= aside < whole.num_units:
        with pytest.raises(UsageError, match="leaves none in one of the parts"):
            split(data_set(whole), share, key(number))
        return
    kept, held = split(data_set(whole), share, key(number))
    train = kept.train
    assert (held.num_units, train.num_units) == (aside, whole.num_units - aside)
    assert sorted(which(train) + which(held)) == list(range(len(whole)))
    names = torch.arange(len(whole)) if whole.units is None else whole.units
    owners = [{int(names[row]) for row in which(part)} for part in (train, held)]
    assert not owners[0] & owners[1]
    assert owners[1] == set(tuning.held_out(whole.num_units, aside, key(number)).tolist())


@given(wholes(), st.integers(0, 10**6))
def test_rows_of_a_unit_are_its_rows_in_the_whole(whole: ArrayImages, number: int) -> None:
    _, held = (
        split(data_set(whole), 0.5, key(number)) if whole.num_units > 2 else (None, part_of(whole, torch.tensor([True, False])))
    )
    names = torch.arange(len(whole)) if whole.units is None else whole.units
    chosen = sorted({int(names[row]) for row in which(held)})
    rows, positions = held.rows_of(torch.arange(held.num_units))
    read = held.read(rows)
    for place, unit in enumerate(chosen):
        mine = (positions == place).nonzero().flatten()
        assert sorted(read.pixels[mine, 0, 0, 0].tolist()) == (names == unit).nonzero().flatten().tolist()
    assert read.labels.tolist() == [row % CLASSES for row in read.pixels[:, 0, 0, 0].tolist()]
    assert held.shape == whole.shape and len(held) == len(rows)


def test_which_units_are_held_out_depends_on_the_key_and_not_on_the_data() -> None:
    one, other = images(20), images(20)
    other.pixels[:] = 7
    other.labels[:] = 0
    assert split(data_set(one), 0.3, key(1))[1].rows.tolist() == split(data_set(other), 0.3, key(1))[1].rows.tolist()
    drawn = {tuple(split(data_set(one), 0.3, key(i))[1].rows.tolist()) for i in range(30)}
    assert len(drawn) > 25


@pytest.mark.parametrize(("units", "share", "expected"), [(100, 0.1, 10), (60, 0.1, 6), (3, 0.5, 2), (2, 0.5, 1), (1000, 0.0004, None),
                                                          (1000, 0.9996, None), (5, 0.0, None), (5, 1.0, None), (5, 1.5, None), (5, math.nan, None)])  # fmt: skip
def test_how_many_units_are_held_out_is_public(units: int, share: float, expected: int | None) -> None:
    if expected is None:
        with pytest.raises(UsageError, match="held_out is"):
            held_out_units(units, share)
    else:
        assert held_out_units(units, share) == expected


class Knows(nn.Module):
    """Says the label of the images whose number is in `right`, and another one of the rest; no number at all for `broken`."""

    def __init__(self, right: set[int], broken: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        super().__init__()
        self.right, self.broken = right, broken

    def forward(self, pixels: Tensor) -> Tensor:
        numbers = (pixels[:, 0, 0, 0] * 255).round().long()
        output = torch.zeros(len(pixels), CLASSES)
        for row, number in enumerate(numbers.tolist()):
            output[row, (number + (number not in self.right)) % CLASSES] = 1.0
            if number in self.broken:
                output[row, (number + 1) % CLASSES] = torch.nan
        return output


def test_right_rows_are_counted_by_unit() -> None:
    whole = images(6, [0, 1, 1, 2, 2, 2])
    right, rows = right_rows(Knows({0, 2, 3, 5}), whole, SPEC, CPU)
    assert (right.tolist(), rows.tolist()) == ([1, 1, 2], [1, 2, 3])
    held = part_of(whole, torch.tensor([False, True, True]))
    right, rows = right_rows(Knows({0, 2, 3, 5}), held, SPEC, CPU)
    assert (right.tolist(), rows.tolist()) == ([1, 2], [2, 3])
    assert [t.tolist() for t in right_rows(Knows({1}), images(3), SPEC, CPU)] == [[0, 1, 0], [1, 1, 1]]


def test_what_is_broken_is_wrong_and_moves_no_other_unit() -> None:
    whole = images(4)
    assert right_rows(Knows({0, 1, 2, 3}, {1}), whole, SPEC, CPU)[0].tolist() == [1, 0, 1, 1]
    whole.labels[2] = 99
    assert right_rows(Knows({0, 1, 2, 3}), whole, SPEC, CPU)[0].tolist() == [1, 1, 0, 1]


def test_several_labels_must_all_be_right() -> None:
    class Fixed(nn.Module):
        def forward(self, pixels: Tensor) -> Tensor:
            return torch.tensor([[1.0, -1.0, -1.0]]).expand(len(pixels), 3)

    labels = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    whole = ArrayImages(torch.zeros(3, 1, 2, 2, dtype=torch.uint8), labels, 3)
    assert right_rows(Fixed(), whole, SPEC, CPU)[0].tolist() == [1, 0, 0]


@given(wholes(), st.sets(st.integers(0, 60)), st.integers(0, 60))
def test_one_unit_moves_the_count_by_at_most_one(whole: ArrayImages, known: set[int], unit: int) -> None:
    """However many rows the unit has: its rows are made right, or wrong, all at once; the noise is the same."""
    unit %= whole.num_units
    names = torch.arange(len(whole)) if whole.units is None else whole.units
    mine = set((names == unit).nonzero().flatten().tolist())
    counts = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tuning, "discrete_gaussian", lambda *_: torch.tensor([17]))  # the draw takes long, and is the same
        for right in (known - mine, known | mine):
            counts.append(tuning.noised_count(*right_rows(Knows(right), whole, SPEC, CPU), 3.0, key(5), 0))
    assert 0 <= counts[1] - counts[0] <= 1
    assert isinstance(part_of(whole, torch.ones(whole.num_units, dtype=torch.bool)), Part)
