"""Plain SGD once more, sharing no code with sparsedp: a wide residual network and its loop, written down as shortly as may be.

It is here so that a shipped model that was slow could not flatter the engines that are compared with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.workers.serve import Took

Data = tuple[Tensor, Tensor]


class Conv(nn.Conv2d):
    """A weight-standardised convolution."""

    def __init__(self, before: int, after: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__(before, after, kernel, stride)
        self.gain = nn.Parameter(torch.ones(after, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), correction=0, keepdim=True)
        scale = self.gain * (variance * self.weight[0].numel()).clamp_min(1e-4).rsqrt()
        if self.stride[0] == 2 and self.kernel_size[0] == 3:  # as TensorFlow pads an even side
            return F.conv2d(F.pad(x, (0, 1, 0, 1)), (self.weight - mean) * scale, self.bias, 2)
        return F.conv2d(x, (self.weight - mean) * scale, self.bias, self.stride, self.kernel_size[0] // 2)


class Block(nn.Module):
    """Two convolutions beside a skip, which is a convolution where `project` says so."""

    def __init__(self, before: int, after: int, stride: int, project: bool) -> None:
        super().__init__()
        self.first, self.second = Conv(before, after, 3, stride), Conv(after, after)
        self.norms = nn.ModuleList([nn.GroupNorm(16, before), nn.GroupNorm(16, after)])
        self.skip = (
            nn.Sequential(nn.ReLU(), nn.GroupNorm(16, before), Conv(before, after, 1, stride)) if project else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.skip(x) + self.second(self.norms[1](F.relu(self.first(self.norms[0](F.relu(x))))))


def network(depth: int, width: int, channels: int, classes: int) -> nn.Module:
    """WRN-depth-width."""
    layers: list[nn.Module] = [Conv(channels, 16)]
    last = 16
    for group, wide in enumerate((16 * width, 32 * width, 64 * width)):
        for block in range((depth - 4) // 6):
            layers.append(Block(last, wide, 2 if block == 0 and group else 1, project=block == 0))
            last = wide
    return nn.Sequential(
        *layers, nn.ReLU(), nn.GroupNorm(16, last), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, classes)
    )


def load(spec: dict[str, Any]) -> Data:
    rows = spec["batch"] * spec["views"]
    images = torch.randn(rows, *spec["shape"]).to(spec["device"], memory_format=torch.channels_last)
    return images, torch.randint(0, 10, (rows,)).to(spec["device"])


def build(spec: dict[str, Any], data: Data) -> Callable[[], Took]:
    depth, width = (int(n) for n in spec["model"].removeprefix("wrn_").split("_"))
    model = network(depth, width, spec["shape"][0], 10).to(spec["device"], memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> Took:
        optimizer.zero_grad()
        F.cross_entropy(model(data[0]), data[1]).backward()
        optimizer.step()
        if spec["device"].startswith("cuda"):
            torch.cuda.synchronize()
        return Took(len(data[0]))

    return step


def device_memory(spec: dict[str, Any]) -> int | None:
    return torch.cuda.max_memory_allocated() if spec["device"].startswith("cuda") else None
