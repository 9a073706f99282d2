"""Noise: the right scale on every selected coordinate to one per cent, none elsewhere, and never the same twice."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from sparsedp.dp.discrete import LARGEST_SCALE
from sparsedp.dp.masks import Masks
from sparsedp.dp.noise import add_noise, grid_for
from sparsedp.dp.values import ClippedSum, Released
from sparsedp.errors import UsageError
from tests.distributions import ALARM, correlation_deviations, mean_p, normal_p, scale_p, tail_p
from tests.made_up import KEY, OTHER_KEY

SHAPES = {"conv.weight": (100, 100, 10, 10), "linear.weight": (1000, 1000), "bias": (1_000_000,), "gain": (1000, 1000, 1)}


def zeros(shapes: Mapping[str, tuple[int, ...]], sensitivity: float = 1.0, grid: float | None = None) -> ClippedSum:
    dtype = torch.float32 if grid is None else torch.int64
    return ClippedSum({name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}, sensitivity, grid)


def noise_of(
    shapes: Mapping[str, tuple[int, ...]], sigma: float = 1.0, sensitivity: float = 1.0, masks: Masks | None = None,
    purpose: str = "train", step: int = 0, grid: float | None = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    released = add_noise(zeros(shapes, sensitivity, grid), sigma, masks or {}, KEY, purpose, step)
    return {name: tensor.double().numpy().reshape(-1) for name, tensor in released.tensors.items()}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("sigma", "sensitivity"), [(1.0, 1.0), (10.0, 0.3), (0.7, 25.0)])
def test_scale_mean_shape_and_tails(name: str, sigma: float, sensitivity: float) -> None:
    drawn, wanted = noise_of({name: SHAPES[name]}, sigma, sensitivity)[name], sigma * sensitivity
    assert scale_p(drawn, wanted) > ALARM
    assert scale_p(drawn, wanted * 1.01) < ALARM and scale_p(drawn, wanted * 0.99) < ALARM
    assert mean_p(drawn, 0.0, wanted) > ALARM and normal_p(drawn, wanted) > ALARM
    assert min(tail_p(drawn, wanted, at) for at in (2.0, 3.0, 4.0, 4.5)) > ALARM


def test_on_the_grid_too() -> None:
    for sigma, clip in ((1.0, 1.0), (5.0, 0.2)):
        grid = grid_for(sigma, clip, 1_000_000)
        drawn = noise_of({"w": (1_000_000,)}, sigma, clip, grid=grid)["w"]
        assert scale_p(drawn, sigma * clip) > ALARM
        assert scale_p(drawn, sigma * clip * 1.01) < ALARM and scale_p(drawn, sigma * clip * 0.99) < ALARM
        assert mean_p(drawn, 0.0, sigma * clip) > ALARM and normal_p(drawn, sigma * clip) > ALARM
        assert min(tail_p(drawn, sigma * clip, at) for at in (2.0, 3.0, 4.0, 4.5)) > ALARM
        whole = drawn / grid
        assert np.abs(whole - whole.round()).max() < 1e-7 * np.abs(whole).max()


def test_every_tensor_gets_its_own_full_share() -> None:
    shapes = {"weight": (200, 500), "bias": (100_000,), "scalar-like": (100_000, 1), "channels": (10, 100, 10, 10)}
    for name, drawn in noise_of(shapes, 2.0, 0.5).items():
        assert scale_p(drawn, 1.0) > ALARM, name
        assert scale_p(drawn, 0.95) < ALARM and scale_p(drawn, 1.05) < ALARM
    one = add_noise(zeros({"s": ()}), 1.0, {}, KEY, "train", 0).tensors["s"]
    assert one.shape == () and float(one) != 0


def test_no_two_places_share_noise() -> None:
    """Guarantee: no two steps, purposes or parameters share noise."""
    for grid in (None, grid_for(1.0, 1.0, 50_000)):
        drawn = {
            (purpose, step, name): values
            for purpose, step in (("train", 0), ("train", 1), ("train", 256), ("dp-snip", 0))
            for name, values in noise_of({"a": (50_000,), "b": (50_000,)}, purpose=purpose, step=step, grid=grid).items()
        }
        drawn["other key"] = (
            add_noise(zeros({"a": (50_000,)}, grid=grid), 1.0, {}, OTHER_KEY, "train", 0).tensors["a"].double().numpy()
        )
        for first, second in itertools.combinations(drawn, 2):
            assert correlation_deviations(drawn[first], drawn[second]) < 5, (first, second)
            assert correlation_deviations(drawn[first], drawn[second][::-1]) < 5, (first, second)
        for values in drawn.values():
            assert max(correlation_deviations(values[lag:], values[:-lag]) for lag in (1, 2, 64, 8192)) < 5


def test_a_million_draws_are_distinct() -> None:
    draws = [add_noise(_double({"w": (250_000,)}), 1.0, {}, KEY, "train", step).tensors["w"].numpy() for step in range(4)]
    assert len(np.unique(np.concatenate(draws))) == 1_000_000


def _double(shapes: Mapping[str, tuple[int, ...]]) -> ClippedSum:
    return ClippedSum({name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}, 1.0)


@pytest.mark.parametrize("grid", [None, 2.0**-10])
def test_the_noise_of_a_coordinate_depends_on_its_place_alone(grid: float | None) -> None:
    """Guarantee: the noise of a coordinate is a function of (key, purpose, step, parameter, coordinate), whatever the masks."""
    shapes = {"a": (20, 30), "b": (7,)}
    whole = noise_of(shapes, grid=grid)
    masks = {"a": torch.rand(20, 30, generator=torch.Generator().manual_seed(0)) < 0.3}
    alone = noise_of({"a": (20, 30)}, masks=masks, grid=grid)["a"]
    flat = masks["a"].reshape(-1).numpy()
    assert np.array_equal(alone[flat], whole["a"][flat])
    channels = noise_of(shapes, masks={"a": torch.arange(20) % 2 == 0}, grid=grid)["a"].reshape(20, 30)
    assert np.array_equal(channels[::2].reshape(-1), whole["a"].reshape(20, 30)[::2].reshape(-1))
    assert np.array_equal(noise_of(shapes, grid=grid)["b"], whole["b"])
    fewer = noise_of({"b": (5,)}, grid=grid)["b"]
    assert np.array_equal(fewer, whole["b"][:5])


@pytest.mark.parametrize("grid", [None, 2.0**-10])
def test_dropped_coordinates_are_exactly_zero_and_kept_ones_are_not(grid: float | None) -> None:
    dtype = torch.float32 if grid is None else torch.int64
    large = torch.full((40, 50), 1_000_000, dtype=dtype)  # so far from zero that no noise on the grid can bring it there
    total = ClippedSum({"w": large, "v": large}, 1.0, grid)
    masks = {"w": torch.rand(40, 50, generator=torch.Generator().manual_seed(0)) < 0.5, "v": torch.arange(40) < 7}
    released = add_noise(total, 3.0, masks, KEY, "train", 0).tensors
    assert torch.equal(released["w"] != 0, masks["w"])
    assert torch.equal(released["v"] != 0, masks["v"][:, None].expand(40, 50))


def test_the_scale_comes_from_the_sum_itself() -> None:
    small, large = noise_of({"w": (1000,)}, sensitivity=1.0)["w"], noise_of({"w": (1000,)}, sensitivity=8.0)["w"]
    assert np.allclose(8 * small, large, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_sum_is_kept(dtype: torch.dtype) -> None:
    values = torch.linspace(-5, 5, 100, dtype=dtype)
    noised = add_noise(ClippedSum({"w": values}, 1.0), 2.0, {}, KEY, "train", 4).tensors["w"]
    alone = add_noise(ClippedSum({"w": torch.zeros(100, dtype=dtype)}, 1.0), 2.0, {}, KEY, "train", 4).tensors["w"]
    assert noised.dtype == dtype and torch.allclose(noised - alone, values, atol=2e-6)
    grid = grid_for(1.0, 1.0, 100)
    whole = torch.arange(100) * 1000
    exact = [add_noise(ClippedSum({"w": w}, 1.0, grid), 1.0, {}, KEY, "train", 4).tensors["w"] for w in (whole, 0 * whole)]
    assert torch.allclose((exact[0] - exact[1]) / grid, whole.float(), atol=grid * 1e3)


def test_no_noise_is_said() -> None:
    total = ClippedSum({"w": torch.ones(3)}, 1.0)
    released = add_noise(total, 0.0, {"w": torch.tensor([True, False, True])}, KEY, "train", 0)
    assert released.tensors["w"].tolist() == [1.0, 0.0, 1.0] and released.origin.startswith("not private")
    assert "multiplier 2.0, sensitivity 1.0" in add_noise(total, 2.0, {}, KEY, "train", 0).origin


@pytest.mark.parametrize(
    ("sigma", "grid", "said"), [(-1.0, None, "cannot be negative"), (float("nan"), None, "negative"), (0.0, 0.1, "needs noise")]
)
def test_noise_that_cannot_be(sigma: float, grid: float | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        add_noise(zeros({"w": (3,)}, grid=grid), sigma, {}, KEY, "train", 0)


@pytest.mark.parametrize("sigma", [0.05, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("dimensions", [1, 1000, 3_000_000])
def test_the_grid_divides_the_noise_and_costs_little(sigma: float, dimensions: int) -> None:
    if 1024 * sigma * dimensions**0.5 > LARGEST_SCALE:
        with pytest.raises(UsageError, match="drop more, or use arithmetic 'float'"):
            grid_for(sigma, 0.5, dimensions)
        return
    grid = grid_for(sigma, 0.5, dimensions)
    scale = sigma * 0.5 / grid
    assert scale == pytest.approx(round(scale)) and 1 <= round(scale) <= LARGEST_SCALE
    assert grid * dimensions**0.5 / 2 <= 0.5 / 1000
    with pytest.raises(UsageError, match="exact arithmetic needs noise"):
        grid_for(0.0, 0.5, dimensions)


def test_over_divides_and_keeps_the_origin() -> None:
    halved = Released({"w": torch.tensor([2.0])}, "somewhere").over(4.0)
    assert halved.tensors["w"].tolist() == [0.5] and halved.origin == "somewhere"


def test_noise_reads_no_global_generator() -> None:
    torch.manual_seed(1)
    first: Tensor = add_noise(zeros({"w": (100,)}), 1.0, {}, KEY, "train", 0).tensors["w"]
    torch.manual_seed(2)
    assert torch.equal(first, add_noise(zeros({"w": (100,)}), 1.0, {}, KEY, "train", 0).tensors["w"])
