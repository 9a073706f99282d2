"""What is looked at once, before the first event: afterwards a broken record counts as zero and nothing is said.

The report and the errors are about private data: they belong on the operator's screen and in `private/`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sparsedp.data.lazy import LazyImages
from sparsedp.data.values import DataSet, Images, labels_in_range
from sparsedp.errors import together

CHUNK = 1024
PUBLISHED = ("mnist", "fashion-mnist", "cifar10", "cifar100", "imagenet32")
Digests = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class CheckReport:
    """Exact copies among the pixels that a model would see. Both numbers are private."""

    duplicates: int
    """Training rows whose pixels another unit has too. Their person has more than one unit: see docs/privacy.md."""
    overlap: int
    """Evaluation rows whose pixels are in the training set."""
    checksum: str
    """Of all training rows, their labels and units: tells a changed data set from the same one. Private, like the rest."""

    def sentences(self) -> tuple[str, ...]:
        """What the operator should know."""
        said = []
        if self.duplicates:
            said.append(
                f"{self.duplicates} training images are exact copies of another unit's: the guarantee protects each copy alone"
            )
        if self.overlap:
            said.append(f"{self.overlap} evaluation images are in the training set too: accuracy is overstated")
        return tuple(said)


def check(data: DataSet, allow_overlap: bool | None = None) -> CheckReport:
    """Reads everything once; raises one error for all that is wrong, otherwise counts copies.

    An evaluation image that is also trained on is an error, except in the published sets, whose splits are what they are.
    """
    problems = _missing_classes(data)
    train, bad = _inspect(data.train, "train")
    problems += bad
    evaluation = np.zeros(0, np.uint64)
    if data.evaluation is not None:
        evaluation, bad = _inspect(data.evaluation, "evaluation")
        problems += bad
    report = CheckReport(_copies(train, data.train), int(np.isin(evaluation, train).sum()), _checksum(train, data.train))
    if report.overlap and not (data.name in PUBLISHED if allow_overlap is None else allow_overlap):
        problems.append(f"{report.overlap} evaluation images are in the training set too; remove them from one of the two.")
    if problems:
        raise together(f"the data set {data.name!r} cannot be used:", problems)
    return report


def _checksum(digests: Digests, images: Images) -> str:
    units = b"" if images.units is None else images.units.numpy().tobytes()
    return hashlib.sha256(digests.tobytes() + _labels(images).numpy().tobytes() + units).hexdigest()


def _missing_classes(data: DataSet) -> list[str]:
    labels = _labels(data.train)
    present = labels.sum(0) > 0 if labels.dim() == 2 else torch.bincount(labels.clamp(min=0), minlength=len(data.classes)) > 0
    missing = [name for name, there in zip(data.classes, present.tolist(), strict=False) if not there]
    return [f"the class {name!r} has no training image; add some, or remove the class." for name in missing]


def _labels(images: Images) -> torch.Tensor:
    held = getattr(images, "labels", None)
    return held if held is not None else torch.cat([images.read(rows).labels for rows in _chunks(images)])


def _chunks(images: Images) -> Iterator[torch.Tensor]:
    yield from torch.arange(len(images)).split(CHUNK)


def _inspect(images: Images, split: str) -> tuple[Digests, list[str]]:
    """A digest of every row's pixels, and what is wrong with the rows that cannot be used."""
    if len(images) == 0:
        return np.zeros(0, np.uint64), [f"the split {split!r} holds no image; add some."]
    if isinstance(images, LazyImages):
        return _inspect_files(images, split)
    digests, problems = [], []
    for rows in _chunks(images):
        batch = images.read(rows)
        digests += [_digest(pixels.numpy()) for pixels in batch.pixels]
        bad = rows[~batch.valid].tolist()
        problems += [f"row {row} of {split} has a label that is not one of the classes; mend or remove it." for row in bad]
    return np.array(digests, np.uint64), problems


def _inspect_files(images: LazyImages, split: str) -> tuple[Digests, list[str]]:
    digests = np.zeros(len(images), np.uint64)
    problems = []
    sound = labels_in_range(images.labels, images.num_classes).tolist()
    decoded = images.decoder.decode(images.source[row] for row in range(len(images)))
    for row, found in enumerate(decoded):
        problem = images.problem(row, found)
        if problem is None and not sound[row]:
            problem = f"{images.source.name(row)!r} in {split} has a label that is not one of the classes; mend or remove it."
        if problem is None:
            digests[row] = _digest(found)
        else:
            problems.append(problem)
    return digests, problems


def _digest(pixels: object) -> int:
    """64 bits of BLAKE2b: among a million images two that differ share one with a chance of about 3 in 10**8."""
    return int.from_bytes(hashlib.blake2b(np.ascontiguousarray(pixels).tobytes(), digest_size=8).digest(), "little")  # type: ignore[call-overload]


def _copies(digests: Digests, images: Images) -> int:
    """Rows whose digest occurs under another unit too."""
    units = np.arange(len(digests)) if images.units is None else images.units.numpy()
    pairs = np.unique(np.stack([digests, units.astype(np.uint64)]), axis=1)
    found, owners = np.unique(pairs[0], return_counts=True)
    return int(np.isin(digests, found[owners > 1]).sum())
