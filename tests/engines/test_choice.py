"""Choosing an engine: what is refused and why, what is explained, what a plan remembers, how many rows fit."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from sparsedp.dp.clipping import Loss, Rows, reference
from sparsedp.dp.masks import Masks
from sparsedp.engines import Plan, choose_engine, explain, self_check
from sparsedp.engines.memory import free_bytes, micro_batch
from sparsedp.errors import UsageError
from tests.engines import zoo
from tests.engines.test_equality import build, images


def small(*extra: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), *extra, nn.Flatten(), nn.Linear(144, zoo.CLASSES))


def forgetful(model: nn.Module, loss: Loss, rows: Rows, masks: Masks, clip: float) -> dict[str, Tensor]:
    """The reference, without one bias."""
    found = reference(model, loss, rows, masks, clip)
    found["2.bias"] = torch.zeros_like(found["2.bias"])
    return found


def lenient(model: nn.Module, loss: Loss, rows: Rows, masks: Masks, clip: float) -> dict[str, Tensor]:
    """The reference, clipping at twice the norm."""
    return reference(model, loss, rows, masks, 2 * clip)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_clipping_norm_that_is_a_little_long_is_seen(dtype: torch.dtype) -> None:
    def longer(model: nn.Module, loss: Loss, rows: Rows, masks: Masks, clip: float) -> dict[str, Tensor]:
        return reference(model, loss, rows, masks, 1.01 * clip)

    like = images([2, 2])
    rows = Rows(like.inputs.to(dtype), like.targets, like.unit, like.units)
    with pytest.raises(UsageError, match="computes another clipped sum"):
        self_check(longer, small().to(dtype), zoo.cross_entropy, rows, {}, 1.0)


@pytest.mark.parametrize("wrong", [forgetful, lenient])
def test_a_wrong_engine_is_refused_by_name(wrong: object) -> None:
    with pytest.raises(UsageError, match=r"computes another clipped sum .* for .*2\.bias"):
        self_check(wrong, small(), zoo.cross_entropy, images([2, 2]), {}, 1.0)


def test_batch_norm_in_training_mode_is_refused_with_the_remedy_and_left_as_it_was() -> None:
    model = small(nn.BatchNorm2d(4))
    before = model[1].running_mean.clone()
    with pytest.raises(UsageError, match="convert BatchNorm to GroupNorm"):
        choose_engine("auto", model, zoo.cross_entropy, images([1, 1]))
    assert torch.equal(model[1].running_mean, before)


def test_rows_that_see_each_other_are_refused() -> None:
    class Mixing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0, keepdim=True)

    with pytest.raises(UsageError, match="depends on the other rows"):
        choose_engine("auto", small(Mixing()), zoo.cross_entropy, images([1, 1]))


def test_a_loss_that_averages_is_refused() -> None:
    with pytest.raises(UsageError, match="one number per row"):
        choose_engine("auto", small(), nn.CrossEntropyLoss(), images([1, 1]))


def test_dropout_is_checked_in_evaluation_mode_and_said() -> None:
    model = small(nn.Dropout())
    state = torch.get_rng_state()
    chosen = choose_engine("fast", model, zoo.cross_entropy, images([2, 2]))
    assert any("random numbers" in note for note in chosen.notes)
    assert model.training and model[1].training
    assert torch.equal(torch.get_rng_state(), state)


def test_what_the_fast_engines_cannot_do_falls_to_the_reference_and_says_why() -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale if float(x.detach().sum()) < 1e9 else x

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

    model, rows = small(Branching()), images([1, 1])
    chosen = choose_engine("auto", model, zoo.cross_entropy, rows)
    assert chosen.name == "reference" and len(chosen.notes) == 2
    with pytest.raises(UsageError, match="cannot serve this model"):
        choose_engine("functional", model, zoo.cross_entropy, rows)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="auto, compiled, fast, functional, reference"):
        choose_engine("quick", small(), zoo.cross_entropy, images([1]))


def test_explain_names_every_parameter_and_its_rule() -> None:
    model = build("attention")
    found = explain(model, zoo.cross_entropy, images([1, 1]))
    assert [line.parameter for line in found.lines] == [name for name, _ in model.named_parameters()]
    rules = {line.parameter: line.rule for line in found.lines}
    assert rules["patches.weight"] == "conv" and rules["last.weight"] == "linear" and "torch.func" in rules["token"]
    assert json.loads(json.dumps(found.to_json()))["engine"] == "fast"
    assert all(name in found.text() for name in rules)


def test_a_recorded_plan_is_followed_and_nothing_is_measured() -> None:
    model, rows = small(), images([1, 1])
    plan = Plan(engine="fast", methods={"0.weight": "unfold:fold"}, micro_batch=2)
    read = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    chosen = choose_engine("auto", model, zoo.cross_entropy, rows, plan=read)
    assert chosen.plan == plan and chosen.name == "fast"
    lines = {line.parameter: line for line in explain(model, zoo.cross_entropy, rows, plan=read).lines}
    assert lines["0.weight"].method == "unfold:fold" and lines["0.weight"].microseconds is None


@pytest.mark.parametrize(
    "odd",
    [
        {"colour": "red"}, {"engine": 3}, {"methods": []}, {"methods": {"a": 1}}, {"methods": None}, {"costs": {"a": 1}},
        {"costs": {"a": {"b": "1"}}}, {"micro_batch": 0}, {"micro_batch": True}, {"threads": 1.5}, {"\n": 1},
    ],
)  # fmt: skip
def test_a_recorded_plan_with_odd_values_is_refused_in_a_sentence(odd: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"^The recorded plan of the engine cannot be read \(.*\); start a new run\.$"):
        Plan.from_json({"engine": "fast", **odd})


def test_the_micro_batch_fits_into_what_is_free_in_whole_units() -> None:
    cpu = torch.device("cpu")
    assert micro_batch(1e6, 0, 1, cpu, free=2**40) == 64
    assert micro_batch(1e6, 0, 1, cpu, free=20_000_000) == 10
    assert micro_batch(1e6, 1e6, 3, cpu, free=20_000_000) == 3
    assert micro_batch(1e6, 0, 16, cpu, free=1) == 16
    assert micro_batch(1e6, 3e6, 1, cpu, free=2**40) == 19
    assert free_bytes(cpu) > 0


@pytest.mark.parametrize("name", ["norms", "standardised", "attention"])
def test_a_float64_model_is_served_by_the_fast_engine(name: str) -> None:
    like = images([1, 1])
    rows = Rows.make(like.inputs.double(), like.targets)
    chosen = choose_engine("auto", build(name).double(), zoo.cross_entropy, rows)
    assert chosen.name == "fast" and not chosen.notes
