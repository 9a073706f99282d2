"""The composition: what is recorded, read, selected, noised and divided, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import dp_accounting
import pytest
import torch
from torch import Tensor

from sparsedp.dp import mechanism
from sparsedp.dp.clipping import Rows, clipped_sum, reference
from sparsedp.dp.masks import Layer, Masks, expand, participating
from sparsedp.dp.mechanism import Settings, Step, dp_snip_release, private_step
from sparsedp.dp.noise import add_noise
from sparsedp.dp.sampling import participants
from sparsedp.dp.selection import Draw
from sparsedp.dp.values import ClippedSum, Released
from sparsedp.errors import BudgetError, UsageError
from tests import oracles
from tests.distributions import ALARM, scale_p
from tests.made_up import KEY, World, build, cross_entropy, unit_of
from tests.replay import assert_same_bits
from tests.steps import reader, run, settings_for

POISSON, GAUSSIAN = dp_accounting.PoissonSampledDpEvent, dp_accounting.GaussianDpEvent


def world(family: str = "mlp", count: int = 40, dtype: torch.dtype = torch.float64) -> World:
    return World(build(family, 3, dtype), tuple(unit_of(i, 1 + i % 2, 3.0) for i in range(count)), {}, 0.4)


def step(made: World, settings: Settings, number: int = 0, **changes: Any) -> Step:
    given = {"read": reader(made), "engine": reference, "record": lambda *event: None, **changes}
    return private_step(settings, made.model, cross_entropy, key=KEY, step=number, **given)


def test_the_event_is_recorded_before_anything_is_read() -> None:
    """Guarantee: the event is recorded before the first row is read."""
    made, order = world(), []

    def criterion(layer: Layer, weight: Tensor, draw: Draw) -> Tensor:
        order.append("select")
        return weight.abs()

    def read(units: Tensor) -> Iterator[Rows]:
        order.append("read")
        yield made.rows(units.tolist())

    def reduce(total: ClippedSum) -> ClippedSum:
        order.append("reduce")
        return total

    settings = settings_for(made, drop=criterion, drop_rate=0.5)
    step(made, settings, read=read, record=lambda *event: order.append(event), reduce=reduce)
    layers = len(settings.layers)
    assert order == [("train", settings.event), *["select"] * layers, "read", "reduce"]


@pytest.mark.parametrize("release", [private_step, dp_snip_release])
def test_a_refused_event_stops_everything(monkeypatch: pytest.MonkeyPatch, release: Any) -> None:
    made = world()
    for name in ("select", "participants", "add_noise"):
        monkeypatch.setattr(mechanism, name, lambda *a, **k: pytest.fail("went on after the ledger refused"))

    def refuse(name: str, event: object) -> None:
        raise BudgetError("no more")

    def read(units: Tensor) -> Iterator[Rows]:
        pytest.fail("read after the ledger refused")

    place = {} if release is dp_snip_release else {"step": 0}
    with pytest.raises(BudgetError):
        release(settings_for(made), made.model, cross_entropy, read, reference, KEY, record=refuse, **place)


def test_an_empty_batch_is_an_ordinary_step() -> None:
    """Guarantee: an empty batch is an ordinary step, recorded and noised."""
    made = world(count=1)
    settings = settings_for(made, batch_size=0.01)
    numbers = [t for t in range(50) if len(participants(KEY, t, 1, 0.01)) == 0]
    assert numbers
    events: list[Any] = []
    for t in numbers:
        done = step(made, settings, t, record=lambda *event: events.append(event))
        zeros = ClippedSum({n: torch.zeros_like(p) for n, p in participating(made.model).items()}, made.clip)
        noise = add_noise(zeros, 1.0, {}, KEY, "train", t).over(0.01 * made.clip)
        assert_same_bits(dict(done.gradient.tensors), dict(noise.tensors), "gradient")
    assert events == [("train", POISSON(0.01, GAUSSIAN(1.0)))] * len(numbers)


@pytest.mark.parametrize("unit_norm", [True, False])
def test_the_divisor_is_the_expected_batch(unit_norm: bool) -> None:
    made = world()
    settings = settings_for(made, batch_size=10, unit_norm=unit_norm, noise_multiplier=1.5)
    sizes = set()
    for t in range(6):
        units = participants(KEY, t, 40, 0.25)
        sizes.add(len(units))
        total = clipped_sum(reference, made.model, cross_entropy, [made.rows(units.tolist())], {}, 0.4)
        noised = add_noise(total, 1.5, {}, KEY, "train", t).tensors
        wanted = {n: v / (10 * (0.4 if unit_norm else 1.0)) for n, v in noised.items()}
        assert oracles.distance(step(made, settings, t).gradient.tensors, wanted) < 1e-9
    assert len(sizes) > 2


def test_the_update_equals_the_oracle_and_the_noise_has_its_scale() -> None:
    made = world("linear", 60)
    settings = settings_for(made, batch_size=30, noise_multiplier=2.0, unit_norm=False)
    residues = []
    for t in range(400):
        units = participants(KEY, t, 60, 0.5).tolist() if t < 3 else []
        done = step(made if t < 3 else replace(made, units=((),) * 60), settings, t).gradient.tensors
        expected = oracles.clipped_sum(made.model, cross_entropy, [made.units[i] for i in units], {}, 0.4)
        residues += [(done[n].double().numpy() * 30 - expected[n]).reshape(-1) for n in expected]
    drawn = torch.cat([torch.from_numpy(r) for r in residues]).numpy()
    assert scale_p(drawn, 2.0 * 0.4) > ALARM
    assert scale_p(drawn, 2.0 * 0.4 * 1.05) < ALARM and scale_p(drawn, 2.0 * 0.4 * 0.95) < ALARM


def test_what_a_step_spends() -> None:
    made = world()
    assert settings_for(made, batch_size=10, noise_multiplier=3.0).event == POISSON(0.25, GAUSSIAN(3.0))
    assert settings_for(made, batch_size=40, noise_multiplier=3.0).event == GAUSSIAN(3.0)
    assert settings_for(made, noise_multiplier=0.0).event == dp_accounting.NonPrivateDpEvent()
    with pytest.raises(UsageError, match="batch_size is 41"):
        step(made, settings_for(made, batch_size=41))


@pytest.mark.parametrize("drop", ["random", "magnitude"])
@pytest.mark.parametrize("grain", ["weight", "filter"])
@pytest.mark.parametrize("exact", [False, True])
def test_dropped_coordinates_get_exactly_nothing(drop: str, grain: str, exact: bool) -> None:
    made = world("conv")
    settings = settings_for(made, grain, drop=drop, drop_rate=0.6, exact=exact)
    trace = run(made, settings, 3, momentum=0.0)
    for done in trace.steps:
        for name, tensor in done.gradient.tensors.items():
            kept = (
                expand(done.masks[name], tensor.shape).expand_as(tensor) if name in done.masks else torch.ones_like(tensor) > 0
            )
            assert torch.equal(tensor != 0, kept)


def test_masks_of_a_step_are_those_of_the_clipping_and_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    made, seen = world("conv"), []

    def engine(model: Any, loss: Any, rows: Rows, masks: Masks, clip: float) -> dict[str, Tensor]:
        seen.append(masks)
        return reference(model, loss, rows, masks, clip)

    done = step(made, settings_for(made, drop="random", drop_rate=0.5), engine=engine)
    assert len(seen) > 3
    for masks in seen:
        assert_same_bits(dict(masks), dict(done.masks), "masks of a part")


def test_random_masks_are_fresh_and_magnitude_masks_follow_the_weights() -> None:
    made = world("linear")
    masks = [step(made, settings_for(made, drop="random", drop_rate=0.5), t).masks["1.weight"] for t in range(3)]
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])
    weight = dict(made.model.named_parameters())["1.weight"]
    with torch.no_grad():
        weight.copy_(torch.arange(weight.numel(), dtype=weight.dtype).reshape(weight.shape))
    mask = step(made, settings_for(made, drop="magnitude", drop_rate=0.5)).masks["1.weight"]
    assert torch.equal(mask, weight >= weight.numel() // 2)


def test_reduction_happens_between_clipping_and_noise() -> None:
    made = world("linear")
    settings = settings_for(made, unit_norm=False)

    def double(total: ClippedSum) -> ClippedSum:
        return replace(total, tensors={n: 2 * t for n, t in total.tensors.items()})

    once, twice = step(made, settings).gradient.tensors, step(made, settings, reduce=double).gradient.tensors
    zero = step(replace(made, units=((),) * 40), settings).gradient.tensors
    assert oracles.distance({n: 2 * (once[n] - zero[n]) for n in once}, {n: twice[n] - zero[n] for n in once}) < 1e-9


@pytest.mark.parametrize("batch_size", [16, 40])
def test_dp_snip_is_one_release_charged_and_noised_on_every_tensor(batch_size: int) -> None:
    made, events, seen = world("conv", dtype=torch.float32), [], []
    settings = settings_for(made, batch_size=batch_size, noise_multiplier=5.0)
    released = dp_snip_release(
        settings, made.model, cross_entropy, reader(made, 7, seen.append), reference, KEY, lambda *event: events.append(event)
    )
    assert events == [("dp-snip", GAUSSIAN(5.0) if batch_size == 40 else POISSON(0.4, GAUSSIAN(5.0)))]
    assert torch.equal(seen[0], participants(KEY, 0, 40, batch_size / 40, "dp-snip")) and len(seen) == 1
    assert batch_size == 40 or len(seen[0]) != batch_size  # or a wrong divisor would not show
    total = clipped_sum(reference, made.model, cross_entropy, [made.rows(seen[0].tolist())], {}, 0.4)
    noised = add_noise(total, 5.0, {}, KEY, "dp-snip", 0).over(batch_size).tensors
    assert isinstance(released, Released) and oracles.distance(released.tensors, noised) < 1e-6
    for name, tensor in released.tensors.items():
        without = total.tensors[name] / batch_size
        assert bool((tensor != without).all()), f"no noise on {name}"


@pytest.mark.parametrize("release", [private_step, dp_snip_release])
def test_what_exact_arithmetic_cannot_do_is_not_charged(release: Any) -> None:
    made, events = world("conv", dtype=torch.float32), []
    settings = settings_for(made, noise_multiplier=1e5, exact=True)
    place = (KEY, 0) if release is private_step else (KEY,)
    with pytest.raises(UsageError, match="has a grid for at most 1; drop more"):
        release(settings, made.model, cross_entropy, reader(made), reference, *place, lambda *event: events.append(event))
    assert events == []


def test_dp_snip_and_the_first_step_share_neither_noise_nor_coins() -> None:
    made = replace(world("linear"), units=((),) * 40)
    settings = settings_for(made, unit_norm=False)
    first, seen = step(made, settings).gradient.tensors["1.weight"], []
    snip = dp_snip_release(
        settings, made.model, cross_entropy, reader(made, 7, seen.append), reference, KEY, lambda *event: None
    )
    assert not bool((first == snip.tensors["1.weight"]).any())
    assert not torch.equal(seen[0], participants(KEY, 0, 40, settings.sampling_rate))


def test_exact_arithmetic_lies_on_the_grid() -> None:
    made = world("linear", dtype=torch.float32)
    done = step(made, settings_for(made, exact=True, unit_norm=False, batch_size=20)).gradient.tensors
    size = sum(t.numel() for t in done.values())
    grid = mechanism.grid_for(1.0, 0.4, size)
    for tensor in done.values():
        whole = tensor.double() * 20 / grid
        assert float((whole - whole.round()).abs().max()) < 1e-2
    near = step(made, settings_for(made, unit_norm=False, batch_size=20)).gradient.tensors
    assert oracles.distance(done, near) < 0.4 * 3 * size**0.5 / 20


def test_without_clip_and_noise_it_is_sgd() -> None:
    made = world("linear")
    settings = settings_for(made, batch_size=40, noise_multiplier=0.0, clip=float("inf"))
    rows = World(made.model, tuple(u[:1] for u in made.units), {}, 1.0)
    done = step(rows, settings).gradient.tensors
    batch = rows.rows()
    plain = torch.autograd.grad(
        cross_entropy(made.model(batch.inputs), batch.targets).mean(), list(participating(made.model).values())
    )
    assert oracles.distance(done, dict(zip(participating(made.model), plain, strict=True))) < 1e-9
