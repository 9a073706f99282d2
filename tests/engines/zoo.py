"""Small models of every kind that an engine must get right, and the inputs that they take."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization

from sparsedp.models.layers import WSConv2d

CLASSES = 5


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


class Tied(nn.Module):
    """One weight in two layers, one of them called twice; another layer is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(192, 12)
        self.twice, self.again = nn.Linear(12, 12), nn.Linear(12, 12, bias=False)
        self.again.weight = self.twice.weight
        self.last, self.unused = nn.Linear(12, CLASSES), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.again(self.twice(torch.tanh(self.twice(self.first(x.flatten(1))))))))


class Bare(nn.Module):
    """Parameters without a layer, and a weight built from two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 192) / 8)
        self.offset, self.scale = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(()))
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sin(F.linear(x.flatten(1), self.left @ self.right) * self.scale + self.offset))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.randn(1, 1, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        return self.last(self.block(torch.cat([self.token.expand(len(x), -1, -1), tokens], 1))[:, 0])


class PositionsFirst(nn.Module):
    """The rows are the second dimension of what the linear layer sees."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm, self.last = nn.Linear(48, 6), nn.LayerNorm(6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.mix(x.reshape(len(x), 4, 48).transpose(0, 1))).mean(0))


class Windows(nn.Module):
    """Several entries per row in the leading dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.local, self.norm, self.last = nn.Linear(48, 6), nn.LayerNorm(6), nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.local(x.reshape(4 * len(x), 48))).reshape(len(x), 24))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(20, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.embed((x[:, :, 0, 0].abs() * 4).long().clamp_max(19))).mean(1))


class Several(nn.Module):
    """Returns a dict, for a loss of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(192, 7), nn.Linear(7, CLASSES), nn.Linear(7, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = F.gelu(self.body(x.flatten(1)))
        return {"classes": self.one(features), "size": self.two(features)}


class Double(nn.Module):
    """A parametrisation: half of the original."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def standardised() -> nn.Module:
    """Weight standardisation with every kind of filter: ordinary, floored, without gain, pruned by entries."""
    model = nn.Sequential(
        WSConv2d(3, 8, 3, 2), nn.GroupNorm(2, 8), nn.ReLU(), WSConv2d(8, 6, 1), nn.ReLU(), WSConv2d(6, 6, 3, groups=2), nn.Flatten(),
        nn.Linear(96, CLASSES),
    )  # fmt: skip
    with torch.no_grad():
        model[0].weight[0] *= 1e-4
        model[3].gain[1] = 0
        for layer in (model[0], model[3], model[5]):
            layer.bias.normal_()
    model[5].prune(torch.rand(model[5].weight.shape) < 0.7)
    return model


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, CLASSES))
    model[0].weight.requires_grad_(False)
    model[3].bias.requires_grad_(False)
    return model


def parametrised() -> nn.Module:
    model = nn.Sequential(weight_norm(nn.Conv2d(3, 4, 3)), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, CLASSES))
    register_parametrization(model[3], "weight", Double())
    return model


def with_body(*layers: nn.Module, features: int) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, CLASSES))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": lambda: with_body(
        nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect"), nn.ReLU(inplace=True), nn.Conv2d(6, 4, 3, stride=2, dilation=2, groups=2),
        nn.GELU(), nn.Conv2d(4, 8, 2, padding="same"), features=32,
    ),
    "one and three dimensions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.Conv3d(1, 4, (2, 3, 3), padding=(0, 1, 1)), nn.Flatten(2), nn.Conv1d(4, 3, 5, 4, padding=2),
        nn.Flatten(), nn.Linear(96, CLASSES),
    ),
    "norms": lambda: with_body(
        nn.Conv2d(3, 6, 3), nn.GroupNorm(3, 6), nn.ReLU(), nn.InstanceNorm2d(6, affine=True), nn.LayerNorm([6, 6, 6]), nn.RMSNorm(6),
        features=216,
    ),
    "standardised": standardised,
    "parametrised": parametrised,
    "frozen": frozen,
    "tied": Tied,
    "bare": Bare,
    "attention": Attention,
    "positions first": PositionsFirst,
    "windows": Windows,
    "words": Words,
}  # fmt: skip
