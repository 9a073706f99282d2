"""What trains, and where a network is cut to compute features once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sparsedp.config import Model
from sparsedp.errors import UsageError
from sparsedp.models import build, classifier_name, set_trainable, split_head


def network() -> nn.Module:
    return build(Model(name="wrn_10_1"), (3, 8, 8), 4, torch.Generator().manual_seed(0))


class Own(nn.Module):
    """A user's network whose last layer has a name of its own, and is not the last in the list."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.LayerNorm(5), nn.ReLU())
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x))


class Backwards(Own):
    """The last linear layer of the list is not the last that is used."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x)).softmax(1)


def test_all_leaves_everything_and_what_was_frozen_stays_frozen():
    model = network()
    model.stem.bias.requires_grad_(False)
    report = set_trainable(model, "all")
    assert report.frozen == ("stem.bias",)
    assert report.count == sum(p.numel() for p in model.parameters()) - 16


def test_head():
    report = set_trainable(network(), "head")
    assert report.trained == ("classifier.weight", "classifier.bias")
    assert report.count == 64 * 4 + 4
    assert str(report) == "260 parameters in 2 of 52 tensors train"


def test_norm_bias_is_norms_gains_biases_and_the_classifier():
    model = network()
    report = set_trainable(model, "norm-bias")
    assert set(report.frozen) == {n for n, p in model.named_parameters() if p.ndim == 4}
    assert {"stem.gain", "stem.bias", "norm.weight", "classifier.weight"} <= set(report.trained)


def test_norm_bias_of_a_users_network():
    report = set_trainable(Own(), "norm-bias")
    assert report.trained == ("body.1.bias", "body.2.weight", "body.2.bias", "out.weight", "out.bias")


def test_patterns():
    report = set_trainable(network(), "classifier.*, groups.2.*.gain")
    expected = {"classifier.weight", "classifier.bias", *(f"groups.2.0.{c}.gain" for c in ("conv1", "conv2", "skip_conv"))}
    assert set(report.trained) == expected


@pytest.mark.parametrize(("spec", "named"), [("classifier.*,heads.*", "'heads.*'"), ("", "it matches"), (" , ", "it matches")])
def test_patterns_that_match_nothing_are_named(spec: str, named: str):
    model = network()
    with pytest.raises(UsageError, match=named.replace("*", r"\*")):
        set_trainable(model, spec)
    assert all(p.requires_grad for p in model.parameters())


def test_nothing_left_to_train_is_refused():
    model = network().requires_grad_(False)
    with pytest.raises(UsageError, match="no parameter that trains"):
        set_trainable(model, "all")


@pytest.mark.parametrize("name", ["wrn_10_1", "small_cnn", "nf_resnet50"])
def test_our_networks_are_cut_before_the_classifier(name: str):
    model = build(Model(name=name), (3, 32, 32), 4).eval()
    keys = list(model.state_dict())
    features, head = split_head(model)
    images = torch.randn(2, 3, 32, 32)
    for _ in range(2):  # the first call also checks
        assert torch.equal(head(features(images)), model(images))
    assert head is model.classifier
    assert list(model.state_dict()) == keys
    assert not model.classifier._forward_pre_hooks


def test_after_the_check_the_head_is_not_run(monkeypatch: pytest.MonkeyPatch):
    features, head = split_head(Own())
    features(torch.randn(2, 3, 2, 2))
    monkeypatch.setattr(head, "forward", None)
    assert features(torch.randn(7, 3, 2, 2)).shape == (7, 5)


def test_a_users_network_is_cut_at_its_last_linear_layer():
    model = Own()
    features, head = split_head(model)
    assert head is model.out
    images = torch.randn(2, 3, 2, 2)
    assert torch.equal(head(features(images)), model(images))


def test_a_network_that_goes_on_after_its_last_linear_layer_is_refused():
    features, _ = split_head(Backwards())
    with pytest.raises(UsageError, match="'out' is not the last thing that Backwards computes"):
        features(torch.randn(2, 3, 2, 2))


def test_the_classifier_is_found_by_attribute_then_by_timms_word_then_by_place():
    class Timm(Own):
        def get_classifier(self) -> nn.Module:
            return self.body[1]

    assert classifier_name(network()) == "classifier"
    assert classifier_name(Timm()) == "body.1"
    assert classifier_name(Own()) == "out"
    assert classifier_name(nn.Linear(2, 2)) == ""
    with pytest.raises(UsageError, match="no linear layer"):
        classifier_name(nn.Conv2d(1, 1, 1))


def test_a_network_that_is_one_linear_layer():
    model = nn.Linear(3, 2)
    features, head = split_head(model)
    x = torch.randn(4, 3)
    assert torch.equal(head(features(x)), model(x))
    assert set_trainable(model, "head").trained == ("weight", "bias")
