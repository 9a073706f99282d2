"""NF-ResNet-50: a residual network without normalisation (Brock, De and Smith 2021), as De et al. 2022 train it on ImageNet.

The public baseline also drops residual branches at random (stochastic depth, up to 0.1); this one does not, so that a
step is a function of its inputs alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsedp.models.layers import WSConv2d

GAMMA = 1.7139588594436646
"""1 / the deviation of relu(z), z standard normal: keeps the spread of a signal through a ReLU."""
ALPHA = 0.2
STAGES = ((256, 3, 1), (512, 4, 2), (1024, 6, 2), (2048, 3, 2))
"""Channels, blocks and first stride of each stage."""


class Bottleneck(nn.Module):
    """x + alpha * gain * f(beta * gamma * relu(x)), where f narrows to a quarter, convolves 3x3 and widens again.

    `beta` is one over the spread that the signal is expected to have here at the start.
    """

    def __init__(self, channels: int, out: int, stride: int, beta: float) -> None:
        super().__init__()
        narrow = out // 4
        self.beta = beta
        self.conv1 = WSConv2d(channels, narrow, 1)
        self.conv2 = WSConv2d(narrow, narrow, 3, stride)
        self.conv3 = WSConv2d(narrow, out, 1)
        self.skip_conv = WSConv2d(channels, out, 1, stride) if stride > 1 or channels != out else None
        self.skip_gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(x) * (GAMMA * self.beta)
        skip = x if self.skip_conv is None else self.skip_conv(out)
        out = self.conv1(out)
        out = self.conv2(functional.relu(out) * GAMMA)
        out = self.conv3(functional.relu(out) * GAMMA)
        return out * self.skip_gain * ALPHA + skip


class NFResNet50(nn.Module):
    """NF-ResNet-50 with bottlenecks of a quarter; made for images of about 224 pixels."""

    def __init__(self, classes: int, channels: int = 3) -> None:
        super().__init__()
        self.stem = WSConv2d(channels, 64, 7, stride=2)
        last, spread = 64, 1.0
        stages = []
        for wide, depth, stride in STAGES:
            blocks = []
            for index in range(depth):
                blocks.append(Bottleneck(last, wide, stride if index == 0 else 1, 1 / spread))
                last = wide
                # A skip convolution brings the spread back to 1, to which the block's own branch adds alpha squared.
                spread = math.hypot(1.0 if index == 0 else spread, ALPHA)
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(last, classes)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, x: Tensor) -> Tensor:
        out = self.stages(pool_same(self.stem(x)))
        return self.classifier((functional.relu(out) * GAMMA).mean((2, 3)))


def pool_same(x: Tensor) -> Tensor:
    """Maximum over 3x3 at stride 2, padded as TensorFlow's "same": at both ends of an odd side, at the far end of an even one."""
    height, width = x.shape[-2:]
    return functional.max_pool2d(x, 3, stride=2, padding=(height % 2, width % 2), ceil_mode=True)
