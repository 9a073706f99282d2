from __future__ import annotations

import io
import tarfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsedp.config import Data
from sparsedp.data import load
from sparsedp.data.cifar import parse_binary, parse_python
from sparsedp.data.files import read_members
from sparsedp.errors import UsageError

from . import pictures


def same(data, pixels, labels) -> None:
    batch = data.train.read(torch.arange(len(pixels)))
    assert np.array_equal(batch.pixels.numpy(), pixels)
    assert batch.labels.tolist() == labels.tolist()
    assert len(data.train) == len(pixels)


@pytest.mark.parametrize("python", [False, True])
@pytest.mark.parametrize("above", [False, True])
def test_cifar10_from_folders(tmp_path, python, above):
    folder = tmp_path / ("cifar-10-batches-py" if python else "cifar-10-batches-bin") if above else tmp_path
    pixels, labels = pictures.save_cifar10(folder, python)
    data = load(Data(name="cifar10", dir=str(tmp_path)))
    same(data, pixels, labels)
    assert (len(data.evaluation), data.classes[3]) == (20, "cat")


@pytest.mark.parametrize("python", [False, True])
def test_cifar10_from_an_archive_in_any_order(tmp_path, python):
    pixels, labels = pictures.save_cifar10(tmp_path / "batches", python)
    members = {f"x/{path.name}": path.read_bytes() for path in sorted((tmp_path / "batches").iterdir(), reverse=True)}
    path = tmp_path / f"cifar-10-{'python' if python else 'binary'}.tar.gz"
    pictures.archive(path, members)
    same(load(Data(name="cifar10", dir=str(tmp_path))), pixels, labels)
    same(load(Data(name="cifar10", dir=str(path))), pixels, labels)


@pytest.mark.parametrize("python", [False, True])
def test_cifar100_reads_the_fine_labels(tmp_path, python):
    pixels, labels = pictures.made_up(200, classes=100)
    for split in ("train", "test"):
        content = (
            pictures.cifar_python(pixels, labels, "fine_labels")
            if python
            else pictures.cifar_binary(pixels, labels, coarse=True)
        )
        (tmp_path / (split if python else f"{split}.bin")).write_bytes(content)
    data = load(Data(name="cifar100", dir=str(tmp_path)))
    same(data, pixels, labels)
    assert len(data.classes) == 100 == len(set(data.classes))


def test_members_that_climb_out_of_the_archive_write_nothing(tmp_path):
    pictures.save_cifar10(tmp_path / "batches")
    members = {f"../../escaped/{path.name}": path.read_bytes() for path in (tmp_path / "batches").iterdir()}
    (tmp_path / "in").mkdir()
    pictures.archive(tmp_path / "in" / "cifar-10-binary.tar.gz", members | {"/etc/escaped": b"x"})
    before = sorted(tmp_path.rglob("*"))
    assert len(load(Data(name="cifar10", dir=str(tmp_path / "in"))).train) == 100
    assert sorted(tmp_path.rglob("*")) == before


FAULTS = {
    "missing": (None, "holds none of data_batch_2.bin"),
    "empty": (b"", "0 bytes are not a whole number of 3073-byte records"),
    "cut short": (bytes(3072), "3072 bytes are not a whole number"),
    "label": (bytes([10]) + bytes(3072), "label outside 0 to 9"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_batch_is_one_sentence_that_names_it(tmp_path, fault):
    pictures.save_cifar10(tmp_path)
    content, sentence = FAULTS[fault]
    path = tmp_path / "data_batch_2.bin"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(UsageError, match=sentence) as error:
        load(Data(name="cifar10", dir=str(tmp_path)))
    assert "data_batch_2.bin" in str(error.value)
    assert "\n" not in str(error.value)


def test_archives_that_are_damaged_or_incomplete(tmp_path):
    path = tmp_path / "cifar-10-binary.tar.gz"
    pictures.save_cifar10(tmp_path / "b")
    pictures.archive(path, {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir() if "3" not in p.name})
    with pytest.raises(UsageError, match="cifar-10-binary.tar.gz.*does not hold data_batch_3.bin"):
        load(Data(name="cifar10", dir=str(tmp_path)))
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UsageError, match="cifar-10-binary.tar.gz.*cut short or damaged"):
        load(Data(name="cifar10", dir=str(tmp_path)))
    with pytest.raises(UsageError, match="holds none of cifar-10-batches-bin"):
        load(Data(name="cifar10", dir=str(tmp_path / "nowhere")))


def test_an_archive_cut_anywhere_in_its_first_bytes_is_refused(tmp_path):
    """Python's tarfile ends in a TypeError at some of these lengths."""
    pictures.archive(tmp_path / "whole", {"test_batch.bin": bytes(3073)})
    whole = (tmp_path / "whole").read_bytes()
    for length in range(40):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(UsageError, match=r"^[^\n]*cut short or damaged[^\n]*\.$"):
            list(read_members(tmp_path / "cut", ["test_batch.bin"]))


def test_numbers_in_an_archive_that_are_none_are_refused(tmp_path):
    """Python's tarfile ends in a ValueError at them."""
    with tarfile.open(tmp_path / "odd", "w:gz") as tar:
        for kind, content in ((tarfile.XHDTYPE, b"30 GNU.sparse.map=1,2,3\n"), (tarfile.REGTYPE, b"abc")):
            member = tarfile.TarInfo("test_batch.bin")
            member.type, member.size = kind, len(content)
            tar.addfile(member, io.BytesIO(content))
    with pytest.raises(UsageError, match=r"^[^\n]*cut short or damaged[^\n]*\.$"):
        list(read_members(tmp_path / "odd", ["test_batch.bin"]))


@pytest.mark.parametrize("labels", [[0, 1], [0, 1, 10], [0, 1, -1], [0, 1, "2"], [0, 1, True], (0, 1, 2), [0, 1, 2**80]])
def test_pickled_labels_must_be_whole_numbers_one_per_image(labels):
    import pickle

    content = pickle.dumps({"data": np.zeros((3, 3072), np.uint8), "labels": labels})
    with pytest.raises(UsageError, match="labels|label outside"):
        parse_python(content, 10, "labels")


@pytest.mark.parametrize(
    "array", [np.zeros((3, 3071), np.uint8), np.zeros((3, 3072), np.float32), np.zeros(3072, np.uint8), "text", None]
)
def test_pickled_data_must_be_rows_of_bytes(array):
    import pickle

    with pytest.raises(UsageError, match="rows of 3072 unsigned bytes"):
        parse_python(pickle.dumps({"data": array, "labels": [0, 1, 2]}), 10, "labels")


@given(st.binary(max_size=20), st.booleans(), st.integers(0, 2))
def test_any_bytes_parse_or_are_refused_in_a_sentence(noise, coarse, records):
    content = bytes(records * (3073 + coarse)) + noise
    try:
        pixels, labels = parse_binary(content, 10, coarse)
    except UsageError as error:
        assert "\n" not in str(error)
    else:
        assert pixels.shape == (len(labels), 3, 32, 32)
        assert labels.min() >= 0 and labels.max() < 10
