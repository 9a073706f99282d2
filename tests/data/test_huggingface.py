from __future__ import annotations

import numpy as np
import pytest
import torch

from sparsedp.config import Data
from sparsedp.data import check, load
from sparsedp.errors import UsageError

from . import pictures

datasets = pytest.importorskip("datasets")
pytest.importorskip("PIL")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def saved(place, multilabel: bool = False, **extra):
    parts = {}
    for seed, split in enumerate(("train", "test")):
        pixels, labels = pictures.made_up(6, 8, classes=2, seed=seed)
        kind = datasets.ClassLabel(names=["no", "yes"])
        features = {"image": datasets.Image(), "label": datasets.Sequence(kind) if multilabel else kind}
        values = {
            "image": [{"bytes": pictures.png(image), "path": None} for image in pixels],
            "label": [[0, 1][: label + 1] for label in labels] if multilabel else labels.tolist(),
        }
        for name, column in extra.items():
            features[name], values[name] = datasets.Value("string"), column
        parts[split] = datasets.Dataset.from_dict(values, features=datasets.Features(features))
    datasets.DatasetDict(parts).save_to_disk(str(place))
    return Data(name="huggingface", dir=str(place), size=8, multilabel=multilabel)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_set_saved_to_disk(tmp_path, workers):
    data = load(saved(tmp_path, unit=["a", "b", "a", "c", "c", "c"]), workers)
    pixels, labels = pictures.made_up(6, 8, classes=2)
    batch = data.train.read(torch.tensor([5, 0]))
    assert np.array_equal(batch.pixels.numpy(), pixels[[5, 0]])
    assert batch.labels.tolist() == labels[[5, 0]].tolist()
    assert (data.classes, data.train.units.tolist(), len(data.evaluation)) == (("no", "yes"), [0, 1, 0, 2, 2, 2], 6)
    check(data)


def test_several_labels_and_a_limit(tmp_path):
    settings = saved(tmp_path, multilabel=True)
    data = load(Data(**{**vars(settings), "limit": 2, "evaluation": "none"}))
    assert data.train.read(torch.arange(2)).labels.tolist() == [[1, 0], [1, 1]]
    assert (len(data.train), data.evaluation) == (2, None)


def test_what_cannot_be_read_is_said_in_a_sentence(tmp_path):
    with pytest.raises(UsageError, match="datasets library cannot read it"):
        load(Data(name="huggingface", dir=str(tmp_path / "nowhere"), size=8))
    settings = saved(tmp_path / "set")
    with pytest.raises(UsageError, match="a list of ClassLabel are needed"):
        load(Data(**{**vars(settings), "multilabel": True}))
