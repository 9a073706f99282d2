from __future__ import annotations

import gzip
import hashlib
import struct
import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsedp.config import Data
from sparsedp.data import idx as reader
from sparsedp.data import load
from sparsedp.errors import UsageError

from . import pictures


def test_embedded_mnist_is_the_original():
    start = time.perf_counter()
    mnist = load(Data())
    assert time.perf_counter() - start < 20
    assert (len(mnist.train), len(mnist.evaluation), mnist.train.shape) == (60000, 10000, (1, 28, 28))
    again = pictures.idx(mnist.train.pixels[:, 0].numpy())
    assert hashlib.md5(again).hexdigest() == reader.MD5["train-images-idx3-ubyte"]
    assert hashlib.md5(pictures.idx(mnist.evaluation.labels.numpy())).hexdigest() == reader.MD5["t10k-labels-idx1-ubyte"]
    assert mnist.train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert reader.embedded("train") is reader.embedded("train")


def test_a_damaged_embedded_file_is_noticed():
    content = b"\x00\x00\x08\x01" + b"\x00" * 4
    import lzma

    with pytest.raises(UsageError, match="checksum is not the published one; install sparsedp again"):
        reader._unpacked(lzma.compress(content), "train-labels-idx1-ubyte")
    with pytest.raises(UsageError, match="copy is damaged"):
        reader._unpacked(b"not xz", "train-labels-idx1-ubyte")


@pytest.mark.parametrize(("ending", "stem"), [("", "-idx"), (".gz", "-idx"), ("", ".idx")])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_folders_read_plain_and_gzipped(tmp_path, ending, stem, name):
    held = pictures.save_idx(tmp_path, ending=ending, stem=stem)
    data = load(Data(name=name, dir=str(tmp_path)))
    for split, images in (("train", data.train), ("test", data.evaluation)):
        batch = images.read(torch.arange(30))
        assert np.array_equal(batch.pixels.numpy(), held[split][0])
        assert batch.labels.tolist() == held[split][1].tolist()
        assert batch.valid.all()
    assert len(load(Data(name=name, dir=str(tmp_path), limit=7)).train) == 7
    assert load(Data(name=name, dir=str(tmp_path), evaluation="none")).evaluation is None


FAULTS = {
    "missing": (None, "holds none of train-images-idx3-ubyte"),
    "empty": (b"", "does not start as an idx file"),
    "magic": (b"\x00\x00\x0d\x03" + b"\x00" * 12, "does not start as an idx file"),
    "header": (b"\x00\x00\x08\x03" + b"\x00" * 7, "ends within its header"),
    "no images": (pictures.idx(np.zeros((0, 28, 28))), "where images"),
    "cut short": (pictures.idx(np.zeros((30, 28, 28)))[:-1], "promises 23520 bytes of data but it holds 23519"),
    "too long": (pictures.idx(np.zeros((30, 28, 28))) + b"x", "promises"),
    "flat": (pictures.idx(np.zeros(30)), r"shape \(30,\) where images"),
    "fewer": (pictures.idx(np.zeros((29, 28, 28))), "labels of shape"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_image_file_is_one_sentence_that_names_it(tmp_path, fault):
    pictures.save_idx(tmp_path)
    content, sentence = FAULTS[fault]
    path = tmp_path / "train-images-idx3-ubyte"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(UsageError, match=sentence) as error:
        load(Data(name="mnist", dir=str(tmp_path)))
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_labels_out_of_range_and_sizes_that_differ_are_refused(tmp_path):
    pictures.save_idx(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(pictures.idx(np.full(30, 10)))
    with pytest.raises(UsageError, match="train-labels-idx1-ubyte.*label outside 0 to 9"):
        load(Data(dir=str(tmp_path)))
    pictures.save_idx(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(pictures.idx(np.zeros((30, 14, 14))))
    with pytest.raises(UsageError, match="give one size"):
        load(Data(dir=str(tmp_path)))


@pytest.mark.parametrize("damage", [lambda c: c[:-9], lambda c: c[:40] + b"\xff" * 40 + c[80:], lambda c: b"no gzip"])
def test_damaged_gzip(tmp_path, damage):
    pictures.save_idx(tmp_path, ending=".gz")
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UsageError, match="t10k-images-idx3-ubyte.gz.*(cannot be decompressed|promises)"):
        load(Data(dir=str(tmp_path)))


def test_a_gzip_bomb_is_stopped_at_the_limit(tmp_path):
    from sparsedp.data.files import MIB, read_bytes

    (tmp_path / "bomb.gz").write_bytes(gzip.compress(bytes(8 * MIB)))
    with pytest.raises(UsageError, match="more than the 4 MiB"):
        read_bytes(tmp_path / "bomb.gz", 4 * MIB)


def test_a_header_that_claims_two_billion_images_allocates_nothing():
    claim = b"\x00\x00\x08\x03" + struct.pack(">3I", 2**31, 2**31, 2**31) + bytes(100)
    tracemalloc.start()
    with pytest.raises(UsageError, match="promises"):
        reader.parse_idx(claim)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@given(st.binary(max_size=60) | st.binary(max_size=60).map(lambda tail: b"\x00\x00\x08" + tail))
def test_any_bytes_parse_or_are_refused_in_a_sentence(content):
    try:
        array = reader.parse_idx(content)
    except UsageError as error:
        assert "\n" not in str(error)
    else:
        assert pictures.idx(array) == content
