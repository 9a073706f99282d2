from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsedp.data import Augmentation, Normalisation, augment, augmentation_bits, evaluation_view, normalise
from sparsedp.dp.randomness import Key
from sparsedp.errors import UsageError

KEY = Key(b"augmentation tests".ljust(32), given=True)


def constants(channels: int) -> Normalisation:
    return Normalisation((0.4914, 0.4822, 0.4465)[:channels], (0.2470, 0.2435, 0.2616)[:channels])


def oracle(image: np.ndarray, word: int, kind: str, pad: int) -> np.ndarray:
    """One view of one normalised image [C, H, W]: mirror, crop, flip, in that order and one pixel at a time."""
    _, height, width = image.shape
    out_height, out_width = (224, 224) if kind == "imagenet" else (height, width)
    if kind == "imagenet":
        pad = 0
    mirrored = np.pad(image, ((0, 0), (pad, pad), (pad, pad)), mode="symmetric")
    tops, lefts = mirrored.shape[1] - out_height + 1, mirrored.shape[2] - out_width + 1
    number = word % (tops * lefts * (1 if kind == "crop" else 2))
    flip, top, left = number // (tops * lefts), number // lefts % tops, number % lefts
    view = mirrored[:, top : top + out_height, left : left + out_width]
    return view[:, :, ::-1] if flip else view


@given(
    st.sampled_from(["crop-flip", "crop"]), st.integers(0, 5), st.integers(1, 4), st.sampled_from([1, 3]), st.integers(0, 3),
    st.integers(5, 9), st.integers(5, 9), st.sampled_from([np.uint8, np.uint16]), st.integers(0, 2**32),
)  # fmt: skip
def test_equal_to_the_oracle_to_the_bit(kind, pad, views, channels, count, height, width, dtype, seed):
    draw = np.random.default_rng(seed)
    pixels = torch.from_numpy(draw.integers(0, np.iinfo(dtype).max, (count, channels, height, width), dtype, endpoint=True))
    bits = draw.integers(0, 2**64, (count, views, 1), np.uint64)
    spec = Augmentation(kind, constants(channels), pad)
    out = augment(pixels, bits, views, spec)
    assert out.shape == (count * views, channels, height, width)
    images = normalise(pixels, spec.normalisation).numpy()
    for row in range(count * views):
        example, view = divmod(row, views)
        assert np.array_equal(out[row].numpy(), oracle(images[example], int(bits[example, view, 0]), kind, pad))


def test_imagenet_views_and_the_evaluation_centre():
    draw = np.random.default_rng(0)
    pixels = torch.from_numpy(draw.integers(0, 256, (2, 3, 268, 268), np.uint8))
    bits = draw.integers(0, 2**64, (2, 3, 1), np.uint64)
    spec = Augmentation("imagenet", constants(3))
    images = normalise(pixels, spec.normalisation)
    out = augment(pixels, bits, 3, spec)
    for row in range(6):
        assert np.array_equal(
            out[row].numpy(), oracle(images[row // 3].numpy(), int(bits[row // 3, row % 3, 0]), "imagenet", 4)
        )
    assert torch.equal(evaluation_view(pixels, spec), images[:, :, 22:246, 22:246])
    assert spec.out_shape((3, 268, 268)) == (3, 224, 224)
    with pytest.raises(UsageError, match="cuts 224 x 224"):
        spec.out_shape((3, 223, 268))


def test_none_repeats_the_image_and_evaluates_it_whole():
    pixels = torch.arange(2 * 12, dtype=torch.uint8).reshape(2, 1, 3, 4)
    spec = Augmentation("none", constants(1))
    out = augment(pixels, np.zeros((2, 3, 1), np.uint64), 3, spec)
    assert torch.equal(out, normalise(pixels, spec.normalisation).repeat_interleave(3, 0))
    assert torch.equal(evaluation_view(pixels, spec), normalise(pixels, spec.normalisation))


def test_normalise_scales_both_depths_to_the_same_numbers():
    eight = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    sixteen = (eight.to(torch.int32) * 257).to(torch.uint16)
    exact = (torch.arange(256, dtype=torch.float64).reshape(1, 1, 16, 16) / 255 - 0.4914) / 0.2470
    for pixels in (eight, sixteen):
        found = normalise(pixels, constants(1))
        assert found.dtype == torch.float32
        assert torch.allclose(found.double(), exact, rtol=0, atol=1e-6)
    with pytest.raises(UsageError, match="3 channels"):
        normalise(torch.zeros(1, 3, 2, 2, dtype=torch.uint8), constants(1))


def test_bits_depend_on_key_step_row_and_view_only():
    rows = torch.tensor([5, 0, 700])
    bits = augmentation_bits(KEY, 3, rows, 4)
    assert (bits.shape, bits.dtype) == ((3, 4, 1), np.uint64)
    assert np.array_equal(augmentation_bits(KEY, 3, torch.tensor([700]), 4)[0], bits[2])
    assert np.array_equal(augmentation_bits(KEY, 3, rows, 2), bits[:, :2])
    assert augmentation_bits(KEY, 3, rows[:0], 4).shape == (0, 4, 1)
    other = Key(b"another key".ljust(32), given=True)
    everything = [bits, augmentation_bits(KEY, 4, rows, 4), augmentation_bits(other, 3, rows, 4)]
    assert len(np.unique(np.stack(everything))) == 36


def test_views_are_uniform_over_all_crops_and_flips():
    """Chi-squared on the 162 views: 161 +- 18 if uniform, 323 if half of them came a tenth more often than they should."""
    views = 16200
    image = torch.arange(32 * 32, dtype=torch.int32).reshape(1, 1, 32, 32).to(torch.uint16)
    spec = Augmentation("crop-flip", Normalisation((0.0,), (1 / 65535,)))
    out = augment(image, augmentation_bits(KEY, 0, torch.tensor([1]), views), views, spec)
    corners = out[:, 0, 8, 8:10].round().to(torch.int64)
    names = corners[:, 0] * 4096 + corners[:, 1]
    counts = names.unique(return_counts=True)[1].double()
    assert len(counts) == 162
    chi = float(((counts - 100) ** 2 / 100).sum())
    assert 90 < chi < 250


def test_a_pad_wider_than_the_image_and_unknown_kinds_are_refused():
    with pytest.raises(UsageError, match="mirror cannot be wider"):
        augment(
            torch.zeros(1, 1, 3, 3, dtype=torch.uint8), np.zeros((1, 1, 1), np.uint64), 1, Augmentation("crop", constants(1))
        )
    with pytest.raises(UsageError, match="choose one of crop, crop-flip, imagenet, none"):
        Augmentation("mixup", constants(1))  # type: ignore[arg-type]
