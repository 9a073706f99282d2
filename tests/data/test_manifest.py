from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsedp.config import Data
from sparsedp.data import check, load
from sparsedp.data.folder import list_manifest
from sparsedp.errors import UsageError

from . import pictures

pytest.importorskip("PIL")


@pytest.fixture
def place(tmp_path):
    for number, image in enumerate(pictures.made_up(6, 8)[0]):
        (tmp_path / f"{number}.png").write_bytes(pictures.png(image))
    return tmp_path


def write(place, *lines: str, text: str | None = None) -> Data:
    (place / "manifest.csv").write_bytes((text or "\n".join(lines)).encode())
    return Data(name="manifest", dir=str(place), size=8, evaluation="none")


def test_units_and_splits(place):
    lines = ["path,label,unit,split", "0.png,b,mia,train", "1.png,a,tom,train", "2.png,b,mia,train", "3.png,b,ida,test"]
    data = load(Data(**{**vars(write(place, *lines)), "evaluation": "test"}))
    assert (data.classes, len(data.train), len(data.evaluation)) == (("a", "b"), 3, 1)
    assert (data.train.units.tolist(), data.train.num_units) == ([0, 1, 0], 2)
    rows, positions = data.train.rows_of(torch.tensor([1, 0]))
    assert (rows.tolist(), positions.tolist()) == ([1, 0, 2], [0, 1, 1])
    assert data.train.read(torch.arange(3)).labels.tolist() == [1, 0, 1]
    assert check(data).duplicates == 0


def test_several_labels_and_declared_classes(place):
    (place / "classes.txt").write_text("x\ny\nz\n")
    data = load(Data(**{**vars(write(place, "path,label", "0.png,x;z", "1.png,", "2.png, y ")), "multilabel": True}))
    assert data.train.read(torch.arange(3)).labels.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    assert data.multilabel
    check(data)


FAULTS = {
    "no column": (("path,class", "0.png,a"), "no column 'label'"),
    "no rows": (("path,label",), "names no image"),
    "nothing": (("",), "no column 'path'"),
    "short line": (("path,label", "0.png,a", "1.png"), "manifest.csv:3.*has not 2 fields"),
    "long line": (("path,label", "0.png,a,b"), "has not 2 fields"),
    "quotes": (("path,label", '"0.png"x,a'), "is not CSV"),
    "no label": (("path,label", "0.png,"), "one label unless data.multilabel"),
    "two labels": (("path,label", "0.png,a;b"), "one label unless data.multilabel"),
    "no path": (("path,label", " ,a"), "has no path"),
    "zero byte": (("path,label", "0\0.png,a"), "no path|not CSV"),
    "no unit": (("path,label,unit", "0.png,a,"), "its unit is empty"),
    "unit in both": (("path,label,unit,split", "0.png,a,u,train", "1.png,a,u,test"), "a unit has images in train and"),
    "misspelt split": (
        ("path,label,split", "0.png,a,train", "1.png,a,tset"),
        "manifest.csv:3.*its split is none of train, test",
    ),
    "no train": (("path,label,split", "0.png,a,test"), "holds no training image"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_manifest_is_one_sentence_that_names_it(place, fault):
    lines, sentence = FAULTS[fault]
    with pytest.raises(UsageError, match=sentence) as error:
        load(write(place, *lines))
    assert str(place) in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_are_missing_or_not_utf8_or_not_declared(place):
    with pytest.raises(UsageError, match="9.png.*cannot be read"):
        check(load(write(place, "path,label", "0.png,a", "9.png,a")))
    (place / "manifest.csv").write_bytes(b"path,label\n0.png,\xff\n")
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        load(Data(name="manifest", dir=str(place), size=8))
    (place / "classes.txt").write_text("a\n")
    with pytest.raises(UsageError, match="manifest.csv:3.*not in classes.txt"):
        load(write(place, "path,label", "0.png,a", "1.png,b"))
    with pytest.raises(UsageError, match="no such file"):
        load(Data(name="manifest", dir=str(place / "nowhere.csv"), size=8))


@given(st.text(max_size=40), st.booleans())
def test_any_text_is_a_listing_or_is_refused_in_a_sentence(tmp_path_factory, text, multilabel):
    path = tmp_path_factory.mktemp("manifest") / "manifest.csv"
    path.write_bytes(("path,label,unit\n0.png,a,u\n" + text).encode("utf-8", "surrogatepass"))
    try:
        listing = list_manifest(path, multilabel)
    except UsageError as error:
        assert "\n" not in str(error)
    else:
        assert listing.entries[0].labels == ("a",)
