"""Connection gradients: theta * dL/dtheta by weight, gain * dL/dgain by channel, and nothing else trained."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from sparsedp.connectivity import Connected
from sparsedp.dp.clipping import Engine, Rows, reference
from sparsedp.dp.masks import maskable_layers, participating
from sparsedp.engines.functional import functional
from sparsedp.errors import UsageError
from sparsedp.models.layers import WSConv2d
from tests.made_up import Standardised, cross_entropy


class Net(nn.Module):
    """Standardised, grouped, spectrally normalised and plain layers, one of them used twice, dropout and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.ws = WSConv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.own = Standardised(4, 6, 3, groups=1)
        self.spectral = parametrizations.spectral_norm(nn.Conv2d(6, 6, 3, padding=1, groups=2, bias=False))
        self.twice = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(6, 3)
        nn.init.uniform_(self.ws.gain, 0.5, 2.0)
        nn.init.uniform_(self.own.gain, 0.5, 2.0)
        nn.init.normal_(self.ws.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.spectral(F.relu(self.own(F.relu(self.norm(self.ws(x)))))).mean((2, 3)))
        return self.last(self.dropout(self.twice(torch.tanh(self.twice(x)))))


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, 3, 7, 7, dtype=torch.float64, generator=generator), torch.tensor([0, 1, 2, 1, 0])


def connection_gradients(net: nn.Module, granularity: str, engine: Engine = reference, clip: float = 1e9) -> dict[str, Tensor]:
    connected = Connected(net, maskable_layers(net, granularity))
    return connected.by_layer(engine(connected, cross_entropy, Rows.make(*batch()), {}, clip))


def plain_gradients(net: nn.Module) -> dict[str, Tensor]:
    net.eval()
    trained = participating(net)
    x, y = batch()
    found = torch.autograd.grad(cross_entropy(net(x), y).sum(), list(trained.values()))
    net.train()
    return {n: p.detach() * g for (n, p), g in zip(trained.items(), found, strict=True)}


def test_by_weight_it_is_theta_times_the_gradient(net: nn.Module) -> None:
    expected = plain_gradients(net)
    for name, found in connection_gradients(net, "weight").items():
        assert float(expected[name].abs().max()) > 1e-5
        assert torch.allclose(found, expected[name], rtol=1e-9, atol=1e-15)


def test_by_channel_under_standardisation_it_is_gain_times_the_gradient_by_gain(net: nn.Module) -> None:
    expected, found = plain_gradients(net), connection_gradients(net, "filter")
    for layer in ("ws", "own"):
        assert torch.allclose(found[f"{layer}.weight"], expected[f"{layer}.gain"], rtol=1e-9)
        signed_sum = expected[f"{layer}.weight"].flatten(1).sum(1)  # what a c on the raw filter would have: next to nothing
        assert float(signed_sum.abs().max()) < 0.02 * float(found[f"{layer}.weight"].abs().max())


def test_by_channel_of_a_plain_layer_it_is_the_sum_over_the_filter(net: nn.Module) -> None:
    expected, found = plain_gradients(net), connection_gradients(net, "filter")
    assert torch.allclose(found["twice.weight"], expected["twice.weight"].sum(1), rtol=1e-9)
    assert torch.allclose(found["last.weight"], expected["last.weight"], rtol=1e-9)  # masked by weight always
    assert {n: tuple(t.shape) for n, t in found.items()} == {
        "ws.weight": (4,), "own.weight": (6,), "spectral.parametrizations.weight.original": (6,), "twice.weight": (6,),
        "last.weight": (3, 6),
    }  # fmt: skip


@pytest.mark.parametrize("granularity", ("weight", "filter"))
def test_a_connectivity_variable_does_what_it_says(net: nn.Module, granularity: str) -> None:
    """c = 0.7 on one channel equals a filter of 0.7 times the size, by a finite change rather than a derivative."""
    connected = Connected(net, maskable_layers(net, granularity))
    x, _ = batch()
    net.eval()
    assert torch.allclose(connected(x), net(x), rtol=1e-12)
    with torch.no_grad():
        connected.connections[0][2] = 0.7
        (net.ws.weight if granularity == "weight" else net.ws.gain)[2] *= 0.7
    assert torch.allclose(connected(x), net(x), rtol=1e-10)


@pytest.mark.parametrize("granularity", ("weight", "filter"))
def test_the_vectorised_engine_serves_it(net: nn.Module, granularity: str) -> None:
    one = connection_gradients(net, granularity, clip=0.05)
    other = connection_gradients(net, granularity, functional, clip=0.05)
    assert all(torch.allclose(one[n], other[n], rtol=1e-9, atol=1e-14) for n in one)


def test_only_connectivity_variables_train_and_the_model_is_left_alone(net: nn.Module) -> None:
    net.last.bias.requires_grad_(False)
    before = {n: t.clone() for n, t in net.state_dict().items()}
    layers = maskable_layers(net)
    connected = Connected(net, layers)
    assert list(participating(connected)) == [f"connections.{i}" for i in range(len(layers))]
    reference(connected, cross_entropy, Rows.make(*batch()), {}, 1.0)
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items())
    assert [n for n, p in net.named_parameters() if not p.requires_grad] == ["last.bias"] and net.training


def test_examples_never_see_each_other(net: nn.Module) -> None:
    connected = Connected(net, maskable_layers(net))
    connected.train()  # an engine or a user may ask; BatchNorm's batch statistics and dropout stay off
    x, _ = batch()
    alone = torch.cat([connected(row[None]) for row in x])
    assert torch.allclose(connected(x), alone, rtol=1e-10)


class Uncalled(nn.Module):
    """Attention, whose last layer is never called, and a layer whose weight is used in passing. The head starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(5, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.passing, self.unused, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.attention(x, x, x)[0]
        return self.head(F.linear(x, self.passing.weight, self.passing.bias).relu().mean(1))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.first(x)).mean(1))


LIKE = Rows.make(torch.zeros(2, 7, 5), torch.full((2,), 2))


@pytest.mark.parametrize(
    ("model", "blind"),
    [(Uncalled(), ["attention.out_proj.weight", "passing.weight"]), (Encoder(), ["layer.self_attn.out_proj.weight"])],
)
def test_weights_that_are_used_without_their_layer_are_named(model: nn.Module, blind: list[str]) -> None:
    layers = maskable_layers(model, "filter")
    connected = Connected(model, layers)
    before = {n: t.clone() for n, t in connected.state_dict().items()}
    with pytest.raises(UsageError, match="granularity 'weight', or leave it out with maskable") as caught:
        connected.check(cross_entropy, LIKE)
    assert f"score {', '.join(blind)} by filter" in str(caught.value)
    assert all(torch.equal(t, before[n]) for n, t in connected.state_dict().items())
    assert list(participating(connected)) == [f"connections.{i}" for i in range(len(layers))]
    Connected(model, [la for la in layers if la.name not in blind]).check(cross_entropy, LIKE)
    Connected(model, maskable_layers(model, "weight")).check(cross_entropy, LIKE)


def test_what_its_layer_computes_passes(net: nn.Module) -> None:
    x, y = batch()
    Connected(net, maskable_layers(net, "filter")).check(cross_entropy, Rows.make(x, y))
