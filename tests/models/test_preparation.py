"""What cannot be trained privately is refused by name, all of it at once; BatchNorm is converted or frozen, said aloud."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sparsedp.config import Model
from sparsedp.errors import UsageError
from sparsedp.models import build, check_model, convert_batchnorm, freeze_batchnorm, prepare


class Net(nn.Module):
    def __init__(self, *middle: nn.Module, classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3)
        self.middle = nn.Sequential(*middle)
        self.classifier = nn.Linear(24, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.middle(self.stem(x)).mean((2, 3)))


def batchnorm_net(classes: int) -> nn.Module:
    return Net(nn.BatchNorm2d(24), classes=classes)


class OverTheBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(24))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean((0, 2, 3)), 0.1)
        return x


SHAPE = (3, 8, 8)


@pytest.mark.parametrize("name", ["wrn_10_1", "small_cnn", "nf_resnet50"])
def test_our_networks_pass(name: str):
    check_model(build(Model(name=name), (3, 32, 32), 4), (3, 32, 32))


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (nn.BatchNorm2d(24), "layer 'middle.0' is a BatchNorm2d, which mixes"),
        (nn.SyncBatchNorm(24), "layer 'middle.0' is a SyncBatchNorm, which mixes"),
        (nn.LazyBatchNorm2d(), "layer 'middle.0' is a LazyBatchNorm2d, which mixes"),
        (nn.BatchNorm2d(24, track_running_stats=False).eval(), "layer 'middle.0' is a BatchNorm2d, which mixes"),
        (nn.InstanceNorm2d(24, track_running_stats=True), "layer 'middle.0' is a InstanceNorm2d that collects statistics"),
        (nn.LazyConv2d(24, 1), "layer 'middle.0' is a LazyConv2d that has no size yet"),
        (nn.utils.spectral_norm(nn.Conv2d(24, 24, 1)), "layer 'middle.0' has spectral_norm"),
        (
            nn.utils.parametrizations.spectral_norm(nn.Conv2d(24, 24, 1)),
            "layer 'middle.0.parametrizations.weight.0' has spectral_norm",
        ),
    ],
)
def test_modules_that_mix_or_collect_are_named_with_a_remedy(module: nn.Module, says: str):
    with pytest.raises(UsageError) as raised:
        check_model(Net(module))
    assert says in str(raised.value)


def test_all_problems_come_in_one_error():
    model = Net(nn.BatchNorm2d(24), nn.InstanceNorm2d(24, track_running_stats=True)).requires_grad_(False)
    with pytest.raises(UsageError) as raised:
        check_model(model)
    for part in ("layer 'middle.0' is a BatchNorm2d", "layer 'middle.1' is a InstanceNorm2d", "no parameter trains"):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    "module",
    [
        nn.BatchNorm2d(24).eval(),
        nn.InstanceNorm2d(24),
        nn.GroupNorm(4, 24),
        nn.Dropout(0.5),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(24, 24, 1)),
    ],
)
def test_modules_that_treat_examples_alone_pass(module: nn.Module):
    check_model(Net(module))


def test_the_trial_finds_a_module_that_mixes_examples_by_hand():
    with pytest.raises(UsageError, match="middle.1, a OverTheBatch, lets one example of a batch change the output"):
        check_model(Net(nn.ReLU(), OverTheBatch()), SHAPE)


def test_the_trial_finds_attention_over_the_batch():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(24, 2, batch_first=False)

        def forward(self, x: Tensor) -> Tensor:
            flat = x.flatten(2).transpose(1, 2)
            return self.attention(flat, flat, flat)[0].transpose(1, 2).reshape(x.shape)

    with pytest.raises(UsageError, match=r"middle\.0\.attention, a MultiheadAttention, lets one example"):
        check_model(Net(Attention()), SHAPE)


def test_the_trial_finds_buffers_that_change_and_leaves_no_trace():
    model = Net(Counting(), nn.Dropout(0.5))
    model.middle[1].eval()
    with pytest.raises(UsageError, match="buffer middle.0.mean changes in a forward pass"):
        check_model(model, SHAPE)
    assert torch.equal(model.middle[0].mean, torch.zeros(24))
    assert [m.training for m in (model, model.middle[0], model.middle[1])] == [True, True, False]


class Fails(nn.Identity):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("boom")


def test_any_failure_of_a_model_is_said_in_words():
    with pytest.raises(UsageError, match=r"cannot process images of 3 x 8 x 8 \(KeyError: 'boom'\)"):
        check_model(Net(Fails()), SHAPE)


def test_an_image_that_the_model_cannot_take_is_said_in_words():
    model = Net(nn.AvgPool2d(7))
    with pytest.raises(UsageError, match=r"Net cannot process images of 3 x 8 x 8 \(.*; choose another model or size of image"):
        check_model(model, SHAPE)
    assert model.training
    check_model(model, (3, 9, 9))


def test_the_trial_uses_no_global_randomness_and_dropout_passes_it():
    model = Net(nn.Dropout(0.5))
    before = torch.get_rng_state()
    check_model(model, SHAPE)
    assert torch.equal(torch.get_rng_state(), before)


def test_batchnorm_becomes_groupnorm_with_its_affine_part():
    model = Net(nn.BatchNorm2d(24, eps=1e-3), nn.ReLU(), nn.BatchNorm2d(24, affine=False))
    with torch.no_grad():
        model.middle[0].weight.uniform_()
        model.middle[0].bias.normal_()
    model.middle[0].bias.requires_grad_(False)
    old = copy.deepcopy(model.middle[0])
    converted, report = convert_batchnorm(model)
    norm = converted.middle[0]
    assert isinstance(norm, nn.GroupNorm)
    assert (norm.num_groups, norm.num_channels, norm.eps) == (12, 24, 1e-3)
    assert torch.equal(norm.weight, old.weight)
    assert torch.equal(norm.bias, old.bias)
    assert (norm.weight.requires_grad, norm.bias.requires_grad) == (True, False)
    assert converted.middle[2].weight is None
    assert str(report) == "BatchNorm became GroupNorm: middle.0 -> 12 groups, middle.2 -> 12 groups"
    check_model(converted, SHAPE)


@pytest.mark.parametrize(
    ("module", "groups"),
    [
        (nn.BatchNorm2d(64), 16),
        (nn.BatchNorm2d(7), 7),
        (nn.BatchNorm2d(17), 1),
        (nn.BatchNorm1d(16), 8),
        (nn.BatchNorm1d(7), 1),
    ],
)
def test_automatic_groups(module: nn.Module, groups: int):
    converted, _ = convert_batchnorm(nn.Sequential(module))
    assert converted[0].num_groups == groups


def test_a_chosen_number_of_groups_must_divide():
    assert convert_batchnorm(nn.Sequential(nn.BatchNorm2d(24)), groups=8)[0][0].num_groups == 8
    with pytest.raises(UsageError, match="0 has 24 channels, which 16 groups do not divide"):
        convert_batchnorm(nn.Sequential(nn.BatchNorm2d(24)), groups=16)


class NormAndActivation(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


def test_a_batchnorm_that_does_more_is_not_converted_but_can_be_frozen():
    model = Net(NormAndActivation(24))
    with pytest.raises(UsageError, match="middle.0 is a NormAndActivation, which may do more than normalise"):
        convert_batchnorm(model)
    images = torch.randn(2, *SHAPE)
    wanted = model.eval()(images)
    frozen, _ = freeze_batchnorm(model)
    assert torch.equal(frozen.train()(images), wanted)


class BatchNormAct2d(nn.BatchNorm2d):
    """As timm has it: dropout and an activation come after the normalisation."""

    __module__ = "timm.layers.norm_act"

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.drop, self.act = nn.Dropout(0.5), nn.Hardswish()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


def test_timms_batchnorm_with_an_activation_keeps_it():
    model = Net(BatchNormAct2d(24)).eval()
    nn.init.normal_(model.middle[0].bias)
    images = torch.randn(2, *SHAPE)
    normed = nn.functional.group_norm(model.stem(images), 12, None, model.middle[0].bias)
    converted, report = convert_batchnorm(model)
    torch.testing.assert_close(converted(images), model.classifier(nn.functional.hardswish(normed).mean((2, 3))))
    assert str(report) == "BatchNorm became GroupNorm: middle.0 -> 12 groups"
    dropped = converted.train().middle[0](torch.ones(2, 24, 4, 4) * torch.arange(4))
    assert not torch.equal(dropped, converted.eval().middle[0](torch.ones(2, 24, 4, 4) * torch.arange(4)))
    check_model(converted, SHAPE)


def test_timms_batchnorm_with_an_activation_can_be_frozen():
    model = Net(BatchNormAct2d(24)).eval()
    images = torch.randn(2, *SHAPE)
    wanted = model(images)
    frozen, _ = freeze_batchnorm(model)
    assert torch.equal(frozen(images), wanted)
    norm = frozen.train().middle[0]
    assert (norm.training, norm.drop.training) == (False, True)


def test_a_batchnorm_used_twice_stays_one():
    norm = nn.BatchNorm2d(24)
    converted, report = convert_batchnorm(Net(norm, nn.ReLU(), norm))
    assert converted.middle[0] is converted.middle[2]
    assert len(report.modules) == 1


def test_a_model_that_is_a_batchnorm():
    assert isinstance(convert_batchnorm(nn.BatchNorm2d(4))[0], nn.GroupNorm)


def test_frozen_statistics_stay_whatever_train_says_and_names_stay_too():
    model = Net(nn.BatchNorm2d(24))
    model(torch.randn(4, *SHAPE))
    keys, wanted = list(model.state_dict()), copy.deepcopy(model).eval()
    frozen, report = freeze_batchnorm(model)
    before = {n: b.clone() for n, b in frozen.named_buffers()}
    images = torch.randn(2, *SHAPE)
    for subject in (frozen.train(), copy.deepcopy(frozen).train()):
        assert torch.equal(subject(images), wanted(images))
        assert subject.training
    assert all(torch.equal(b, before[n]) for n, b in frozen.named_buffers())
    assert list(frozen.state_dict()) == keys
    frozen(images).sum().backward()
    assert frozen.middle[0].weight.grad is not None
    assert str(report) == "BatchNorm keeps its statistics: middle.0 -> frozen"
    check_model(frozen, SHAPE)
    assert freeze_batchnorm(frozen)[1].modules == ()


@pytest.mark.parametrize(
    ("module", "says"),
    [(nn.BatchNorm2d(24, track_running_stats=False), "no running statistics"), (nn.LazyBatchNorm2d(), "no size yet")],
)
def test_batchnorm_that_cannot_be_frozen(module: nn.Module, says: str):
    with pytest.raises(UsageError, match=f"middle.0 has {says}"):
        freeze_batchnorm(Net(module))


def test_a_model_without_batchnorm_is_reported_as_such():
    assert str(convert_batchnorm(Net())[1]) == "the model has no BatchNorm"


def test_prepare_does_it_all_and_says_so(tmp_path: Path):
    path = f"{__name__}:batchnorm_net"
    public = build(Model(name=path), SHAPE, 9)
    public.middle[0].running_mean.fill_(0.5)
    torch.save(public.state_dict(), tmp_path / "w.pt")
    asked = Model(name=path, weights=str(tmp_path / "w.pt"), train="head", batchnorm="freeze")
    network, done = prepare(asked, SHAPE, 3, torch.Generator().manual_seed(0))
    assert torch.equal(network.train().middle[0].running_mean, torch.full((24,), 0.5))
    assert done.trainable.trained == ("classifier.weight", "classifier.bias")
    assert done.weights is not None
    assert done.weights.replaced == ("classifier.bias", "classifier.weight")
    assert len(done.lines()) == 3


def test_prepare_refuses_batchnorm_unless_told_and_unknown_words():
    path = f"{__name__}:batchnorm_net"
    with pytest.raises(UsageError, match="mixes the examples"):
        prepare(Model(name=path), SHAPE, 3)
    network, done = prepare(Model(name=path, batchnorm="group"), SHAPE, 3)
    assert isinstance(network.middle[0], nn.GroupNorm)
    assert done.lines()[0].startswith("BatchNorm became GroupNorm")
    with pytest.raises(UsageError, match="choose one of freeze, group, refuse"):
        prepare(Model(name=path, batchnorm="drop"), SHAPE, 3)  # type: ignore[arg-type]


def test_complex_parameters_are_refused_by_name():
    model = Net(nn.Identity())
    model.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(UsageError, match=r"phase.* is complex"):
        check_model(model)
    model.phase.requires_grad_(False)
    check_model(model)  # what does not train needs neither clipping nor noise
