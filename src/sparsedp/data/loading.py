"""From the configuration to a data set: which reader, which split, which normalisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sparsedp.config import Data
from sparsedp.data import cifar, folder, huggingface, idx, imagenet32
from sparsedp.data.augment import WHOLE
from sparsedp.data.download import fetch
from sparsedp.data.normalisation import normalisation_of
from sparsedp.data.values import ArrayImages, DataSet, Images
from sparsedp.data.workers import Decoder
from sparsedp.errors import one_of, require, unknown, wrong

ReadSplit = Callable[[str], ArrayImages]


def load(data: Data, workers: int = 0) -> DataSet:
    """The data set that `data` names. `workers` processes decode the images of those that stay on disk.

    Files are opened and their formats judged; each record is judged by `check`.
    """
    if data.name in ARRAYS:
        return _arrays(data)
    if data.name not in ON_DISK:
        raise unknown("data.name", data.name, [*ARRAYS, *ON_DISK])
    if data.dir is None:
        raise wrong("data.dir", None, f"data set {data.name!r} does not say where it is", "give its place as --data.dir")
    size = WHOLE if data.size is None and data.augment == "imagenet" else data.size
    require(
        size is not None and 1 <= size <= 4096, "data.size", data.size, f"the images of a {data.name!r} set are brought to one size",
        "give its side in pixels, up to 4096, such as --data.size 32",
    )  # fmt: skip
    assert size is not None
    train, evaluation, classes = ON_DISK[data.name](data, data.dir, Decoder(data.channels, size, workers))
    if not len(train):
        raise wrong("data.dir", data.dir, "it holds no training image", "add some to its split 'train'")
    constants = normalisation_of(data.name, data.normalise, data.channels)
    return DataSet(data.name, train, evaluation, classes, constants, data.multilabel)


def _arrays(data: Data) -> DataSet:
    one_of("data.evaluation", data.evaluation, ("test", "none"))
    require(not data.multilabel, "data.multilabel", True, f"the images of {data.name!r} have one label each", "leave it out")
    read, classes = ARRAYS[data.name](data)
    train = read("train")
    if data.limit is not None:
        train = replace(train, pixels=train.pixels[: data.limit], labels=train.labels[: data.limit])
    evaluation = None if data.evaluation == "none" else read("test")
    if evaluation is not None and evaluation.shape != train.shape:
        raise wrong("data.dir", data.dir, f"it trains on {train.shape} and evaluates on {evaluation.shape}", "give one size")
    return DataSet(data.name, train, evaluation, classes, normalisation_of(data.name, data.normalise, train.shape[0]))


def _place(data: Data) -> Path:
    return Path(data.dir).expanduser() if data.dir is not None else fetch(data.name)


def _mnist(data: Data) -> tuple[ReadSplit, tuple[str, ...]]:
    return (idx.embedded, idx.DIGITS) if data.dir is None else (_idx(data), idx.DIGITS)


def _fashion(data: Data) -> tuple[ReadSplit, tuple[str, ...]]:
    return _idx(data), idx.GARMENTS


def _idx(data: Data) -> ReadSplit:
    place = _place(data)
    return lambda split: idx.read_folder(place, split)


def _cifar(data: Data) -> tuple[ReadSplit, tuple[str, ...]]:
    place = _place(data)
    return lambda split: cifar.read_split(data.name, place, split), cifar.LAYOUTS[data.name].classes


def _imagenet32(data: Data) -> tuple[ReadSplit, tuple[str, ...]]:
    if data.dir is None:
        raise wrong(
            "data.dir", None, "ImageNet's home page, https://image-net.org, gives its 32 x 32 batches to registered users only",
            "fetch and unpack them there and give their folder as --data.dir",
        )  # fmt: skip
    place = _place(data)
    return lambda split: imagenet32.read_split(place, split), tuple(str(number) for number in range(1, imagenet32.CLASSES + 1))


def _folder(data: Data, place: str, decoder: Decoder) -> tuple[Images, Images | None, tuple[str, ...]]:
    require(not data.multilabel, "data.multilabel", True, "a folder gives every image one label", "use a manifest")
    return _listed(data, folder.list_folder(Path(place).expanduser()), decoder)


def _manifest(data: Data, place: str, decoder: Decoder) -> tuple[Images, Images | None, tuple[str, ...]]:
    return _listed(data, folder.list_manifest(Path(place).expanduser(), data.multilabel, data.evaluation), decoder)


def _listed(data: Data, listing: folder.Listing, decoder: Decoder) -> tuple[Images, Images | None, tuple[str, ...]]:
    assert data.dir is not None
    split = folder.split_to_evaluate(listing.split_names, data.evaluation, data.dir)
    entries = listing.part("train")[: data.limit]
    train = folder.images_of(entries, listing.classes, decoder, data.multilabel)
    if split is None:
        return train, None, listing.classes
    return train, folder.images_of(listing.part(split), listing.classes, decoder, data.multilabel), listing.classes


def _huggingface(data: Data, place: str, decoder: Decoder) -> tuple[Images, Images | None, tuple[str, ...]]:
    splits = huggingface.splits(place)
    if "train" not in splits:
        raise wrong("data.dir", place, f"its splits are {sorted(splits)}", "name the one to train on 'train'")
    names = huggingface.columns(splits["train"], data.multilabel, place)
    classes = huggingface.class_names(splits["train"], names[1], data.multilabel)

    def images(name: str, limit: int | None = None) -> Images:
        part = splits[name] if limit is None else splits[name].select(range(min(limit, len(splits[name]))))
        return huggingface.images_of(part, names, len(classes), decoder, data.multilabel, f"{place}:{name}")

    wanted = folder.split_to_evaluate(tuple(splits), data.evaluation, place)
    return images("train", data.limit), None if wanted is None else images(wanted), classes


ARRAYS = {"mnist": _mnist, "fashion-mnist": _fashion, "cifar10": _cifar, "cifar100": _cifar, "imagenet32": _imagenet32}
ON_DISK = {"folder": _folder, "manifest": _manifest, "huggingface": _huggingface}
