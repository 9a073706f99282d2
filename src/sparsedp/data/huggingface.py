"""Hugging Face `datasets`: saved to disk, local files, or a name on the hub. Images are decoded by our own decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsedp.data.lazy import LazyImages
from sparsedp.data.values import unit_index
from sparsedp.data.workers import Decoder, Encoded
from sparsedp.errors import missing_extra, wrong


@dataclass(frozen=True)
class Rows:
    """The encoded images of one split; the file stays memory-mapped."""

    dataset: Any
    column: str
    title: str

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> Encoded:
        image = self.dataset[row][self.column] or {}
        return image.get("bytes") or str(image.get("path") or "")

    def name(self, row: int) -> str:
        return f"{self.title}[{row}]"


def splits(place: str) -> dict[str, Any]:
    """The splits of a data set saved to disk, of a folder of data files, or of a name on the hub."""
    try:
        import datasets
    except ImportError as error:
        raise missing_extra("datasets", "huggingface", "reading Hugging Face data sets") from error
    saved = any((Path(place) / name).is_file() for name in ("dataset_dict.json", "state.json"))
    try:
        found = datasets.load_from_disk(place) if saved else datasets.load_dataset(place)
    except Exception as error:  # noqa: BLE001 - the library raises its own, the hub's, pyarrow's and the system's
        raise wrong(
            "data.dir", place, f"the datasets library cannot read it ({type(error).__name__})",
            "give a folder saved by save_to_disk, a folder of data files, or a name on the hub that this machine can reach",
        ) from error  # fmt: skip
    return dict(found) if isinstance(found, dict) else {"train": found}


def columns(dataset: Any, multilabel: bool, place: str) -> tuple[str, str]:
    """The image column and the label column, by their declared types; of several labels the one called label or labels."""
    import datasets

    images = [name for name, kind in dataset.features.items() if isinstance(kind, datasets.Image)]
    labels = [name for name in dataset.features if _label_type(dataset, name, multilabel) is not None]
    chosen = labels if len(labels) == 1 else [name for name in labels if name in ("label", "labels")]
    if len(images) != 1 or len(chosen) != 1:
        kind = "a list of ClassLabel" if multilabel else "ClassLabel"
        raise wrong(
            "data.dir", place, f"its columns are {sorted(dataset.features)}, where one Image and one {kind} are needed",
            "keep those columns only, or rename the label column to 'label'",
        )  # fmt: skip
    return images[0], chosen[0]


def _label_type(dataset: Any, name: str, multilabel: bool) -> Any:
    import datasets

    kind = dataset.features[name]
    if multilabel:
        kind = getattr(kind, "feature", None)
    return kind if isinstance(kind, datasets.ClassLabel) else None


def class_names(dataset: Any, column: str, multilabel: bool) -> tuple[str, ...]:
    """The names that the data set declares."""
    return tuple(_label_type(dataset, column, multilabel).names)


def images_of(dataset: Any, names: tuple[str, str], classes: int, decoder: Decoder, multilabel: bool, title: str) -> LazyImages:
    """One split as images; a column called unit numbers its units."""
    import datasets

    image, label = names
    encoded = dataset.select_columns([image]).cast_column(image, datasets.Image(decode=False))
    labels = _labels(dataset[label][:], classes, multilabel, title)
    index = unit_index([str(unit) for unit in dataset["unit"][:]]) if "unit" in dataset.features else None
    return LazyImages(Rows(encoded, image, title), labels, classes, decoder, index)


def _labels(values: Sequence[Any], classes: int, multilabel: bool, title: str) -> Tensor:
    each = values if multilabel else [[value] for value in values]
    if not all(isinstance(row, list) and all(isinstance(v, int) and 0 <= v < classes for v in row) for row in each):
        raise wrong("the split", title, f"it holds a label outside 0 to {classes - 1}", "remove rows without a label")
    if not multilabel:
        return torch.tensor(values, dtype=torch.int64)
    hot = torch.zeros(len(each), classes)
    for row, numbers in enumerate(each):
        hot[row, numbers] = 1
    return hot
