"""Two small convolutional networks: with tempered sigmoids (Papernot et al. 2020), and with normalisation, which does better."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparsedp.errors import require
from sparsedp.models.layers import SameConv2d, WSConv2d

SMALLEST = 13  # pixels; below this, the second pooling has nothing to pool


class TemperedSigmoid(nn.Module):
    """scale * sigmoid(temperature * x) - offset: a bounded activation, which keeps gradients from being clipped much.

    The default is tanh. (Computed by tanh always: sigmoid(x) = (1 + tanh(x / 2)) / 2.)
    """

    def __init__(self, scale: float = 2.0, temperature: float = 2.0, offset: float = 1.0) -> None:
        super().__init__()
        self.scale, self.temperature, self.offset = scale, temperature, offset

    def forward(self, x: Tensor) -> Tensor:
        if (self.scale, self.temperature, self.offset) == (2.0, 2.0, 1.0):
            return torch.tanh(x)
        return torch.tanh(x * (self.temperature / 2)) * (self.scale / 2) + (self.scale / 2 - self.offset)

    def extra_repr(self) -> str:
        return f"scale={self.scale}, temperature={self.temperature}, offset={self.offset}"


class SmallCNN(nn.Module):
    """Two convolutions, each with pooling, and two linear layers: 26,010 parameters for MNIST."""

    def __init__(
        self, shape: tuple[int, int, int], classes: int, scale: float = 2.0, temperature: float = 2.0, offset: float = 1.0
    ) -> None:
        super().__init__()
        channels, *sides = shape
        require(
            min(sides) >= SMALLEST, "the image size", tuple(sides), f"small_cnn needs at least {SMALLEST} pixels a side",
            "resize the images, or take a wrn",
        )  # fmt: skip
        self.conv1 = SameConv2d(channels, 16, 8, stride=2)
        self.conv2 = nn.Conv2d(16, 32, 4, stride=2)
        self.pool = nn.MaxPool2d(2, stride=1)
        height, width = (_positions(side) for side in sides)
        self.hidden = nn.Linear(32 * height * width, 32)
        self.classifier = nn.Linear(32, classes)
        self.activation = TemperedSigmoid(scale, temperature, offset)

    def forward(self, x: Tensor) -> Tensor:
        out = self.pool(self.activation(self.conv1(x)))
        out = self.pool(self.activation(self.conv2(out)))
        return self.classifier(self.activation(self.hidden(out.flatten(1))))


class NormCNN(nn.Module):
    """Two weight-standardised convolutions with GroupNorm, ReLU and pooling, and a linear layer: 20,634 parameters for MNIST.

    The demo's model. The classifier starts near zero, so that the first steps are not spent on undoing a guess.
    """

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        channels, *sides = shape
        require(
            min(sides) >= 4, "the image size", tuple(sides), "norm_cnn halves it twice", "resize the images to 4 pixels or more"
        )
        self.conv1 = WSConv2d(channels, 16, 3)
        self.norm1 = nn.GroupNorm(4, 16)
        self.conv2 = WSConv2d(16, 32, 3)
        self.norm2 = nn.GroupNorm(4, 32)
        self.pool = nn.MaxPool2d(2)
        self.classifier = nn.Linear(32 * (sides[0] // 4) * (sides[1] // 4), classes)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, x: Tensor) -> Tensor:
        out = self.pool(torch.relu(self.norm1(self.conv1(x))))
        out = self.pool(torch.relu(self.norm2(self.conv2(out))))
        return self.classifier(out.flatten(1))


def _positions(side: int) -> int:
    """Rows (or columns) that are left before the linear layers."""
    pooled = -(-side // 2) - 1
    return (pooled - 4) // 2 + 1 - 1
