from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sparsedp.data import ArrayImages, DataSet, Normalisation, check
from sparsedp.data.normalisation import normalisation_of
from sparsedp.data.values import UnitIndex, unit_index
from sparsedp.errors import UsageError

from . import pictures


def images(count: int, seed: int, units: list[str] | None = None) -> ArrayImages:
    pixels, labels = pictures.made_up(count, 4, 1, classes=3, seed=seed)
    return ArrayImages(torch.from_numpy(pixels), torch.from_numpy(labels), 3, unit_index(units) if units else None)


def data_set(train: ArrayImages, evaluation: ArrayImages | None = None, name: str = "made") -> DataSet:
    return DataSet(name, train, evaluation, ("a", "b", "c"), Normalisation((0.5,), (0.5,)))


def test_copies_are_counted_across_units_only():
    train = images(9, 0)
    train.pixels[[4, 7]] = train.pixels[1].clone()
    report = check(data_set(train))
    assert report.duplicates == 3
    assert "3 training images are exact copies" in report.sentences()[0]
    same = replace(train, index=unit_index(list("aubuuvuuu")))
    assert check(data_set(replace(same, index=unit_index(list("abcdbefbg"))))).duplicates == 0
    assert check(data_set(same)).duplicates == 0
    assert check(data_set(replace(train, index=unit_index(list("abcdbefxg"))))).duplicates == 3
    assert check(data_set(images(9, 0))).sentences() == ()


def test_evaluation_images_that_are_trained_on_are_an_error_but_in_published_sets():
    train, evaluation = images(9, 0), images(6, 1)
    evaluation.pixels[2] = train.pixels[5]
    with pytest.raises(UsageError, match="1 evaluation images are in the training set too"):
        check(data_set(train, evaluation))
    assert check(data_set(train, evaluation), allow_overlap=True).overlap == 1
    report = check(data_set(train, evaluation, "fashion-mnist"))
    assert report.overlap == 1
    assert "accuracy is overstated" in report.sentences()[0]


def test_classes_without_images_and_labels_out_of_range_are_named_together():
    train = images(9, 0)
    train.labels[train.labels == 2] = 1
    train.labels[3] = 7
    with pytest.raises(UsageError, match="(?s)class 'c' has no training image.*row 3 of train has a label"):
        check(data_set(train))
    batch = train.read(torch.tensor([2, 3]))
    assert batch.valid.tolist() == [True, False]
    assert not batch.pixels[1].any()
    assert batch.labels[1] == 0
    assert train.pixels[3].any()


def test_many_problems_are_listed_in_part():
    train = images(60, 0)
    train.labels[3:] = -1
    with pytest.raises(UsageError, match="  - 37 more like these"):
        check(data_set(train))


def test_several_labels_must_be_zeros_and_ones():
    hot = torch.tensor([[1, 0, 1], [0, 1, 0], [0.5, 0, 0]])
    train = replace(images(3, 0), labels=hot)
    with pytest.raises(UsageError, match="row 2 of train"):
        check(data_set(train))
    assert train.read(torch.arange(3)).valid.tolist() == [True, True, False]


def test_16_bit_arrays_are_read_and_blanked():
    train = replace(images(9, 0), pixels=torch.full((9, 1, 4, 4), 60000, dtype=torch.uint16))
    train.labels[1] = 9
    assert train.read(torch.tensor([0, 1])).pixels.numpy().max(axis=(1, 2, 3)).tolist() == [60000, 0]


def test_rows_of_units_against_a_loop():
    draw = np.random.default_rng(0)
    units = torch.from_numpy(np.concatenate([np.arange(20), draw.integers(0, 20, 80)]))
    index = UnitIndex.of(units)
    wanted = torch.from_numpy(draw.permutation(20)[:7].copy())
    expected = [(row, place) for place, unit in enumerate(wanted.tolist()) for row in range(100) if units[row] == unit]
    rows, positions = index.rows_of(wanted)
    assert list(zip(rows.tolist(), positions.tolist(), strict=True)) == expected
    assert [len(part) for part in index.rows_of(wanted[:0])] == [0, 0]
    assert index.count == 20


def test_normalisation_is_public_constants_or_given():
    assert normalisation_of("cifar10", "default", 3).mean == (0.4914, 0.4822, 0.4465)
    assert normalisation_of("folder", "default", 3) == Normalisation((0.5,) * 3, (0.5,) * 3)
    assert normalisation_of("folder", "0.1;0.2", 1) == Normalisation((0.1,), (0.2,))
    for wrong in ("", "0.1", "0.1;0", "0.1;x", "0.1,0.2;0.1,0.2", "nan;1", "2;1", "0.1;inf"):
        with pytest.raises(UsageError, match="1 means in"):
            normalisation_of("folder", wrong, 1)
