"""The guard around an optimiser: what is dropped stays to the bit, and only what `backward` gave is applied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from sparsedp.errors import UsageError
from sparsedp.optim import NAMES
from tests.own_loop import attach, data_of, dropped, elementwise, loop, masks_of, model_of, ready

GENERIC = {"weight_decay": 0.1, "momentum": 0.9}
SPECIAL: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"nesterov": True, "momentum": 0.9, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "dampening": 0.5, "maximize": True, "foreach": False}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("Adam", {"fused": True, "weight_decay": 0.1}),
    ("AdamW", {"weight_decay": 0.5, "foreach": True}),
    ("Adagrad", {"initial_accumulator_value": 0.3, "weight_decay": 0.1, "lr_decay": 0.1}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("NAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("RAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
]


def made(name: str, options: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    return getattr(torch.optim, name)(model.parameters(), lr=0.05, **options)


def generic(name: str) -> dict[str, Any]:
    import inspect

    return {k: v for k, v in GENERIC.items() if k in inspect.signature(getattr(torch.optim, name)).parameters}


CASES = [(name, generic(name)) for name in NAMES if name != "Adafactor"] + SPECIAL


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda x: x if isinstance(x, str) else "-".join(x))
@pytest.mark.parametrize("granularity", ["weight", "filter"])
def test_what_is_dropped_stays_to_the_bit(name: str, options: dict[str, Any], granularity: str) -> None:
    model = model_of(bias=name != "Muon")
    optimizer = made(name, options, model)
    private = attach(model, optimizer, drop="random", drop_rate=0.5, granularity=granularity)
    seen = 0
    for batch in private.batches(data_of()):
        masks, before = masks_of(private), elementwise(optimizer, model)
        private.backward(batch)
        optimizer.step()
        after = elementwise(optimizer, model)
        for entry, old in before.items():
            still = dropped(masks, entry, old)
            assert torch.equal(after[entry][still], old[still]), entry
            seen += int(still.sum())
        assert any(not torch.equal(after[n], before[n]) for n in before), "nothing moved at all"
    assert seen > 100
    assert set(before) == set(after)


@pytest.mark.parametrize(("name", "options", "entry", "value"), [
    ("SGD", {"momentum": 0.9, "weight_decay": 0.5}, "momentum_buffer", 0.0),
    ("Adam", {"weight_decay": 0.5}, "exp_avg_sq", 0.0),
    ("Adagrad", {"initial_accumulator_value": 0.3}, "sum", 0.3),
    ("Rprop", {}, "step_size", 0.05),
    ("Adamax", {"eps": 1e-8}, "exp_inf", 1e-8),
    ("Muon", {"weight_decay": 0.5}, "momentum_buffer", 0.0),
])  # fmt: skip
def test_state_of_what_was_never_kept_is_what_state_starts_from(
    name: str, options: dict[str, Any], entry: str, value: float
) -> None:
    """Weight decay makes optimisers put the weight itself into their state, unless that is undone."""
    model = model_of(bias=False)
    optimizer = made(name, options, model)
    private = attach(model, optimizer, drop="random", drop_rate=0.5, steps=1)
    masks = masks_of(private)
    loop(private, optimizer)
    found = elementwise(optimizer, model)
    for owner in ("0.weight", "2.weight"):
        still = found[f"{owner}/{entry}"][dropped(masks, owner, found[owner])]
        assert len(still) > 3
        assert torch.equal(still, torch.full_like(still, value))


@pytest.mark.parametrize("scheduler", [
    lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 6),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
], ids=["cosine", "one-cycle", "lambda", "sequential"])  # fmt: skip
def test_schedulers_work_and_dropped_coordinates_stay(scheduler: Any) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.3)
    schedule = scheduler(optimizer)
    private = attach(model, optimizer, drop="magnitude", drop_rate=0.5)
    rates = []
    for batch in private.batches(data_of()):
        masks, before = masks_of(private), elementwise(optimizer, model)
        private.backward(batch)
        optimizer.step()
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
        after = elementwise(optimizer, model)
        assert all(torch.equal(after[n][dropped(masks, n, v)], v[dropped(masks, n, v)]) for n, v in before.items())
    assert len(set(rates)) > 3


def test_pruned_coordinates_stay_for_the_whole_run() -> None:
    model = model_of()
    own = torch.Generator().manual_seed(1)
    pruned = {"0.weight": torch.rand(5, 6, generator=own) > 0.4, "2.weight": torch.rand(3, 5, generator=own) > 0.4}
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.1)
    loop(attach(model, optimizer, pruned=pruned, drop="magnitude", drop_rate=0.3), optimizer)
    for name, mask in pruned.items():
        now = dict(model.named_parameters())[name]
        assert torch.equal(now[~mask], start[name][~mask])
        assert not torch.equal(now[mask], start[name][mask])


def test_several_groups_and_frozen_parameters() -> None:
    model = model_of()
    model[0].bias.requires_grad_(False)
    frozen = model[0].bias.detach().clone()
    groups = [
        {"params": [model[0].weight], "weight_decay": 0.5},
        {"params": [model[2].weight, model[2].bias, model[0].bias], "lr": 0.5},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    private = attach(model, optimizer, drop="random", drop_rate=0.5, steps=3)
    for batch in private.batches(data_of()):
        masks, before = masks_of(private), elementwise(optimizer, model)
        private.backward(batch)
        optimizer.step()
        after = elementwise(optimizer, model)
        assert all(torch.equal(after[n][dropped(masks, n, v)], v[dropped(masks, n, v)]) for n, v in before.items())
    assert torch.equal(model[0].bias, frozen)


def test_nothing_of_the_users_is_wrapped_or_rebound() -> None:
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters())
    keys, kind, own = list(model.state_dict()), type(model), set(vars(model)) | set(vars(optimizer))
    methods = (model.forward, optimizer.step, optimizer.zero_grad)
    private = attach(model, optimizer)
    loop(private, optimizer)
    assert list(model.state_dict()) == keys
    assert type(model) is kind
    assert set(vars(model)) | set(vars(optimizer)) == own
    assert (model.forward, optimizer.step, optimizer.zero_grad) == methods
    assert not model._forward_hooks and not model._backward_hooks
    private.detach()
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def test_after_detach_the_optimiser_is_an_ordinary_one() -> None:
    model, optimizer, private = ready()
    private.detach()
    model(data_of()[0]).sum().backward()
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


def test_an_optimiser_that_takes_a_closure_is_refused() -> None:
    model = model_of()
    with pytest.raises(UsageError, match="LBFGS.*closure.*use one that does not"):
        attach(model, torch.optim.LBFGS(model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = attach(model, optimizer)
    for given in ((lambda: torch.zeros(()),), ()):
        private.backward(next(iter(private.batches(data_of()))))
        with pytest.raises(UsageError, match="closure evaluates the loss outside"):
            optimizer.step(*given, **({} if given else {"closure": lambda: torch.zeros(())}))
        optimizer.step()


def test_state_by_row_and_column_is_refused_only_where_something_is_dropped() -> None:
    model = model_of()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.05)
    pruned = {"0.weight": torch.ones(5, 6, dtype=torch.bool).tril()}
    for changes in ({"drop": "random", "drop_rate": 0.5}, {"pruned": pruned}):
        with pytest.raises(UsageError, match="Adafactor.*by row and column.*use another optimiser, or drop and prune nothing"):
            attach(model, optimizer, **changes)
    private = attach(model, optimizer)
    loop(private, optimizer)
    assert private.taken == 6


def test_what_is_no_torch_optimiser_is_refused() -> None:
    with pytest.raises(UsageError, match="optimizer is a object, but only torch.optim"):
        attach(model_of(), object())  # type: ignore[arg-type]


def test_model_and_optimiser_must_agree() -> None:
    model, other = model_of(), model_of(1)
    with pytest.raises(UsageError, match=r"lacks 2 trained parameters, 2.weight, 2.bias first.*freeze"):
        attach(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    with pytest.raises(UsageError, match="holds 4 parameters that are not the model's"):
        attach(model, torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1))
    model[2].requires_grad_(False)
    attach(model, torch.optim.SGD(model[0].parameters(), lr=0.1)).detach()


def test_a_step_without_a_private_gradient_is_refused_and_moves_nothing() -> None:
    model, optimizer, private = ready()
    before = elementwise(optimizer, model)
    model(data_of()[0]).sum().backward()
    with pytest.raises(UsageError, match="before a private gradient was computed"):
        optimizer.step()
    batch = next(iter(private.batches(data_of())))
    private.backward(batch)
    optimizer.step()
    moved = elementwise(optimizer, model)
    with pytest.raises(UsageError, match="once for every optimizer.step"):
        optimizer.step()
    assert all(torch.equal(moved[n], v) for n, v in elementwise(optimizer, model).items())
    assert not torch.equal(moved["0.weight"], before["0.weight"])


@pytest.mark.parametrize("spoil", [
    lambda m: m[0].weight.grad.mul_(2),
    lambda m: setattr(m[0].weight, "grad", m[0].weight.grad.clone()),
    lambda m: m(data_of()[0]).sum().backward(),
    lambda m: m.zero_grad(),
    lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1e-3),
], ids=["scaled", "replaced", "added-to", "zeroed", "clipped"])  # fmt: skip
def test_a_gradient_that_was_changed_is_refused(spoil: Any) -> None:
    model, optimizer, private = ready()
    private.backward(next(iter(private.batches(data_of()))))
    spoil(model)
    before = elementwise(optimizer, model)
    with pytest.raises(UsageError, match="was changed after private.backward"):
        optimizer.step()
    assert all(torch.equal(before[n], v) for n, v in elementwise(optimizer, model).items())


def test_zero_grad_before_backward_is_harmless() -> None:
    model, optimizer, private = ready(steps=2)
    for batch in private.batches(data_of()):
        optimizer.zero_grad()
        private.backward(batch)
        optimizer.step()
    assert private.taken == 2
