"""Wide residual networks with weight standardisation and group normalisation, as De et al. 2022 train them."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional

from sparsedp.errors import require
from sparsedp.models.layers import WSConv2d, truncated_normal_

GROUPS = 16


class Block(nn.Module):
    """ReLU, norm, convolution, twice; the first block of a group has a 1x1 convolution as its skip."""

    def __init__(self, channels: int, width: int, stride: int, project: bool) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, channels)
        self.conv1 = WSConv2d(channels, width, 3, stride)
        self.norm2 = nn.GroupNorm(GROUPS, width)
        self.conv2 = WSConv2d(width, width, 3)
        self.skip_norm = nn.GroupNorm(GROUPS, channels) if project else None
        self.skip_conv = WSConv2d(channels, width, 1, stride) if project else None

    def forward(self, x: Tensor) -> Tensor:
        skip = x
        if self.skip_norm is not None and self.skip_conv is not None:
            skip = self.skip_conv(self.skip_norm(functional.relu(x)))
        out = self.conv1(self.norm1(functional.relu(x)))
        out = self.conv2(self.norm2(functional.relu(out)))
        return out + skip


class WideResNet(nn.Module):
    """WRN-`depth`-`width`: depth is 6n + 4, with n blocks in each of three groups.

    `stem_stride` 2 halves the side of the image at once: a quarter of the work, for small machines. The paper has 1.
    """

    def __init__(self, depth: int, width: int, classes: int, channels: int = 3, stem_stride: int = 1) -> None:
        super().__init__()
        require(
            depth >= 10 and (depth - 4) % 6 == 0, "the depth of a WRN", depth, "it must be 6n + 4 with n at least 1",
            "10, 16, 22, 28 and 40 are such",
        )  # fmt: skip
        require(width >= 1, "the width of a WRN", width, "it multiplies 16 channels, so it is at least 1", "4 and 10 are usual")
        require(stem_stride in (1, 2), "the stride of a WRN's stem", stem_stride, "it is 1 or 2", "1 is the paper's")
        self.stem = WSConv2d(channels, 16, 3, stem_stride)
        last = 16
        groups = []
        for wide, stride in ((16 * width, 1), (32 * width, 2), (64 * width, 2)):
            blocks = [Block(last, wide, stride, project=True)]
            blocks += [Block(wide, wide, 1, project=False) for _ in range((depth - 4) // 6 - 1)]
            groups.append(nn.Sequential(*blocks))
            last = wide
        self.groups = nn.Sequential(*groups)
        self.norm = nn.GroupNorm(GROUPS, last)
        self.classifier = nn.Linear(last, classes)
        truncated_normal_(self.classifier.weight, 1 / math.sqrt(last))
        nn.init.zeros_(self.classifier.bias)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(functional.relu(self.groups(self.stem(x))))
        return self.classifier(out.mean((2, 3)))
