"""A pruning criterion of one's own is a function: (model, layers) -> scores. The highest stay, ranked over all layers."""

import torch
from torch import nn

from sparsedp import keys
from sparsedp.apply_masks import prepare_for
from sparsedp.config import Sparsity
from sparsedp.pruning import prune

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 5), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.Tanh(), nn.Flatten(), nn.Linear(2048, 10)
)  # fmt: skip


def layer_adaptive_magnitude(model, layers):
    """|w|^2 over the sum of all squares in its layer that are at least as large (Lee et al. 2021). It reads no data, so it is free."""
    scores = {}
    for layer in layers:
        squares = model.get_parameter(layer.name).detach().double().pow(2).flatten()
        ranked, order = squares.sort()
        share = ranked / ranked.flip(0).cumsum(0).flip(0)
        scores[layer.name] = torch.empty_like(squares).scatter_(0, order, share).reshape(layer.shape)
    return scores


pruned = prune(model, Sparsity(prune="random", prune_rate=0.9), keys.fresh(), scoring=layer_adaptive_magnitude)
prepare_for(model, pruned.masks, "zero")  # or "keep": leave the pruned weights where they are, and never train them
print(pruned.report.text())
