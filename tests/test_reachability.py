"""Paths that are left: exact on networks small enough to see, and what each criterion leaves at high rates."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sparsedp.config import Sparsity
from sparsedp.pruning import prune
from sparsedp.reachability import unreachable_units
from tests.made_up import KEY


def mask(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.bool)


def test_a_unit_is_reached_if_a_path_of_unpruned_weights_leads_to_it() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4))
    masks = {
        "0.weight": mask([[1, 0], [0, 0], [1, 1]]),
        "2.weight": mask([[1, 0, 0], [0, 1, 0], [0, 1, 1], [0, 0, 0]]),
    }
    found = unreachable_units(model, masks, (2,))
    assert found.by_layer == pytest.approx({"0.weight": 1 / 3, "2.weight": 0.5})
    assert found.outputs == 0.5 and found.units == pytest.approx(3 / 7)
    assert unreachable_units(model, {n: torch.ones_like(m) for n, m in masks.items()}, (2,)).units == 0.0


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.last = nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 3, padding=1), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return self.last((x + self.branch(x)).mean((2, 3)))


def test_a_residual_connection_is_a_path_and_channels_can_be_masked_whole() -> None:
    masks = {"first.weight": mask([[1, 0]])[0], "branch.weight": mask([[0, 0]])[0], "last.weight": mask([[1, 0], [0, 1]])}
    found = unreachable_units(Skip(), masks, (1, 4, 4))
    assert found.by_layer == {"first.weight": 0.5, "branch.weight": 1.0, "last.weight": 0.5} and found.outputs == 0.5


def test_a_path_of_one_weight_each_is_seen_through_a_hundred_layers() -> None:
    model = nn.Sequential(*[nn.Linear(30, 30, bias=False) for _ in range(100)])
    masks = {f"{i}.weight": torch.ones(30, 30, dtype=torch.bool) for i in range(100)}
    masks["0.weight"] = torch.zeros(30, 30, dtype=torch.bool)
    assert unreachable_units(model, masks, (30,)).outputs == 1.0
    masks["0.weight"][7, 3] = True
    assert unreachable_units(model, masks, (30,)).outputs == 0.0


def test_synflow_keeps_paths_that_random_pruning_cuts() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 16, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 16, 24), nn.ReLU(), nn.Linear(24, 10),
    )  # fmt: skip
    cut = {
        name: unreachable_units(
            model, prune(model, Sparsity(prune=name, prune_rate=0.99), KEY, input_shape=(1, 14, 14)).masks, (1, 14, 14)
        ).outputs
        for name in ("random", "synflow")
    }
    assert cut["random"] == 1.0
    assert cut["synflow"] < 0.5
