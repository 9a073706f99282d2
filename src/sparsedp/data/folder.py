"""A folder of images, a sub-folder per class, or a CSV manifest that names images, labels, units and splits."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sparsedp.data.files import broken, read_bytes
from sparsedp.data.lazy import LazyImages, Paths
from sparsedp.data.values import unit_index
from sparsedp.data.workers import Decoder
from sparsedp.errors import wrong

SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".webp", ".bmp", ".ppm", ".pgm", ".gif")
EVALUATION = ("test", "val", "valid", "validation")


@dataclass(frozen=True)
class Entry:
    """One image as named on disk."""

    path: str
    labels: tuple[str, ...]
    unit: str | None = None
    split: str = "train"


@dataclass(frozen=True)
class Listing:
    """All images of a set, before any of them is opened, and the classes in their order."""

    entries: tuple[Entry, ...]
    classes: tuple[str, ...]
    split_names: tuple[str, ...]  # the splits that exist

    def part(self, split: str) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.split == split)


def list_folder(place: Path) -> Listing:
    """Classes are the sub-folders of train/, or of the folder itself where it has no train/; hidden files are passed over."""
    if not place.is_dir():
        raise wrong("data.dir", str(place), "there is no such folder", "give the folder that holds the images")
    splits = [name for name in ("train", *EVALUATION) if (place / name).is_dir()]
    roots = {name: place / name for name in splits} if "train" in splits else {"train": place}
    classes = tuple(_folders(roots["train"]))
    if not classes:
        raise wrong(
            "the folder", str(roots["train"]), "it has no sub-folder per class", "move each class into a folder of its own"
        )
    entries = []
    for split, root in roots.items():
        if strange := set(_folders(root)) - set(classes):
            raise wrong("the folder", str(root / min(strange)), "train has no such class", "add it there, or remove it here")
        entries += [Entry(path, (name,), None, split) for path, name in _in_turn(root, classes)]
    return Listing(tuple(entries), classes, tuple(roots))


def _in_turn(root: Path, classes: Sequence[str]) -> list[tuple[str, str]]:
    """(path, class): the first image of every class, then the second of every class, so that the first so many hold all."""
    listed = [(place, name, path) for name in classes for place, path in enumerate(_files(root / name))]
    return [(path, name) for _, name, path in sorted(listed)]


def _folders(root: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))


def _files(folder: Path) -> list[str]:
    """All images below the folder, sorted, so that row numbers never depend on the order of a directory."""
    found = [path for path in folder.rglob("*") if not path.is_dir() and not path.name.startswith(".")]
    for path in found:
        if not path.is_file():
            raise broken(path, "it is no file, or a link to nothing", "remove or mend it")
        if path.suffix.lower() not in SUFFIXES:
            raise broken(path, f"its name ends in none of {', '.join(SUFFIXES)}", "remove it or rename it")
    return sorted(str(path) for path in found)


def list_manifest(place: Path, multilabel: bool, evaluation: str = "test") -> Listing:
    """A CSV file with the columns path and label, perhaps unit and split; paths are relative to it.

    Several labels of one image are separated by ';'. The classes are the lines of classes.txt beside the manifest, or
    else the labels that occur, which are then taken to be public.
    """
    path = place / "manifest.csv" if place.is_dir() else place
    rows = _rows(path)
    entries = tuple(_entry(row, path, line, multilabel) for line, row in rows)
    declared = path.parent / "classes.txt"
    if declared.is_file():
        classes = tuple(line.strip() for line in _text(declared).splitlines() if line.strip())
    else:
        classes = tuple(sorted({label for entry in entries for label in entry.labels}))
    for (line, _), entry in zip(rows, entries, strict=True):
        if not set(entry.labels) <= set(classes):
            raise broken(f"{path}:{line}", "its label is not in classes.txt", "add it there or mend the line")
        if entry.split not in ("train", *EVALUATION, evaluation):
            known = ", ".join(("train", *EVALUATION))
            raise broken(f"{path}:{line}", f"its split is none of {known}", "mend it, or name it with --data.evaluation")
    _units_apart(path, entries)
    return Listing(entries, classes, tuple(dict.fromkeys(entry.split for entry in entries)))


def _rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    """(line number, columns) of every line of a manifest."""
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        columns = reader.fieldnames or []
        for column in ("path", "label"):
            if column not in columns:
                raise broken(path, f"its first line has no column {column!r}", "name the columns path, label, unit, split")
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise broken(f"{path}:{reader.line_num}", f"the line is not CSV ({error})", "mend it") from error
    if not rows:
        raise broken(path, "it names no image", "add a line per image")
    for line, row in rows:
        if None in row or None in row.values():
            raise broken(f"{path}:{line}", f"the line has not {len(columns)} fields as the first one has", "mend it")
    return rows


def _entry(row: dict[str, str], path: Path, line: int, multilabel: bool) -> Entry:
    labels = tuple(filter(None, (part.strip() for part in row["label"].split(";")))) if multilabel else (row["label"].strip(),)
    where = f"{path}:{line}"
    if not multilabel and (not labels[0] or ";" in labels[0]):
        raise broken(where, "an image has one label unless data.multilabel is set", "give one label, or set --data.multilabel")
    if len(set(labels)) < len(labels):
        raise broken(where, "it names a label twice", "mend the line")
    if not row["path"].strip() or "\0" in row["path"]:
        raise broken(where, "it has no path", "mend the line")
    if "unit" in row and not row["unit"].strip():
        raise broken(where, "its unit is empty", "give every image a unit, or leave out the column")
    unit = row["unit"].strip() if "unit" in row else None
    return Entry(str(path.parent / row["path"].strip()), labels, unit, row.get("split", "train").strip())


def _units_apart(path: Path, entries: Sequence[Entry]) -> None:
    """A unit that trains must not also be evaluated on."""
    training = {entry.unit for entry in entries if entry.split == "train" and entry.unit is not None}
    if any(entry.unit in training for entry in entries if entry.split != "train"):
        raise broken(path, "a unit has images in train and in another split", "keep all images of a unit in one split")


def _text(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise broken(path, "it is not UTF-8 text", "save it as UTF-8") from error


def split_to_evaluate(there: Sequence[str], wanted: str, place: str | Path) -> str | None:
    """The split to evaluate on: the one named; where that is 'test' and there is none, a validation split."""
    if wanted == "none":
        return None
    choices = EVALUATION if wanted == "test" else (wanted,)
    for name in choices:
        if name in there:
            return name
    raise wrong("data.evaluation", wanted, f"{place} has no such split", "add one, or train without: --data.evaluation none")


def images_of(entries: Sequence[Entry], classes: tuple[str, ...], decoder: Decoder, multilabel: bool) -> LazyImages:
    """The entries as images; their units, where named, numbered as they come."""
    units = [entry.unit for entry in entries if entry.unit is not None]
    labels = label_tensor([entry.labels for entry in entries], classes, multilabel)
    source = Paths(tuple(entry.path for entry in entries))
    return LazyImages(source, labels, len(classes), decoder, unit_index(units) if units else None)


def label_tensor(labels: Sequence[tuple[str, ...]], classes: tuple[str, ...], multilabel: bool) -> Tensor:
    """Class numbers int64 [N], or float32 [N, classes] with a 1 for every label."""
    number = {name: place for place, name in enumerate(classes)}
    if not multilabel:
        return torch.tensor([number[names[0]] for names in labels], dtype=torch.int64)
    hot = torch.zeros(len(labels), len(classes))
    for row, names in enumerate(labels):
        hot[row, [number[name] for name in names]] = 1
    return hot
