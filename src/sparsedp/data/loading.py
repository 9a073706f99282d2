"""From the configuration to a data set: which reader, which split, which normalisation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sparsedp.config import Data
from sparsedp.data import cifar, idx
from sparsedp.data.normalisation import normalisation_of
from sparsedp.data.values import ArrayImages, DataSet
from sparsedp.errors import one_of, unknown


def load(data: Data) -> DataSet:
    """The data set that `data` names. Reads headers and labels; what the records hold is for `check` to judge."""
    loaders = {"mnist": _digits, "cifar10": _cifar}
    if data.name not in loaders:
        raise unknown("data.name", data.name, loaders)
    return loaders[data.name](data)


def _digits(data: Data) -> DataSet:
    def split(name: str) -> ArrayImages:
        return idx.embedded(name) if data.dir is None else idx.read_folder(Path(data.dir), name)

    return _arrays(data, split, idx.DIGITS)


def _cifar(data: Data) -> DataSet:
    def split(name: str) -> ArrayImages:
        return cifar.read_split(data.name, Path(data.dir), name)

    return _arrays(data, split, cifar.LAYOUTS[data.name].classes)


def _arrays(data: Data, split, classes) -> DataSet:
    one_of("data.evaluation", data.evaluation, ("test", "none"))
    train = split("train")
    if data.limit is not None:
        train = replace(train, pixels=train.pixels[: data.limit], labels=train.labels[: data.limit])
    evaluation = None if data.evaluation == "none" else split("test")
    return DataSet(data.name, train, evaluation, classes, normalisation_of(data.name, data.normalise, train.shape[0]))
