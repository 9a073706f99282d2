"""Batched augmentation: normalise, then K random crops and flips of every image, as a pure function of the bits given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparsedp.data.values import Normalisation, Shape
from sparsedp.dp.randomness import Key, words
from sparsedp.errors import one_of, require

Kind = Literal["none", "crop-flip", "crop", "imagenet"]
KINDS = ("none", "crop-flip", "crop", "imagenet")
CROP, WHOLE = 224, 268  # sides, in pixels, of what ImageNet models see and of what it is cut from


@dataclass(frozen=True)
class Augmentation:
    """What is done to pixels before a model sees them. `pad` is for crop and crop-flip."""

    kind: Kind
    normalisation: Normalisation
    pad: int = 4

    def __post_init__(self) -> None:
        one_of("augment", self.kind, KINDS)

    def out_shape(self, shape: Shape) -> Shape:
        """The shape of a view of an image of this shape."""
        if self.kind == "none":
            return shape
        if self.kind != "imagenet":
            rule = f"a mirror cannot be wider than the image, {shape}"
            require(self.pad <= min(shape[1:]), "pad", self.pad, rule, "lower it")
            return shape
        require(
            min(shape[1:]) >= CROP, "size", shape[1:], f"augment 'imagenet' cuts {CROP} x {CROP} pixels out",
            f"set it to {WHOLE}, or choose another augment",
        )  # fmt: skip
        return (shape[0], CROP, CROP)


def augmentation_bits(key: Key, step: int, rows: Tensor, views: int) -> npt.NDArray[np.uint64]:
    """One random word per row and view, [n, views, 1]: a function of the key, the step, the row's number and the view.

    So every micro-batch, rank and resumed run sees the same views of a row, whatever other rows are in the batch.
    """
    drawn = [words(key, 0, views, "augmentation", step, int(row)) for row in rows]
    return np.stack(drawn)[..., None] if drawn else np.zeros((0, views, 1), np.uint64)


def augment(pixels: Tensor, bits: npt.NDArray[np.uint64], views: int, spec: Augmentation) -> Tensor:
    """Views [n * views, C, H, W], float32 in channels-last memory; the views of an example stand together.

    A view is the word's remainder by the number of distinct views, which is uniform but for a bias below 2**-50.
    crop-flip: a mirror of `pad` pixels around the image (the edge pixel repeated), a crop of the old size, and left and
    right exchanged in half of the views. imagenet: a crop of 224 x 224 and the same exchange.
    """
    shape = spec.out_shape((pixels.shape[1], pixels.shape[2], pixels.shape[3]))
    if spec.kind == "none":
        return normalise(pixels, spec.normalisation).repeat_interleave(views, 0)
    pad = 0 if spec.kind == "imagenet" else spec.pad
    source = _mirrored(normalise(pixels, spec.normalisation), pad)
    flip, top, left = _choices(bits[:, :views, 0], source.shape, shape, flips=spec.kind != "crop")
    return _cut(source, flip, top, left, shape)


def evaluation_view(pixels: Tensor, spec: Augmentation) -> Tensor:
    """The one view that is evaluated: normalised, and for imagenet the centre of 224 x 224 pixels."""
    _, height, width = spec.out_shape((pixels.shape[1], pixels.shape[2], pixels.shape[3]))
    top, left = (pixels.shape[2] - height) // 2, (pixels.shape[3] - width) // 2
    return normalise(pixels[:, :, top : top + height, left : left + width], spec.normalisation)


def normalise(pixels: Tensor, normalisation: Normalisation) -> Tensor:
    """uint8 or uint16 pixels as float32 in channels-last memory: (value / white - mean) / std."""
    require(
        len(normalisation.mean) == len(normalisation.std) == pixels.shape[1], "normalise", normalisation,
        f"the images have {pixels.shape[1]} channels", "give one mean and one standard deviation per channel",
    )  # fmt: skip
    white = {torch.uint8: 255.0, torch.uint16: 65535.0}[pixels.dtype]
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (normalisation.mean, normalisation.std))
    scale, shift = 1 / (white * std), -mean / std
    as_float = pixels.to(torch.float32, memory_format=torch.channels_last)
    return as_float.mul_(scale.float()).add_(shift.float())


def _mirrored(images: Tensor, pad: int) -> npt.NDArray[np.float32]:
    """[n, 2, H + 2 pad, W + 2 pad, C]: every image with its mirror around it, and the same with left and right exchanged."""
    count, channels, height, width = images.shape
    rows, columns = (np.pad(np.arange(side), pad, mode="symmetric") for side in (height, width))
    upright = rows[:, None] * width + columns
    positions = np.stack([upright, upright[:, ::-1]])
    flat = images.permute(0, 2, 3, 1).reshape(count, height * width, channels).numpy()
    return np.take(flat, positions.reshape(-1), axis=1).reshape(count, *positions.shape, channels)


def _choices(
    drawn: npt.NDArray[np.uint64], source: tuple[int, ...], shape: Shape, *, flips: bool
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """(flip, top, left) of every view; `left` counts in the image that is cut, which a flip has turned already."""
    tops, lefts = source[2] - shape[1] + 1, source[3] - shape[2] + 1
    rest = (drawn % np.uint64(tops * lefts * (2 if flips else 1))).astype(np.intp)
    rest, left = np.divmod(rest, lefts)
    flip, top = np.divmod(rest, tops)
    return flip, top, np.where(flip == 1, lefts - 1 - left, left)


def _cut(
    source: npt.NDArray[np.float32],
    flip: npt.NDArray[np.intp],
    top: npt.NDArray[np.intp],
    left: npt.NDArray[np.intp],
    shape: Shape,
) -> Tensor:
    """The windows of the given size, copied row by row out of one view of all possible windows."""
    channels, height, width = shape
    image, side, row, column, value = source.strides
    counts = (*source.shape[:2], source.shape[2] - height + 1, source.shape[3] - width + 1, height, width * channels)
    windows = np.lib.stride_tricks.as_strided(source, counts, (image, side, row, column, row, value), writeable=False)
    views = windows[np.arange(len(source))[:, None], flip, top, left]
    return torch.from_numpy(views.reshape(-1, height, width, channels)).permute(0, 3, 1, 2)
