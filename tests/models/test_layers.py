"""Weight standardisation and "same" padding against slow oracles in float64."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from sparsedp.errors import UsageError
from sparsedp.models.layers import SameConv2d, WSConv2d, same_padding, truncated_normal_


def standardised(weight: np.ndarray, gain: np.ndarray, kept: np.ndarray | None = None) -> np.ndarray:
    """Filter by filter: (w - mean) * gain / sqrt(max(variance * fan-in, 1e-4)) over the kept entries, zero elsewhere."""
    made = np.zeros_like(weight)
    for channel in range(len(weight)):
        stays = np.ones(weight[channel].shape, bool) if kept is None else np.broadcast_to(kept[channel], weight[channel].shape)
        entries = weight[channel][stays]
        if len(entries):
            spread = max(entries.var() * len(entries), 1e-4)
            made[channel][stays] = (entries - entries.mean()) * gain[channel] / np.sqrt(spread)
    return made


def convolved(image: np.ndarray, weight: np.ndarray, stride: int) -> np.ndarray:
    """TensorFlow's SAME by its definition: position i reads from i * stride - (padding before), outside is zero."""
    (_, height, width), (out, _, kh, kw) = image.shape, weight.shape
    rows, columns = -(-height // stride), -(-width // stride)
    top = max((rows - 1) * stride + kh - height, 0) // 2
    left = max((columns - 1) * stride + kw - width, 0) // 2
    result = np.zeros((out, rows, columns))
    for r in range(rows):
        for c in range(columns):
            for y in range(kh):
                for x in range(kw):
                    at_y, at_x = r * stride - top + y, c * stride - left + x
                    if 0 <= at_y < height and 0 <= at_x < width:
                        result[:, r, c] += weight[:, :, y, x] @ image[:, at_y, at_x]
    return result


def layer(seed: int = 0, **settings: object) -> WSConv2d:
    torch.manual_seed(seed)
    made = WSConv2d(**{"in_channels": 3, "out_channels": 5, "kernel_size": 3, **settings}).double()
    with torch.no_grad():
        made.weight.add_(0.3)
        made.gain.uniform_(-2, 2)
        made.bias.normal_()
    return made


def test_a_fresh_layer_has_gain_one_bias_zero_and_weights_of_variance_one_over_fan_in():
    torch.manual_seed(0)
    fresh = WSConv2d(64, 128, 3)
    assert torch.equal(fresh.gain, torch.ones(128))
    assert torch.equal(fresh.bias, torch.zeros(128))
    assert fresh.weight.std().item() == pytest.approx((64 * 9) ** -0.5, rel=0.01)
    assert abs(fresh.weight.mean().item()) < 1e-3
    assert [name for name, _ in fresh.named_parameters()] == ["weight", "bias", "gain"]
    assert "kept" not in fresh.state_dict()


def test_effective_weight_is_the_formula():
    made = layer()
    wanted = standardised(made.weight.detach().numpy(), made.gain.detach().numpy())
    np.testing.assert_allclose(made.effective_weight().detach().numpy(), wanted, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(made.effective_weight(), made.centred() * made.scale())


def test_the_floor_acts_on_variance_times_fan_in():
    made = layer()
    with torch.no_grad():
        made.weight[1] = 0.7
        made.weight[2] = 0.7 + 1e-4 * torch.randn(3, 3, 3, dtype=torch.float64)
    wanted = standardised(made.weight.detach().numpy(), made.gain.detach().numpy())
    np.testing.assert_allclose(made.effective_weight().detach().numpy(), wanted, rtol=1e-9, atol=1e-12)
    assert made.effective_weight()[2].norm() < 0.1 * made.gain[2].abs()


@pytest.mark.parametrize("granular", ["weight", "channel"])
def test_pruned_entries_are_exact_zeros_and_the_rest_is_standardised_alone(granular: str):
    made = layer(seed=3)
    kept = torch.rand(5, 3, 3, 3) < 0.4 if granular == "weight" else torch.tensor([True, False, True, True, False])
    kept[1] = False
    made.prune(kept)
    effective = made.effective_weight().detach().numpy()
    wanted = standardised(made.weight.detach().numpy(), made.gain.detach().numpy(), kept.numpy())
    np.testing.assert_allclose(effective, wanted, rtol=1e-12, atol=1e-14)
    stays = np.broadcast_to(kept.numpy().reshape(5, *([1] * 3)) if kept.ndim == 1 else kept.numpy(), effective.shape)
    assert (effective[~stays] == 0).all()
    lengths = np.sqrt((effective**2).sum((1, 2, 3)))
    alive = stays.reshape(5, -1).sum(1) > 1
    np.testing.assert_allclose(lengths[alive], made.gain.detach().abs().numpy()[alive], rtol=1e-12)


def test_a_wholly_pruned_filter_is_zero_with_finite_gradients_and_its_raw_weights_are_inert():
    made = layer(seed=4)
    made.prune(torch.tensor([True, False, True, True, True]))
    with torch.no_grad():
        made.weight[1] = float("nan")
    image = torch.randn(2, 3, 6, 6, dtype=torch.float64, requires_grad=True)
    out = made(image)
    assert torch.equal(out[:, 1].detach(), made.bias[1].detach().expand(2, 6, 6))
    out.pow(2).sum().backward()
    assert torch.equal(made.weight.grad[1], torch.zeros(3, 3, 3, dtype=torch.float64))
    assert made.gain.grad[1] == 0
    for gradient in (made.weight.grad, made.gain.grad, made.bias.grad, image.grad):
        assert gradient.isfinite().all()


def test_pruned_raw_weights_do_not_matter_and_get_no_gradient():
    made, other = layer(seed=5), layer(seed=5)
    kept = torch.rand(5, 3, 3, 3) < 0.5
    made.prune(kept)
    other.prune(kept)
    with torch.no_grad():
        other.weight[~kept] = 1e6
    image = torch.randn(1, 3, 7, 7, dtype=torch.float64)
    assert torch.equal(made(image), other(image))
    made(image).pow(2).sum().backward()
    assert (made.weight.grad[~kept] == 0).all()
    assert (made.weight.grad[kept] != 0).any()


def test_one_entry_left_is_zero():
    made = layer(seed=6)
    kept = torch.zeros(5, 3, 3, 3, dtype=torch.bool)
    kept[:, 0, 0, 0] = True
    made.prune(kept)
    assert torch.equal(made.effective_weight(), torch.zeros(5, 3, 3, 3, dtype=torch.float64))


def test_the_mask_survives_saving_copying_and_loading_into_a_fresh_layer():
    made = layer(seed=7)
    made.prune(torch.rand(5, 3, 3, 3) < 0.5)
    fresh = layer(seed=8)
    fresh.load_state_dict(made.state_dict())
    assert torch.equal(fresh.effective_weight(), made.effective_weight())
    assert torch.equal(copy.deepcopy(made).kept, made.kept)
    with pytest.raises(RuntimeError, match="kept"):
        made.load_state_dict(layer().state_dict())


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(UsageError, match=r"\(4,\).*\(5, 3, 3, 3\) or \(5,\)"):
        layer().prune(torch.ones(4, dtype=torch.bool))


@pytest.mark.parametrize("pruned", [False, True])
def test_gradients_are_right(pruned: bool):
    made = layer(seed=9, stride=2)
    if pruned:
        made.prune(torch.rand(5, 3, 3, 3) < 0.6)
    image = torch.randn(2, 3, 4, 5, dtype=torch.float64)

    def run(weight: Tensor, gain: Tensor, bias: Tensor, x: Tensor) -> Tensor:
        return torch.func.functional_call(made, {"weight": weight, "gain": gain, "bias": bias}, (x,))

    inputs = [t.detach().clone().requires_grad_() for t in (made.weight, made.gain, made.bias, image)]
    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("shift", [0.0, 5.0])
def test_standardisation_does_not_see_a_constant_added_to_a_filter(shift: float):
    made, moved = layer(seed=10), layer(seed=10)
    with torch.no_grad():
        moved.weight.mul_(3).add_(shift)
    torch.testing.assert_close(made.effective_weight(), moved.effective_weight())


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 4), st.integers(1, 3))
def test_same_padding_gives_ceil_size_over_stride_and_the_odd_one_after(size: int, kernel: int, stride: int, dilation: int):
    before, after = same_padding(size, kernel, stride, dilation)
    reach = dilation * (kernel - 1) + 1
    assert after - before in (0, 1)
    assert (size + before + after - reach) // stride + 1 == -(-size // stride)


@pytest.mark.parametrize(
    ("height", "width", "kernel", "stride"),
    [(8, 8, 3, 2), (7, 8, 3, 2), (6, 6, 3, 1), (9, 6, 7, 2), (8, 8, 8, 2), (5, 5, 2, 1), (8, 7, 1, 2), (7, 7, 4, 3)],
)
def test_padding_is_tensorflows(height: int, width: int, kernel: int, stride: int):
    torch.manual_seed(0)
    made = SameConv2d(2, 3, kernel, stride, bias=False).double()
    image = torch.randn(2, height, width, dtype=torch.float64)
    wanted = convolved(image.numpy(), made.weight.detach().numpy(), stride)
    np.testing.assert_allclose(made(image[None])[0].detach().numpy(), wanted, rtol=1e-10, atol=1e-12)


def test_padding_by_hand_is_on_the_far_side_at_stride_two():
    made = SameConv2d(1, 1, 3, stride=2, bias=False)
    with torch.no_grad():
        made.weight.copy_(torch.arange(9.0).reshape(1, 1, 3, 3))
    image = torch.zeros(1, 1, 4, 4)
    image[0, 0, 0, 0] = 1  # the first window's first corner, not its centre
    assert made(image).tolist() == [[[[0.0, 0.0], [0.0, 0.0]]]]
    image[0, 0, 0, 1] = 1
    assert made(image)[0, 0, 0, 0] == 1.0


def test_symmetric_padding_makes_no_padded_copy(monkeypatch: pytest.MonkeyPatch):
    made, image = WSConv2d(3, 4, 3), torch.randn(1, 3, 8, 8)
    wanted = functional.conv2d(functional.pad(image, (1, 1, 1, 1)), made.effective_weight(), made.bias)
    monkeypatch.setattr(functional, "pad", None)
    torch.testing.assert_close(made(image), wanted)


def test_the_truncated_normal_has_its_deviation_and_its_bound():
    drawn = truncated_normal_(torch.empty(200_000), 0.5)
    assert drawn.std().item() == pytest.approx(0.5, rel=0.01)
    assert drawn.abs().max().item() <= 2 * 0.5 / 0.8796256610342398 + 1e-6
