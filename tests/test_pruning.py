"""Pre-pruning of whole models: every criterion, what it may read, what it costs, and that DP-SNIP's release is private."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from sparsedp.config import Sparsity
from sparsedp.dp import mechanism
from sparsedp.dp.accounting import epsilon
from sparsedp.dp.clipping import Rows, reference
from sparsedp.dp.ledger import Ledger, training_event
from sparsedp.dp.masks import maskable_layers
from sparsedp.dp.pruning import from_scores, saliency
from sparsedp.engines.functional import functional
from sparsedp.errors import UsageError
from sparsedp.pruning import FREE, FROM_DATA, PRUNERS, PrivateData, Pruned, prune
from tests import oracles
from tests.made_up import BAD_VALUES, CLASSES, KEY, OTHER_KEY, SHAPE, build, cross_entropy, unit_of
from tests.replay import assert_no_leak, replayed

Unit = tuple[tuple[Tensor, Tensor], ...]


def units_of(count: int, seed: int = 0) -> list[Unit]:
    return [unit_of(seed + i, 1) for i in range(count)]


def private(units: list[Unit], part: int = 3, **changes: Any) -> PrivateData:
    def read(chosen: Tensor) -> Iterator[Rows]:
        for some in chosen.split(part):
            pairs = [pair for i in some.tolist() for pair in units[i]]
            numbers = torch.tensor([k for k, i in enumerate(some.tolist()) for _ in units[i]])
            if pairs:
                yield Rows.make(torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs]), numbers)

    return PrivateData(num_units=len(units), read=read, loss=cross_entropy, **changes)


def snip_settings(sigma: float | None = 2.0, rate: float = 0.6, clip: float = 0.01, **changes: Any) -> Sparsity:
    return Sparsity(prune="dp-snip", prune_rate=rate, snip_noise_multiplier=sigma, snip_clip=clip, **changes)


def same(one: Pruned, other: Pruned) -> bool:
    return all(torch.equal(one.masks[n], other.masks[n]) for n in one.masks)


class Forbidden:
    """A data set that fails at every touch."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"the data were touched: {name}")


@pytest.mark.parametrize("granularity", ("weight", "filter"))
@pytest.mark.parametrize("name", ("random", "synflow"))
def test_free_criteria_touch_no_data_and_say_so(name: Any, granularity: Any) -> None:
    model, ledger = build("conv", 1), []
    settings = Sparsity(prune=name, prune_rate=0.5, granularity=granularity)
    pruned = prune(
        model, settings, KEY, input_shape=SHAPE, data=Forbidden(), record=lambda what, event: ledger.append((what, event))  # type: ignore[arg-type]
    )  # fmt: skip
    assert [event for _, event in ledger] == [dp_accounting.NoOpDpEvent()] and "reads no data" in ledger[0][0]
    assert pruned.event == dp_accounting.NoOpDpEvent() and pruned.private
    layers = maskable_layers(model, granularity)
    assert set(pruned.masks) == {la.name for la in layers}
    assert all(
        m.shape == (la.shape[:1] if la.by_filter else la.shape) for la, m in zip(layers, pruned.masks.values(), strict=True)
    )


def test_free_criteria_have_no_argument_for_data() -> None:
    for criterion in FREE.values():
        (only,) = inspect.signature(criterion).parameters.values()
        fields = {f.name for f in dataclasses.fields(only.annotation if not isinstance(only.annotation, str) else _public())}
        assert fields == {"model", "layers", "rate", "key", "input_shape"}
    assert set(PRUNERS) == {*FREE, *FROM_DATA} == {"random", "synflow", "dp-snip", "snip-not-private"}


def _public() -> type:
    from sparsedp.pruning import Public

    return Public


@pytest.mark.parametrize("granularity", ("weight", "filter"))
def test_snip_is_theta_times_the_summed_gradient(granularity: Any) -> None:
    """Lee et al.'s mask, from one ordinary backward pass; DP-SNIP without noise to speak of and clipping agrees."""
    model, units = build("mlp", 2), units_of(12)
    sparsity = Sparsity(prune="snip-not-private", prune_rate=0.7, granularity=granularity)
    x, y = (torch.stack([pair[k] for ((pair),) in units]) for k in (0, 1))
    trained = dict(model.named_parameters())
    gradients = dict(zip(trained, torch.autograd.grad(cross_entropy(model(x), y).sum(), list(trained.values())), strict=True))
    layers = maskable_layers(model, granularity)
    product = {la.name: trained[la.name].detach() * gradients[la.name] for la in layers}
    scores = {la.name: (product[la.name].sum(1) if la.by_filter else product[la.name]).abs() for la in layers}
    expected = from_scores(layers, scores, 0.7)
    plain = prune(model, sparsity, KEY, data=private(units))
    given = snip_settings(None, 0.7, 1e6, granularity=granularity, snip_epsilon=1.0)
    nearly = prune(model, given, KEY, data=private(units, noise_multiplier=1e-16))
    assert all(torch.equal(plain.masks[n], expected[n]) and torch.equal(nearly.masks[n], expected[n]) for n in expected)


@pytest.mark.parametrize("granularity", ("weight", "filter"))
@pytest.mark.parametrize("batch", (None, 5))
def test_the_mask_does_not_depend_on_micro_batches_or_the_engine(granularity: Any, batch: int | None) -> None:
    model, units = build("conv", 3), units_of(15)
    sparsity = snip_settings(0.5, granularity=granularity, snip_batch_size=batch)
    masks = [prune(model, sparsity, KEY, data=private(units, part)) for part in (1, 4, 15)]
    masks.append(prune(model, sparsity, KEY, data=private(units, engine=lambda connected: functional)))
    assert all(same(masks[0], other) for other in masks[1:])


@pytest.mark.parametrize(("engine", "exact"), [(reference, False), (functional, False), (reference, True)])
def test_a_unit_that_makes_the_loss_raise_counts_as_zero(engine: Any, exact: bool) -> None:
    """Once the event is recorded, no one record decides whether there is a mask."""
    model, units = build("conv", 3), units_of(3)
    ((x, y),) = units[1]
    ends = []
    for odd in ((x, y + CLASSES), (torch.full_like(x, torch.nan), y), (x, y)):
        events: list[str] = []
        data = private([units[0], (odd,), units[2]], engine=lambda _: engine, exact=exact)
        settings = snip_settings(0.001, 0.5)
        ends.append(prune(model, settings, KEY, data=data, record=lambda what, _, to=events: to.append(what)))  # type: ignore[misc]
        assert events == ["dp-snip"]
    assert same(ends[0], ends[1]) and not same(ends[0], ends[2])


def test_views_of_one_unit_are_averaged_before_clipping() -> None:
    model, base = build("linear", 4), units_of(4)
    doubled = [unit * 2 for unit in base]
    one, two = (prune(model, snip_settings(), KEY, data=private(units)) for units in (base, doubled))
    assert same(one, two)


# --- What it costs (A9, A10, A12) --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", (None, 6))
def test_one_release_is_one_event_recorded_before_any_row_is_read(batch: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[Any] = []
    data = private(units_of(12))
    inner, plain = data.read, mechanism.add_noise

    def read(units: Tensor) -> Iterator[Rows]:
        happened.append("read")
        yield from inner(units)

    def noise(*args: Any) -> Any:
        happened.append("noise")
        return plain(*args)

    monkeypatch.setattr(mechanism, "add_noise", noise)
    pruned = prune(
        build("mlp", 5), snip_settings(3.0, snip_batch_size=batch), KEY, data=dataclasses.replace(data, read=read),
        record=lambda what, event: happened.append(event),
    )  # fmt: skip
    gaussian = dp_accounting.GaussianDpEvent(3.0)
    expected = gaussian if batch is None else dp_accounting.PoissonSampledDpEvent(0.5, gaussian)
    assert happened == [expected, "read", "noise"] and pruned.event == expected and pruned.private


def test_its_cost_is_composed_with_training_at_one_delta() -> None:
    ledger = Ledger()
    pruned = prune(build("linear", 6), snip_settings(30.75), KEY, data=private(units_of(5)))
    ledger = ledger.append("dp-snip", pruned.event).append("train", training_event(4096 / 50000, 10.0), 875)
    spent = epsilon(ledger, 1e-5)
    assert spent.epsilon == pytest.approx(0.9115, abs=2e-4) and spent.delta == 1e-5


def test_plain_snip_says_not_private_wherever_it_appears() -> None:
    ledger: list[Any] = []
    settings = Sparsity(prune="snip-not-private", prune_rate=0.5)
    pruned = prune(build("linear", 7), settings, KEY, data=private(units_of(4)), record=lambda *entry: ledger.append(entry))
    assert (
        ledger == [("snip-not-private", dp_accounting.NonPrivateDpEvent())]
        and pruned.event == dp_accounting.NonPrivateDpEvent()
    )
    assert not pruned.private and "not-private" in pruned.criterion
    assert "NOT PRIVATE" in pruned.report.text() and pruned.report.to_json()["private"] is False
    assert math.isinf(epsilon(pruned.event, 1e-5).epsilon)


# --- Record and replay, and sensitivity (A4 to A8, A11, A13, A18) ------------------------------------------------------


def outcome(model: nn.Module, sparsity: Sparsity, units: list[Unit]) -> Callable[[], dict[str, Any]]:
    def run() -> dict[str, Any]:
        ledger: list[Any] = []
        pruned = prune(model, sparsity, KEY, data=private(units), record=lambda what, event: ledger.append((what, repr(event))))
        return {"masks": dict(pruned.masks), "ledger": ledger, "report": pruned.report.to_json()}

    return run


@given(
    st.sampled_from(("linear", "mlp", "conv", "standardised")), st.sampled_from(("weight", "filter")),
    st.sampled_from((0.3, 0.9, 0.999)), st.integers(0, 10**6), st.sampled_from((None, *BAD_VALUES)), st.booleans(),
)  # fmt: skip
def test_record_and_replay(family: str, granularity: Any, rate: float, seed: int, bad: float | None, sampled: bool) -> None:
    """Given the noise function's output, masks, ledger and report do not depend on the data, also at a forced collapse."""
    units = units_of(6, seed)
    neighbour = [unit_of(seed + 99, 1, size=100.0, bad=bad), *units[1:]]
    sparsity = snip_settings(2.0, rate, 0.05, granularity=granularity, snip_batch_size=4 if sampled else None)
    model = build(family, seed)
    with pytest.MonkeyPatch.context() as patch:
        frozen, results = replayed(patch, [outcome(model, sparsity, u) for u in (units, neighbour)])
    assert_no_leak(frozen, results, units_replaced=True)
    assert all(call.public["sensitivity"] == 0.05 and call.public["sigma"] == 2.0 for run in frozen.runs for call in run)
    assert [len(run) for run in frozen.runs] == [1, 1]


@given(st.integers(0, 10**6), st.sampled_from(("weight", "filter")), st.sampled_from((1.0, 1e30, math.nan)))
def test_one_more_unit_moves_the_release_by_at_most_the_clip(seed: int, granularity: Any, size: float) -> None:
    """Copies of one huge example count once each: the clip is per example, and it is DP-SNIP's own."""
    model, units = build("conv", seed), units_of(4, seed)
    huge = unit_of(seed + 50, 1, size=size)
    sums = []
    for many in (0, 1, 3):
        with pytest.MonkeyPatch.context() as patch:
            made = [*units, *[huge] * many]
            frozen, _ = replayed(patch, [outcome(model, snip_settings(clip=0.02, granularity=granularity), made)])
        sums.append(frozen.runs[0][0].total.tensors)
    assert oracles.distance(sums[0], sums[1]) <= 0.02 * (1 + 1e-6)
    assert oracles.distance(sums[0], sums[2]) <= 0.06 * (1 + 1e-6)
    if size == 1.0:
        assert oracles.distance(sums[0], sums[2]) == pytest.approx(3 * oracles.distance(sums[0], sums[1]), rel=1e-6)


@pytest.mark.parametrize("granularity", ("weight", "filter"))
def test_the_noise_reaches_every_variable_of_every_layer(granularity: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights of zero all connection gradients are zero: what is released is noise, of the stated deviation, everywhere."""
    model = nn.Sequential(nn.Conv2d(2, 400, 3), nn.Flatten(), nn.Linear(3600, CLASSES)).double()
    for p in model.parameters():
        p.data.zero_()
    seen: list[Any] = []

    def look(released: Any) -> dict[str, Tensor]:
        seen.append(released)
        return saliency(released)

    monkeypatch.setattr("sparsedp.dp.pruning.saliency", look)
    prune(model, snip_settings(1.5, 0.5, 0.2, granularity=granularity), KEY, data=private(units_of(10)))
    for name, tensor in seen[0].tensors.items():
        deviation = float(tensor.std()) * 10 / 0.2  # divided by the number of units, in units of the clip
        assert abs(deviation / 1.5 - 1) < 5 / math.sqrt(2 * tensor.numel()), name
        assert int((tensor == 0).sum()) == 0


def test_other_keys_draw_other_noise_and_the_same_key_the_same() -> None:
    model, units = build("conv", 8), units_of(5)
    one, again, other = (prune(model, snip_settings(50.0), key, data=private(units)) for key in (KEY, KEY, OTHER_KEY))
    assert same(one, again) and not same(one, other)


# --- Sense --------------------------------------------------------------------------------------------------------------


def overlap(one: Pruned, other: Pruned) -> float:
    kept = sum(int(m.sum()) for m in one.masks.values())
    return sum(int((one.masks[n] & other.masks[n]).sum()) for n in one.masks) / kept


def test_the_overlap_with_snip_grows_with_epsilon_and_falls_to_chance() -> None:
    torch.manual_seed(9)
    model = nn.Sequential(nn.Flatten(), nn.Linear(50, 30), nn.Tanh(), nn.Linear(30, CLASSES)).double()
    data = private(units_of(64), 64, engine=lambda connected: functional)
    plain = prune(model, Sparsity(prune="snip-not-private", prune_rate=0.8), KEY, data=data)
    shares = []
    for sigma in (1e-8, 3e-5, 3e-4, 1e3):
        noised = dataclasses.replace(data, noise_multiplier=sigma)
        shares.append(overlap(prune(model, snip_settings(None, 0.8, 1e3, snip_epsilon=1.0), KEY, data=noised), plain))
    assert shares[0] == 1.0 and shares[0] > shares[1] > shares[2] > shares[3]
    assert abs(shares[3] - 0.2) < 0.06


# --- Own criteria and refusals -------------------------------------------------------------------------------------------


def test_a_criterion_of_ones_own_is_a_function() -> None:
    model, ledger = build("mlp", 10), []

    def largest(model: nn.Module, layers: Any) -> dict[str, Tensor]:
        return {la.name: model.get_parameter(la.name).abs() for la in layers}

    pruned = prune(
        model, Sparsity(prune_rate=0.9, prune="random"), KEY, scoring=largest, record=lambda *entry: ledger.append(entry)
    )
    scores = np.concatenate([p.detach().abs().numpy().ravel() for p in (model[1].weight, model[4].weight)])
    threshold = np.sort(scores)[-(scores.size - math.floor(0.9 * scores.size + 0.5))]
    assert all(torch.equal(pruned.masks[n], model.get_parameter(n).abs() >= threshold) for n in pruned.masks)
    assert pruned.criterion == "largest" and "declared to read no private data" in ledger[0][0]


def test_refusals_name_the_value_and_the_remedy() -> None:
    model, data = build("mlp", 11), private(units_of(3))
    with pytest.raises(UsageError, match="input_shape is None"):
        prune(model, Sparsity(prune="synflow", prune_rate=0.5), KEY)
    with pytest.raises(UsageError, match="hand in data"):
        prune(model, snip_settings(), KEY)
    with pytest.raises(UsageError, match="noise multiplier is not known"):
        prune(model, Sparsity(prune="dp-snip", prune_rate=0.5, snip_epsilon=0.1), KEY, data=data)
    with pytest.raises(UsageError, match="give it once"):
        prune(model, snip_settings(2.0), KEY, data=dataclasses.replace(data, noise_multiplier=1.0))
    with pytest.raises(UsageError, match="snip-not-private"):
        Sparsity(prune="magnitude", prune_rate=0.5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no weight that may be masked"):
        prune(nn.LayerNorm(3), Sparsity(prune="random", prune_rate=0.5), KEY)
    assert prune(model, Sparsity(), KEY).masks == {}


def test_a_connection_that_nothing_goes_through_is_found_before_anything_is_spent() -> None:
    class Passing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(50, 6), nn.Linear(6, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(nn.functional.linear(x.flatten(1), self.inner.weight, self.inner.bias))

    units, ledger = units_of(4), []
    like = Rows.make(*(torch.stack([pair[k] for ((pair),) in units[:2]]) for k in (0, 1)))
    data = dataclasses.replace(private(units), example=like, read=Forbidden())  # type: ignore[type-var]
    with pytest.raises(UsageError, match=r"cannot score inner\.weight by filter"):
        prune(
            Passing().double(), snip_settings(granularity="filter"), KEY, data=data, record=lambda *entry: ledger.append(entry)
        )
    assert not ledger
