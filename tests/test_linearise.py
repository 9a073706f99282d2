"""SynFlow on real architectures: the conservation law, no collapse, no overflow, an obvious oracle, and clear refusals."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from sparsedp.dp.masks import maskable_layers
from sparsedp.dp.masks import participating as parameters_of
from sparsedp.dp.pruning import synflow
from sparsedp.errors import UsageError
from sparsedp.linearise import Linearised
from sparsedp.models.cnn import SmallCNN
from sparsedp.models.layers import WSConv2d
from sparsedp.models.nf_resnet import Bottleneck
from sparsedp.models.wrn import WideResNet
from tests.made_up import Standardised

DOUBLE = torch.float64


class Everything(nn.Module):
    """Grouped, depthwise and standardised convolutions, every kind of activation call, joins, pooling, in-place sums."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.grouped = nn.Conv2d(8, 12, 1, groups=4)
        self.side = Standardised(8, 12, 1)
        self.spectral = parametrizations.spectral_norm(nn.Conv2d(24, 10, 3, stride=2, padding_mode="reflect", padding=1))
        self.position = nn.Parameter(torch.full((1, 10, 1, 1), -3.0))
        self.layer_scale = nn.Parameter(torch.full((10, 1, 1), -0.5))
        self.hidden = nn.Linear(20, 9)
        self.act = nn.PReLU()
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu_(self.norm(self.stem(x)) - 0.25)
        x = F.gelu(self.depthwise(x)).add_(x)
        x = torch.cat([self.grouped(x), torch.tanh(self.side(x))], dim=1)
        x = F.max_pool2d(F.pad(x, (1, 1, 1, 1), value=5.0), 2)
        x = self.spectral(x) * self.layer_scale + self.position
        left, right = x.chunk(2, dim=2)
        size = x.shape[0]
        x = torch.cat((left.mean((2, 3)), F.adaptive_avg_pool2d(right, 1).view(size, -1)), 1)
        return F.log_softmax(self.last(self.dropout(self.act(self.hidden(x)))), dim=1)


class Residual(nn.Module):
    """Two branches and an identity, which no single layer but the first and the last sees whole."""

    def __init__(self, width: int = 6, scale: float = 1.0) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, width, 3, padding=1)
        self.branch1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.branch2 = nn.Conv2d(width, width, 3, padding=1)
        self.last = nn.Linear(width, 3)
        with torch.no_grad():
            for p in self.parameters():
                p *= scale

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = x + self.branch2(F.relu(self.branch1(x)))
        return self.last(x.mean(dim=(-2, -1)))


def by_hand(weights: dict[str, Tensor]) -> Tensor:
    """R of `Residual`, written out."""
    x = F.conv2d(torch.ones(1, 2, 5, 5, dtype=DOUBLE), weights["first.weight"], padding=1)
    inner = F.conv2d(F.conv2d(x, weights["branch1.weight"], padding=1), weights["branch2.weight"], padding=1)
    return ((x + inner).mean((2, 3)) @ weights["last.weight"].T).sum()


def weights_of(model: nn.Module, granularity: str = "weight") -> dict[str, Tensor]:
    trained = parameters_of(model)
    return {la.name: trained[la.name].detach() for la in maskable_layers(model, granularity)}


def scores_of(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = DOUBLE) -> dict[str, Tensor]:
    layers = maskable_layers(model)
    return Linearised(model, layers, shape, dtype)({n: w.abs() for n, w in weights_of(model).items()})


def prune(
    model: nn.Module, shape: tuple[int, ...], rate: float, dtype: torch.dtype = DOUBLE, **kwargs: object
) -> dict[str, Tensor]:
    layers = maskable_layers(model)
    return synflow(layers, weights_of(model), Linearised(model, layers, shape, dtype), rate, **kwargs)  # type: ignore[arg-type]


def block() -> nn.Module:
    """A small NF-ResNet: its stem, two bottlenecks of the real kind, its head."""
    return nn.Sequential(
        WSConv2d(3, 8, 7, 2), nn.MaxPool2d(3, 2, 1), Bottleneck(8, 16, 1, 1.0), Bottleneck(16, 32, 2, 0.9),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5),
    )  # fmt: skip


# What every path crosses, alone or as a pair of a branch and its skip.
CUTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[tuple[str, ...], ...]]] = {
    "small_cnn": (
        lambda: SmallCNN((1, 14, 14), 10), (1, 14, 14),
        (("conv1.weight",), ("conv2.weight",), ("hidden.weight",), ("classifier.weight",)),
    ),
    "wrn": (
        lambda: WideResNet(10, 1, 7), (3, 12, 12),
        (
            ("stem.weight",), *(
                pair for g in range(3)
                for pair in (
                    (f"groups.{g}.0.conv1.weight", f"groups.{g}.0.skip_conv.weight"),
                    (f"groups.{g}.0.conv2.weight", f"groups.{g}.0.skip_conv.weight"),
                )
            ), ("classifier.weight",),
        ),
    ),
    "nf_resnet": (
        block, (3, 24, 24),
        (
            ("0.weight",), ("2.conv1.weight", "2.skip_conv.weight"), ("2.conv2.weight", "2.skip_conv.weight"),
            ("3.conv3.weight", "3.skip_conv.weight"), ("6.weight",),
        ),
    ),
    "everything": (
        Everything, (3, 10, 10),
        (("stem.weight",), ("spectral.parametrizations.weight.original",), ("hidden.weight",), ("last.weight",)),
    ),
    "residual": (Residual, (2, 5, 5), (("first.weight",), ("last.weight",))),
    "one dimension": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.AvgPool1d(2), nn.Flatten(), nn.Linear(12, 2)), (2, 8),
        (("0.weight",), ("4.weight",)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", (1.0, 1e7))
@pytest.mark.parametrize("dtype", (torch.float32, DOUBLE))
@pytest.mark.parametrize("name", CUTS)
def test_the_flow_is_conserved(name: str, dtype: torch.dtype, size: float) -> None:
    """`size` enlarges one branch of those that meet again, so that their exponents differ where they are added or joined."""
    make, shape, cuts = CUTS[name]
    torch.manual_seed(1)
    model = make()
    for parameter_name, parameter in model.named_parameters():
        if any(part in parameter_name for part in ("conv1", "branch1", "side")):
            parameter.data *= size
    scores = scores_of(model, shape, dtype)
    assert set(scores) == {la.name for la in maskable_layers(model)}
    sums = [sum(float(scores[n].double().sum()) for n in cut) for cut in cuts]
    assert min(sums) > 0
    assert max(sums) / min(sums) - 1 < (1e-4 if dtype is torch.float32 else 1e-11)


@pytest.mark.parametrize("size", (1.0, 1e-9, 1e9))
def test_every_layer_of_a_residual_block_is_scored_on_one_scale(size: float) -> None:
    """Also where a branch is far larger or smaller than its skip, so that their exponents differ."""
    torch.manual_seed(2)
    model = Residual().double()
    model.branch1.weight.data *= size
    leaves = {n: w.abs().requires_grad_() for n, w in weights_of(model).items()}
    expected = dict(zip(leaves, torch.autograd.grad(by_hand(leaves), list(leaves.values())), strict=True))
    found = scores_of(model, (2, 5, 5))
    expected = {n: (leaf * expected[n]).detach() for n, leaf in leaves.items()}
    scale = float(found["last.weight"].sum() / expected["last.weight"].sum())
    for name in leaves:
        assert torch.allclose(found[name], scale * expected[name], rtol=1e-10)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.large, self.small = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        self.large.weight.data *= 1e8

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = torch.relu(self.stem(x))
        return {"large": self.large(x), "small": self.small(x)}


def test_all_outputs_of_a_model_count_on_one_scale() -> None:
    torch.manual_seed(4)
    model = TwoHeads().double()
    scores, w = scores_of(model, (3,)), weights_of(model)
    flow = w["stem.weight"].abs().sum(1)
    for name in ("large.weight", "small.weight"):
        ratio = scores[name] / (w[name].abs() * flow)
        assert torch.allclose(ratio, (scores["large.weight"][0, 0] / (w["large.weight"][0, 0].abs() * flow[0])).expand(2, 4))


class Joined(TwoHeads):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(list(super().forward(x).values()), dim=1)


def test_joined_branches_count_on_one_scale() -> None:
    torch.manual_seed(4)
    model = Joined().double()
    scores = scores_of(model, (3,))
    torch.manual_seed(4)
    apart = scores_of(TwoHeads().double(), (3,))
    scale = scores["stem.weight"].sum() / apart["stem.weight"].sum()
    assert all(torch.allclose(scores[n], scale * apart[n], rtol=1e-10) for n in scores)


@pytest.mark.parametrize("rate", (0.5, 0.9, 0.97))
def test_the_mask_equals_a_slow_oracle_of_a_hundred_rounds(rate: float) -> None:
    torch.manual_seed(3)
    model = Residual().double()
    weights = {n: w.abs().clone() for n, w in weights_of(model).items()}
    alive = {n: torch.ones_like(w, dtype=torch.bool) for n, w in weights.items()}
    total = sum(w.numel() for w in weights.values())
    for k in range(1, 101):
        leaves = {n: (w * alive[n]).requires_grad_() for n, w in weights.items()}
        gradients = torch.autograd.grad(by_hand(leaves), list(leaves.values()))
        ranked = sorted(
            (-float(leaf.detach().flatten()[i] * g.flatten()[i]), n, i)
            for (n, leaf), g in zip(leaves.items(), gradients, strict=True)
            for i in alive[n].flatten().nonzero().squeeze(1).tolist()
        )
        keep = ranked[: total - math.floor((1 - (1 - rate) ** (k / 100)) * total + 0.5)]
        alive = {n: torch.zeros_like(a) for n, a in alive.items()}
        for _, n, i in keep:
            alive[n].view(-1)[i] = True
    found = prune(model, (2, 5, 5), rate, floor=False)
    assert all(torch.equal(found[n], alive[n]) for n in alive)


@pytest.mark.parametrize("scale", (1e-20, 1e20))
def test_no_overflow_or_underflow_changes_the_mask(scale: float) -> None:
    torch.manual_seed(4)
    usual, odd = (nn.Sequential(*[nn.Linear(9, 9, bias=False) for _ in range(40)]) for _ in range(2))
    odd.load_state_dict({n: w * scale for n, w in usual.state_dict().items()})
    one, other = (prune(model, (9,), 0.8, torch.float32, rounds=20) for model in (usual, odd))
    exact = prune(usual, (9,), 0.8, DOUBLE, rounds=20)
    agreed = [float((m[n] == exact[n]).double().mean()) for m in (one, other) for n in exact]
    assert min(agreed) > 0.9 and sum(agreed) / len(agreed) > 0.999
    for layer in odd:
        assert float(F.linear(torch.ones(9), layer.weight.detach().abs()).pow(40).max()) in (
            0.0,
            math.inf,
        )  # what float32 would do


def test_no_layer_empties_before_the_network_does() -> None:
    """On the ranking, before any floor, down to two weights a layer; one-shot ranking does empty layers.

    Guarantee: no layer empties before the whole network does, except by rounding; `floor` then gives one back.
    """
    torch.manual_seed(5)
    model = nn.Sequential(*[m for w in (40, 12, 60, 8, 50) for m in (nn.LazyLinear(w), nn.ReLU())], nn.LazyLinear(5))
    model(torch.ones(1, 30))
    total = sum(w.numel() for w in weights_of(model).values())
    rate = 1 - 12 / total
    patient = prune(model, (30,), rate, floor=False)
    hasty = prune(model, (30,), rate, floor=False, rounds=1)
    assert min(int(mask.sum()) for mask in patient.values()) >= 1
    assert min(int(mask.sum()) for mask in hasty.values()) == 0
    repaired = prune(model, (30,), rate, rounds=1)
    assert min(int(mask.sum()) for mask in repaired.values()) == 1
    assert sum(int(mask.sum()) for mask in repaired.values()) == 12


def test_activations_norms_and_biases_do_not_matter() -> None:
    torch.manual_seed(6)
    convolution, linear = nn.Conv2d(2, 4, 3), nn.Linear(16, 3)
    bare = nn.Sequential(convolution, nn.Identity(), nn.Identity(), nn.AvgPool2d(3), nn.Flatten(), linear)
    dressed = copy.deepcopy(nn.Sequential(convolution, nn.GroupNorm(2, 4), nn.SiLU(), nn.AvgPool2d(3), nn.Flatten(), linear))
    dressed[0].bias.data.fill_(-100.0)
    dressed[1].weight.data.fill_(7.0)
    one, other = scores_of(bare, (2, 8, 8)), scores_of(dressed, (2, 8, 8))
    assert all(torch.equal(one[n], other[n]) for n in one)


def test_a_standardised_layer_flows_by_its_raw_weight() -> None:
    torch.manual_seed(7)
    for kind in (
        WSConv2d(3, 4, 3),
        Standardised(3, 4, 3, padding=1),
        parametrizations.spectral_norm(nn.Conv2d(3, 4, 3, padding=1)),
    ):
        plain = nn.Conv2d(3, 4, 3, padding=1)
        plain.weight.data = next(w for w in weights_of(kind).values()).clone()
        one, other = scores_of(nn.Sequential(kind), (3, 6, 6)), scores_of(nn.Sequential(plain), (3, 6, 6))
        assert torch.equal(next(iter(one.values())), next(iter(other.values())))


def test_the_model_is_left_as_it_was() -> None:
    torch.manual_seed(8)
    model = Everything().train()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    prune(model, (3, 10, 10), 0.5, rounds=3)
    assert model.training and all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules() if type(m) is not nn.Conv2d)


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x.mean((2, 3), keepdim=True))


class Lambda(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize(
    ("middle", "words"),
    (
        (Gate(), r"module 1 \(Gate\).*of two activations"),
        (Lambda(lambda x: x @ x.transpose(-1, -2)), r"module 1 \(Lambda\).*matmul.*of two activations"),
        (Lambda(torch.exp), r"module 1 \(Lambda\): it uses exp"),
        (Lambda(lambda x: x.detach()), r"module 1 \(Lambda\): it uses detach"),
        (Lambda(lambda x: 1 / x), r"module 1 \(Lambda\)"),
        (nn.Sequential(nn.Identity(), Lambda(torch.fft.fft2)), r"module 1\.1 \(Lambda\).*fft"),
        (Lambda(lambda x: F.conv2d(torch.ones(1, 2, 8, 8), x)), r"module 1 \(Lambda\).*where the weight belongs"),
        (nn.Sequential(nn.Flatten(2), nn.LSTM(36, 36)), r"module 1\.1 \(LSTM\)"),
    ),
)
def test_what_cannot_be_linearised_is_refused_by_module(middle: nn.Module, words: str) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), middle, nn.Flatten(), nn.Linear(144, 2))
    with pytest.raises(UsageError, match=words):
        scores_of(model, (2, 8, 8))


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.auxiliary = nn.Linear(8, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.flatten(1))


def test_a_weight_that_no_path_crosses_is_named() -> None:
    with pytest.raises(UsageError, match=r"cannot score auxiliary\.weight"):
        scores_of(Idle(), (2, 2, 2))


def test_weights_that_are_not_finite_are_named() -> None:
    model = Residual()
    model.branch1.weight.data[0, 0, 0, 0] = math.nan
    with pytest.raises(UsageError, match="branch1"):
        scores_of(model, (2, 5, 5))


@pytest.mark.parametrize("granularity", ("weight", "filter"))
def test_wide_residual_networks_are_pruned_to_the_count(granularity: str) -> None:
    torch.manual_seed(9)
    model = WideResNet(10, 1, 10)
    layers = maskable_layers(model, granularity)
    masks = synflow(layers, weights_of(model), Linearised(model, layers, (3, 8, 8)), 0.9)
    for by_filter in (True, False):
        sizes = [masks[la.name].numel() for la in layers if la.by_filter == by_filter]
        left = [int(masks[la.name].sum()) for la in layers if la.by_filter == by_filter]
        assert sum(left) == sum(sizes) - math.floor(0.9 * sum(sizes) + 0.5)
        assert not left or min(left) >= 1
