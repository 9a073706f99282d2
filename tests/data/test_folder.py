from __future__ import annotations

import dataclasses
import errno

import numpy as np
import pytest
import torch

from sparsedp.config import Data
from sparsedp.data import check, load
from sparsedp.errors import UsageError

from . import pictures

pytest.importorskip("PIL")
CLASSES = ("ant", "bee", "cat")


@pytest.fixture
def folder(tmp_path):
    for seed, split in enumerate(("train", "test")):
        pixels, labels = pictures.made_up(12, 8, classes=3, seed=seed)
        pictures.save_folder(tmp_path / split, pixels, labels, CLASSES)
    return tmp_path


def settings(place, **more) -> Data:
    return Data(**{"name": "folder", "dir": str(place), "size": 8} | more)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_folder_reads_as_the_arrays_it_was_made_from(folder, workers):
    data = load(settings(folder), workers)
    pixels, labels = pictures.made_up(12, 8, classes=3)
    batch = data.train.read(torch.tensor([3, 0, 3, 11]))
    assert np.array_equal(batch.pixels.numpy(), pixels[[3, 0, 3, 11]])
    assert batch.labels.tolist() == labels[[3, 0, 3, 11]].tolist()
    assert batch.valid.tolist() == [True] * 4
    assert (data.classes, data.train.shape, data.train.units, data.train.num_units) == (CLASSES, (3, 8, 8), None, 12)
    assert len(data.train.read(torch.tensor([], dtype=torch.int64)).pixels) == 0
    assert check(data).duplicates == 0


def test_the_first_so_many_hold_all_classes(folder):
    train = load(settings(folder, limit=3)).train
    assert train.read(torch.arange(3)).labels.tolist() == [0, 1, 2]


def test_val_stands_in_for_test_and_a_lone_folder_trains_without(folder):
    (folder / "test").rename(folder / "val")
    assert len(load(settings(folder)).evaluation) == 12
    assert len(load(settings(folder, evaluation="val")).evaluation) == 12
    with pytest.raises(UsageError, match="data.evaluation is 'holdout', but .* has no such split"):
        load(settings(folder, evaluation="holdout"))
    with pytest.raises(UsageError, match="--data.evaluation none"):
        load(settings(folder / "train"))
    data = load(settings(folder / "train", evaluation="none"))
    assert (len(data.train), data.evaluation) == (12, None)


def test_a_file_broken_after_the_check_reads_as_zeros_and_moves_no_other_row(folder):
    data = load(settings(folder))
    check(data)
    whole = data.train.read(torch.arange(12))
    (folder / "train" / "bee" / "00004.png").write_bytes(b"broken")
    (folder / "train" / "cat" / "00005.png").write_bytes(b"")
    (folder / "train" / "ant" / "00000.png").write_bytes(pictures.png(np.full((1, 8, 8), 1, np.uint16)))
    batch = data.train.read(torch.arange(12))
    bad = [row for row in range(12) if not batch.valid[row]]
    assert bad == [0, 4, 5]
    assert not batch.pixels[bad].any()
    assert not batch.labels[bad].any()
    good = batch.valid
    assert torch.equal(batch.pixels[good], whole.pixels[good])
    assert torch.equal(batch.labels[good], whole.labels[good])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_is_gone_after_the_check_is_an_error_that_does_not_name_it(folder, workers):
    data = load(settings(folder), workers)
    check(data)
    (folder / "train" / "cat" / "00005.png").unlink()
    with pytest.raises(UsageError, match=r"^An image could not .*No such file or directory.*at no new cost\.$") as caught:
        data.train.read(torch.arange(12))
    assert "00005" not in str(caught.value)
    assert data.train.read(torch.arange(5)).valid.all(), "the others can be read"


def test_rows_that_a_library_cannot_read_are_an_error_too(folder):
    train = load(settings(folder)).train

    class Gone:
        def __len__(self):
            return 12

        def __getitem__(self, row):
            raise OSError(errno.EIO, "the row of a patient")

    with pytest.raises(UsageError, match=r"^An image could not .*Input/output error.*\.$") as caught:
        dataclasses.replace(train, source=Gone()).read(torch.arange(2))
    assert "patient" not in str(caught.value)


def test_all_16_bit_images_stay_so(tmp_path):
    values = np.random.default_rng(0).integers(0, 65536, (6, 1, 8, 8), dtype=np.uint16)
    pictures.save_folder(tmp_path, values, np.arange(6) % 3, CLASSES)
    data = load(settings(tmp_path, channels=1, evaluation="none"))
    assert np.array_equal(data.train.read(torch.arange(6)).pixels.numpy(), values)
    check(data)
    (tmp_path / "bee" / "00001.png").write_bytes(pictures.png(np.zeros((1, 8, 8), np.uint8)))
    with pytest.raises(UsageError, match="00001.png.*convert all to one depth"):
        check(data)


def test_the_check_names_every_file_that_cannot_be_read(folder):
    (folder / "train" / "bee" / "00004.png").write_bytes(b"broken")
    (folder / "test" / "cat" / "00005.png").write_bytes(b"")
    with pytest.raises(UsageError, match="(?s)00004.png.*not an image.*00005.png.*not an image"):
        check(load(settings(folder)))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda f: (f / "train" / "dog").mkdir(), "class 'dog' has no training image"),
        (lambda f: (f / "test" / "dog").mkdir(), "test/dog.*train has no such class"),
        (lambda f: (f / "train" / "bee" / "notes.txt").write_text("x"), "notes.txt.*its name ends in none of"),
        (lambda f: (f / "train" / "bee" / "9.png").symlink_to(f / "nowhere.png"), "9.png.*it is no file, or a link to nothing"),
        (lambda f: [p.unlink() for p in (f / "train").rglob("*.png")], "holds no training image"),
        (lambda f: [p.unlink() for p in (f / "test").rglob("*.png")], "split 'evaluation' holds no image"),
    ],
)
def test_faulty_folders(folder, change, sentence):
    change(folder)
    with pytest.raises(UsageError, match=sentence):
        check(load(settings(folder)))


def test_places_that_are_not_there_and_sizes_that_are_not_given(tmp_path):
    with pytest.raises(UsageError, match="there is no such folder"):
        load(settings(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="no sub-folder per class"):
        load(settings(tmp_path))
    with pytest.raises(UsageError, match="data.dir is None"):
        load(Data(name="folder", size=8))
    with pytest.raises(UsageError, match="data.size is None"):
        load(Data(name="folder", dir=str(tmp_path)))
    with pytest.raises(UsageError, match="data.name is 'cifar11', which is not known; choose one of cifar10"):
        load(Data(name="cifar11"))
    with pytest.raises(UsageError, match="use a manifest"):
        load(settings(tmp_path, multilabel=True))
