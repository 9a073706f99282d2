"""Our networks: their sizes first, then their structure, then that they run."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from sparsedp.config import Model
from sparsedp.errors import UsageError
from sparsedp.models import build
from sparsedp.models.cnn import SmallCNN, TemperedSigmoid
from sparsedp.models.layers import WSConv2d
from sparsedp.models.nf_resnet import Bottleneck, NFResNet50, pool_same
from sparsedp.models.wrn import Block, WideResNet


def made(name: str, shape: tuple[int, int, int] = (3, 32, 32), classes: int = 10) -> nn.Module:
    return build(Model(name=name), shape, classes, torch.Generator().manual_seed(0))


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def maskable(model: nn.Module) -> int:
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear))


@pytest.mark.parametrize(("name", "parameters"), [("wrn_16_4", 2_753_818), ("wrn_28_10", 36_500_378), ("wrn_40_4", 8_961_306)])
def test_wrn_parameter_counts(name: str, parameters: int):
    assert size(made(name)) == parameters


def test_wrn_16_4_maskable_count():
    assert maskable(made("wrn_16_4")) == 2_745_264


def test_nf_resnet50_parameter_count():
    """Convolutions of a ResNet-50 (23,454,912) and its classifier, a gain and a bias per channel, and 16 skip gains."""
    stages = ((64, 256, 3), (256, 512, 4), (512, 1024, 6), (1024, 2048, 3))
    weights, channels = 3 * 64 * 49, 64
    for before, out, depth in stages:
        narrow = out // 4
        weights += before * out + before * narrow + (depth - 1) * out * narrow + depth * (9 * narrow**2 + narrow * out)
        channels += out + depth * (2 * narrow + out)
    assert weights == 23_454_912
    network = made("nf_resnet50", (3, 64, 64), classes=1000)
    assert size(network) == weights + 2 * channels + 16 + 2048 * 1000 + 1000 == 25_557_048
    assert maskable(network) == weights + 2048 * 1000


def test_small_cnn_has_the_size_of_the_paper_and_norm_cnn_its_own():
    assert size(made("norm_cnn", (1, 28, 28))) == 20_634
    assert size(made("small_cnn", (1, 28, 28))) == 26_010


def test_every_wrn_norm_has_16_groups_and_every_convolution_is_standardised():
    network = made("wrn_16_4")
    norms = [m for m in network.modules() if isinstance(m, nn.GroupNorm)]
    assert {(m.num_groups, m.eps) for m in norms} == {(16, 1e-5)}
    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 16
    assert all(isinstance(m, WSConv2d) for m in convolutions)
    assert [m.stride for m in convolutions if m.kernel_size == (1, 1)] == [(1, 1), (2, 2), (2, 2)]


def test_a_wrn_block_by_its_definition():
    torch.manual_seed(0)
    block = Block(16, 32, 2, project=True)
    x = torch.randn(2, 16, 8, 8)
    inner = block.conv1(block.norm1(functional.relu(x)))
    inner = block.conv2(block.norm2(functional.relu(inner)))
    assert torch.equal(block(x), inner + block.skip_conv(block.skip_norm(functional.relu(x))))
    plain = Block(32, 32, 1, project=False)
    y = torch.randn(2, 32, 4, 4)
    assert torch.equal(plain(y), plain.conv2(plain.norm2(functional.relu(plain.conv1(plain.norm1(functional.relu(y)))))) + y)


def test_classifiers_start_as_the_baseline_has_them():
    wrn = made("wrn_16_4", classes=1000).classifier
    assert wrn.weight.std().item() == pytest.approx(256**-0.5, rel=0.01)
    assert wrn.weight.abs().max().item() <= 2 * 256**-0.5 / 0.8796256610342398 + 1e-6
    nf = made("nf_resnet50", classes=100).classifier
    assert nf.weight.std().item() == pytest.approx(0.01, rel=0.01)
    assert torch.equal(wrn.bias, torch.zeros(1000))


def test_nf_resnet_expects_the_spread_that_it_has():
    """Each block's beta is one over the deviation of its input, which grows by alpha squared a block within a stage."""
    betas = [m.beta for m in made("nf_resnet50").modules() if isinstance(m, Bottleneck)]
    spreads = [1, *(math.sqrt(1 + 0.04 * k) for depth in (3, 4, 6, 3) for k in range(1, depth + 1))][:-1]
    assert [1 / b for b in betas] == pytest.approx(spreads)
    gains = [m.skip_gain.item() for m in made("nf_resnet50").modules() if isinstance(m, Bottleneck)]
    assert gains == [1.0] * 16


def test_a_bottleneck_by_its_definition():
    torch.manual_seed(0)
    block = Bottleneck(16, 32, 2, beta=0.9)
    with torch.no_grad():
        block.skip_gain.fill_(0.7)

    def active(x: torch.Tensor) -> torch.Tensor:
        return 1.7139588594436646 * functional.relu(x)

    x = torch.randn(2, 16, 6, 6)
    start = active(x) * 0.9
    inner = block.conv3(active(block.conv2(active(block.conv1(start)))))
    torch.testing.assert_close(block(x), 0.2 * 0.7 * inner + block.skip_conv(start))
    assert [c.weight.shape[:2] for c in (block.conv1, block.conv2, block.conv3)] == [(8, 16), (8, 8), (32, 8)]
    same = Bottleneck(32, 32, 1, beta=1.0)
    y = torch.randn(1, 32, 3, 3)
    torch.testing.assert_close(same(y), 0.2 * same.conv3(active(same.conv2(active(same.conv1(active(y)))))) + y)
    assert same.skip_conv is None


def test_nf_resnet_keeps_signals_of_unit_spread():
    network = NFResNet50(10)
    torch.manual_seed(1)
    out = network.stages(torch.randn(4, 64, 16, 16))
    assert 0.5 < out.std().item() < 2.0


@pytest.mark.parametrize(("height", "width"), [(8, 8), (7, 7), (8, 7), (1, 2), (2, 3)])
def test_pooling_is_padded_as_tensorflow_does(height: int, width: int):
    x = torch.randn(2, 3, height, width)
    down, across = (max((-(-n // 2) - 1) * 2 + 3 - n, 0) for n in (height, width))
    padded = functional.pad(x, (across // 2, across - across // 2, down // 2, down - down // 2), value=-torch.inf)
    assert torch.equal(pool_same(x), functional.max_pool2d(padded, 3, 2))


@pytest.mark.parametrize("settings", [(2.0, 2.0, 1.0), (1.58, 3.0, 0.71), (1.0, 1.0, 0.0)])
def test_tempered_sigmoid_is_its_formula(settings: tuple[float, float, float]):
    scale, temperature, offset = settings
    x = torch.linspace(-8, 8, 101, dtype=torch.float64)
    torch.testing.assert_close(TemperedSigmoid(*settings)(x), scale * torch.sigmoid(temperature * x) - offset)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("wrn_10_1", (3, 8, 8)),
        ("wrn_16_4", (1, 9, 7)),
        ("nf_resnet50", (3, 33, 32)),
        ("small_cnn", (1, 28, 28)),
        ("norm_cnn", (1, 28, 28)),
        ("small_cnn", (3, 32, 32)),
        ("small_cnn", (3, 13, 20)),
    ],
)
def test_every_network_runs_forwards_and_backwards(name: str, shape: tuple[int, int, int]):
    network = made(name, shape, classes=7)
    out = network(torch.randn(2, *shape))
    assert out.shape == (2, 7)
    functional.cross_entropy(out, torch.tensor([0, 6])).backward()
    for parameter_name, parameter in network.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        assert (parameter.grad != 0).any(), parameter_name


@pytest.mark.parametrize("name", ["wrn_10_1", "small_cnn"])
def test_rows_do_not_mix(name: str):
    network = made(name, (3, 16, 16)).double()
    images = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    torch.testing.assert_close(network(images)[1], network(images[1:2])[0])


def test_impossible_sizes_are_refused():
    with pytest.raises(UsageError, match=r"depth of a WRN is 17.*6n \+ 4"):
        WideResNet(17, 4, 10)
    with pytest.raises(UsageError, match="width of a WRN is 0"):
        WideResNet(16, 0, 10)
    with pytest.raises(UsageError, match=r"\(12, 28\).*13 pixels"):
        SmallCNN((1, 12, 28), 10)
