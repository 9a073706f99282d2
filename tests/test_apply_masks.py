"""`keep` and `zero`: what is pruned stays out of the function through training, averaging, saving and loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sparsedp.apply_masks import prepare_for
from sparsedp.config import Sparsity
from sparsedp.dp.clipping import Rows, reference
from sparsedp.dp.masks import expand, maskable_layers, participating
from sparsedp.dp.mechanism import Settings, private_step
from sparsedp.errors import UsageError
from sparsedp.models.layers import WSConv2d
from sparsedp.pruning import prune
from tests.made_up import KEY, Standardised, cross_entropy


class Standardise(nn.Module):
    """Weight standardisation as a parametrisation: a zero before it is not one after it."""

    def forward(self, weight: Tensor) -> Tensor:
        axes = tuple(range(1, weight.ndim))
        return (weight - weight.mean(axes, keepdim=True)) / (weight.std(axes, keepdim=True) + 1e-3)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(
        WSConv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.Tanh(), nn.Conv2d(8, 6, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Linear(6, 3),
    ).eval()  # fmt: skip
    parametrize.register_parametrization(model[4], "weight", Standardise())
    return model


def effective(module: nn.Module) -> Tensor:
    return module.effective_weight() if isinstance(module, WSConv2d) else module.weight


def pruned_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {
        la.name: model.get_submodule(la.name.split(".")[0]) for la in maskable_layers(model)
    }  # this network is a flat sequence


def assert_out(model: nn.Module, masks: Any) -> None:
    for name, module in pruned_layers(model).items():
        weight = effective(module)
        gone = ~expand(masks[name], weight.shape).expand_as(weight)
        assert int(gone.sum()) > 0 and torch.equal(weight[gone], torch.zeros(int(gone.sum())))


def masks_of(model: nn.Module, granularity: Any) -> Any:
    return prune(model, Sparsity(prune="random", prune_rate=0.5, granularity=granularity), KEY).masks


def train(model: nn.Module, masks: Any, steps: int = 3) -> AveragedModel:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(12, 2, 8, 8, generator=generator), torch.arange(12) % 3
    settings = Settings(
        num_units=12, batch_size=6, noise_multiplier=1.0, clip=1.0, layers=maskable_layers(model), drop="random", drop_rate=0.3,
        pruned=masks,
    )  # fmt: skip
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for step in range(steps):
        done = private_step(
            settings, model, cross_entropy, lambda units: [Rows.make(x[units], y[units])] if len(units) else [], reference, KEY,
            step, lambda what, event: None,
        )  # fmt: skip
        for name, parameter in participating(model).items():
            parameter.grad = done.gradient.tensors[name].to(parameter.dtype)
        optimiser.step()
        average.update_parameters(model)
    return average


@pytest.mark.parametrize("granularity", ("weight", "filter"))
def test_zero_means_zero_through_training_averaging_saving_and_loading(granularity: Any, tmp_path: Path) -> None:
    model = network()
    masks = masks_of(model, granularity)
    prepare_for(model, masks, "zero")
    assert_out(model, masks)
    before = [effective(m).detach().clone() for m in pruned_layers(model).values()]
    average = train(model, masks)
    assert_out(model, masks)
    assert_out(average.module, masks)
    moved = [float((effective(m).detach() - b).abs().max()) for m, b in zip(pruned_layers(model).values(), before, strict=True)]
    assert min(moved) > 1e-3  # what was left has trained
    save_file({n: t.contiguous() for n, t in average.module.state_dict().items()}, tmp_path / "model.safetensors")
    fresh = prepare_for(network(seed=1), masks, "zero")
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert_out(fresh, masks)
    x = torch.randn(4, 2, 8, 8)
    assert torch.equal(fresh.eval()(x), average.module.eval()(x))


@pytest.mark.parametrize("granularity", ("weight", "filter"))
def test_keep_leaves_the_function_alone_and_the_pruned_weights_where_they_were(granularity: Any) -> None:
    model, x = network(), torch.randn(4, 2, 8, 8)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    out = model(x)
    masks = masks_of(model, granularity)
    assert torch.equal(prepare_for(model, masks, "keep")(x), out) and set(model.state_dict()) == set(before)
    train(model, masks)
    for name, mask in masks.items():
        weight = participating(model)[name].detach()
        stays = expand(mask, weight.shape).expand_as(weight)
        assert torch.equal(weight[~stays], before[name][~stays])
        assert not torch.equal(weight[stays], before[name][stays])


def test_standardisation_takes_its_statistics_from_the_weights_that_are_left() -> None:
    torch.manual_seed(4)
    layer = WSConv2d(3, 5, 3)
    masks = {"0.weight": torch.rand(5, 3, 3, 3) > 0.6}
    prepare_for(nn.Sequential(layer), masks, "zero")
    for filter_, mask in zip(layer.effective_weight(), masks["0.weight"], strict=True):
        left = filter_[mask]
        assert torch.allclose(left.mean(), torch.zeros(()), atol=1e-6) and torch.allclose(
            left.norm(), torch.ones(()), atol=1e-5
        )


def test_tied_layers_are_both_zeroed() -> None:
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    two.weight = one.weight
    model = nn.Sequential(one, two)
    prepare_for(model, {"0.weight": torch.eye(4, dtype=torch.bool)}, "zero")
    assert int((two.weight != 0).sum()) == 4


def test_a_layer_that_makes_its_own_weight_is_refused_by_name_and_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), Standardised(3, 3, 3))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    masks = masks_of(model, "weight")
    with pytest.raises(UsageError, match=r"1\.weight.*Standardised.*use 'keep'"):
        prepare_for(model, masks, "zero")
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    prepare_for(model, masks, "keep")


def test_masks_that_do_not_fit_are_refused_by_name() -> None:
    model = network()
    with pytest.raises(UsageError, match="'elsewhere'"):
        prepare_for(model, {"elsewhere": torch.ones(3, dtype=torch.bool)}, "keep")
    with pytest.raises(UsageError, match=r"0\.weight.*\(8, 2, 3, 3\) or \(8,\)"):
        prepare_for(model, {"0.weight": torch.ones(2, 8, 3, 3, dtype=torch.bool)}, "zero")
    with pytest.raises(UsageError, match="'nought'"):
        prepare_for(model, {}, "nought")


def test_the_effective_weight_is_what_the_layer_uses() -> None:
    """The oracle of this file: a pruned channel's output is its bias."""
    model = network()
    prepare_for(model, {"0.weight": torch.arange(8) > 0, "2.weight": torch.arange(8) > 0}, "zero")
    x = torch.randn(2, 2, 8, 8)
    first = model[0](x)
    assert torch.equal(first[:, 0], model[0].bias[0].expand_as(first[:, 0]))
    second = model[2](F.relu(first))
    assert torch.allclose(second[:, 0], model[2].bias[0].expand_as(second[:, 0]))
