from __future__ import annotations

import io
import pickle
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsedp.config import Data
from sparsedp.data import load
from sparsedp.data.imagenet32 import parse_batch, parse_npz
from sparsedp.errors import UsageError

from . import pictures


def batch(count: int, seed: int, npz: bool) -> tuple[bytes, np.ndarray, np.ndarray]:
    pixels, labels = pictures.made_up(count, classes=1000, seed=seed)
    values = {"data": pixels.reshape(count, -1), "labels": labels + 1, "mean": np.zeros(3072)}
    out = io.BytesIO()
    if npz:
        np.savez(out, **values)
    else:
        pickle.dump(values | {"labels": (labels + 1).tolist()}, out)
    return out.getvalue(), pixels, labels


@pytest.mark.parametrize("npz", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_the_published_batches(tmp_path, npz, apart):
    held = []
    for number in range(11):
        content, pixels, labels = batch(3 + number % 4, number, npz)
        name = "val_data" if number == 10 else f"train_data_batch_{number + 1}"
        folder = tmp_path / ("Imagenet32_val" if number == 10 else "Imagenet32_train") if apart else tmp_path
        folder.mkdir(exist_ok=True)
        (folder / (f"{name}.npz" if npz else name)).write_bytes(content)
        held.append((pixels, labels))
    data = load(Data(name="imagenet32", dir=str(tmp_path)))
    found = data.train.read(torch.arange(len(data.train)))
    assert np.array_equal(found.pixels.numpy(), np.concatenate([p for p, _ in held[:10]]))
    assert found.labels.tolist() == np.concatenate([n for _, n in held[:10]]).tolist()
    assert (len(data.evaluation), len(data.classes)) == (len(held[10][0]), 1000)


def test_where_to_get_it_is_said(tmp_path):
    with pytest.raises(UsageError, match=r"image-net.org.*give their folder as --data.dir"):
        load(Data(name="imagenet32"))
    with pytest.raises(UsageError, match="holds none of train_data_batch_1, train_data_batch_1.npz"):
        load(Data(name="imagenet32", dir=str(tmp_path)))


def npz(**arrays) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def forged(header: bytes, body: bytes = b"") -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        text = header.ljust(117) + b"\n"
        archive.writestr("data.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body)
    return out.getvalue()


ROWS = np.zeros((2, 3072), np.uint8)
FAULTS = {
    "label zero": (npz(data=ROWS, labels=np.array([0, 1])), "label outside 1 to 1000"),
    "label 1001": (npz(data=ROWS, labels=np.array([1, 1001])), "label outside 1 to 1000"),
    "float labels": (npz(data=ROWS, labels=np.array([1.0, 2.0])), "not 2 whole numbers"),
    "too few": (npz(data=ROWS, labels=np.array([1])), "not 2 whole numbers"),
    "no labels": (npz(data=ROWS), "no entry 'labels'"),
    "narrow": (npz(data=ROWS[:, 1:], labels=np.array([1, 2])), "rows of 3072"),
    "objects": (npz(data=np.array([{}, 1], dtype=object)), "other than arrays of numbers"),
    "a huge claim": (
        forged(b"{'descr': '|u1', 'fortran_order': False, 'shape': (2147483648, 3072)}"),
        "not as long as its header",
    ),
    "code for a header": (forged(b"__import__('os').abort()"), "not a complete npz"),
    "no zip": (b"PK\x03\x04", "not a complete npz"),
    "cut short": (npz(data=ROWS, labels=np.array([1, 2]))[:-30], "not a complete npz"),
    "pickled label": (pickle.dumps({"data": ROWS, "labels": [1, 1001]}), "label outside 1 to 1000"),
    "pickled text": (pickle.dumps({"data": ROWS, "labels": "ab"}), "not 2 whole numbers"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_batch_is_one_sentence(fault):
    content, sentence = FAULTS[fault]
    with pytest.raises(UsageError, match=sentence) as error:
        parse_batch(content, "val_data")
    assert "val_data" in str(error.value)
    assert "\n" not in str(error.value)


SEED = npz(data=np.arange(6, dtype=np.uint8).reshape(2, 3), labels=np.array([1, 2]))


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 255)), max_size=4), st.integers(1, 1000))
def test_damaged_archives_parse_or_are_refused_in_a_sentence(changes, end):
    content = bytearray(SEED)
    for place, value in changes:
        content[place % len(content)] = value
    try:
        arrays = parse_npz(bytes(content[:end]))
    except UsageError as error:
        assert "\n" not in str(error)
    else:
        assert all(isinstance(array, np.ndarray) for array in arrays.values())
