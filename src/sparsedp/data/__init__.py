"""Images and labels for a run: `load` them, `check` them, read them by row, `augment` them in batches."""

from sparsedp.data.augment import Augmentation, augment, augmentation_bits, evaluation_view, normalise
from sparsedp.data.check import CheckReport, check
from sparsedp.data.loading import load
from sparsedp.data.values import ArrayImages, Batch, DataSet, Images, Normalisation

__all__ = [
    "ArrayImages",
    "Augmentation",
    "Batch",
    "CheckReport",
    "DataSet",
    "Images",
    "Normalisation",
    "augment",
    "augmentation_bits",
    "check",
    "evaluation_view",
    "load",
    "normalise",
]
