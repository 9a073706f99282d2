"""Record and replay over sequences of private steps: on a neighbouring data set nothing may change but the inputs of the noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparsedp.dp.clipping import reference
from sparsedp.dp.mechanism import dp_snip_release
from sparsedp.dp.values import ClippedSum
from tests.made_up import BAD_VALUES, KEY, World, build, cross_entropy, random_masks, unit_of, worlds
from tests.replay import FrozenNoise, assert_no_leak, assert_same_bits, replayed
from tests.steps import reader, run, settings_for

pytestmark = pytest.mark.filterwarnings("error")
with_patches = settings(suppress_health_check=list(HealthCheck))


def neighbours(world: World, index: int, seed: int) -> dict[str, World]:
    """Data sets that differ from `world` in one unit: made empty, or replaced by something nasty."""
    others = {f"{bad}": world.with_unit(index, unit_of(seed, 2, bad=bad)) for bad in BAD_VALUES}
    return {"empty": world.with_unit(index, ()), "other": world.with_unit(index, unit_of(seed, 3, 20.0)), **others}


@with_patches
@given(
    worlds(), st.sampled_from(("none", "random", "magnitude")), st.sampled_from((0.5, 0.999)),
    st.sampled_from(("weight", "filter")), st.booleans(), st.data(),
)  # fmt: skip
def test_private_steps_leak_nothing(
    monkeypatch: pytest.MonkeyPatch, world: World, drop: str, rate: float, grain: str, exact: bool, data: st.DataObject
) -> None:
    """Guarantee: but for the inputs of `add_noise`, nothing that leaves depends on the data."""
    if not world.units:
        return
    index, seed = data.draw(st.integers(0, len(world.units) - 1)), data.draw(st.integers(0, 99))
    chosen = settings_for(
        world, grain, drop=drop, drop_rate=0.0 if drop == "none" else rate, exact=exact, batch_size=len(world.units)
    )
    if data.draw(st.booleans()):
        chosen = settings_for(world, grain, drop=drop, drop_rate=chosen.drop_rate, exact=exact)
    around = neighbours(world, index, seed)
    emptied, nasty = around.pop("empty"), around[data.draw(st.sampled_from(sorted(around)))]
    for first, second, replaced in ((world, emptied, False), (emptied, nasty, False), (world, nasty, True)):
        frozen, results = replayed(monkeypatch, [lambda w=w: run(w, chosen, steps=2) for w in (first, second)])
        assert_no_leak(frozen, results, units_replaced=replaced)


def collapsed_world(family: str = "mlp") -> World:
    return World(build(family, 5), tuple(unit_of(i, 1 + i % 2, 5.0) for i in range(8)), {}, 0.7)


@pytest.mark.parametrize("drop", ["random", "magnitude"])
@pytest.mark.parametrize("grain", ["weight", "filter"])
@pytest.mark.parametrize("exact", [False, True])
def test_at_the_last_coordinate_of_a_layer(monkeypatch: pytest.MonkeyPatch, drop: str, grain: str, exact: bool) -> None:
    world = collapsed_world("conv")
    chosen = settings_for(world, grain, drop=drop, drop_rate=0.999, exact=exact, batch_size=8)
    around = [world, *(w for name, w in neighbours(world, 2, 1).items() if name == "empty")]
    frozen, results = replayed(monkeypatch, [lambda w=w: run(w, chosen, steps=4) for w in around])
    assert_no_leak(frozen, results)


@pytest.mark.parametrize("grain", ["weight", "filter"])
def test_magnitudes_are_those_of_released_weights(monkeypatch: pytest.MonkeyPatch, grain: str) -> None:
    """Over several steps, for every unit: half of the coordinates dropped, so that ranks are close and any other copy shows."""
    world = collapsed_world("conv")
    chosen = settings_for(world, grain, drop="magnitude", drop_rate=0.5, batch_size=8)
    around = [world, *(world.with_unit(index, ()) for index in range(len(world.units)))]
    frozen, results = replayed(monkeypatch, [lambda w=w: run(w, chosen, steps=4) for w in around])
    assert_no_leak(frozen, results)


@pytest.mark.parametrize("batch_size", [4, 8])
@pytest.mark.parametrize("exact", [False, True])
def test_dp_snip_leaks_nothing(monkeypatch: pytest.MonkeyPatch, batch_size: int, exact: bool) -> None:
    world = collapsed_world()
    chosen = settings_for(world, batch_size=batch_size, exact=exact)
    events: list[Any] = []

    def release(of: World) -> Any:
        return dp_snip_release(chosen, of.model, cross_entropy, reader(of), reference, KEY, lambda *event: events.append(event))

    for index in range(len(world.units)):
        around = [world, world.with_unit(index, ())]
        frozen, results = replayed(monkeypatch, [lambda w=w: release(w) for w in around])
        assert_no_leak(frozen, results)
        assert [call.public["purpose"] for call in frozen.runs[0]] == ["dp-snip"]
    assert len(events) == 2 * len(world.units) and len(set(map(repr, events))) == 1


def test_a_run_that_leaks_is_seen() -> None:
    """The comparison itself can fail: on a mask, on a count, on a sum that moved too far, on noise asked for once more."""
    frozen = FrozenNoise()
    for size in (0.0, 1.5):
        frozen.runs.append([])
        frozen(ClippedSum({"w": torch.full((1,), size)}, 1.0), 1.0, {}, KEY, "train", 0)
    with pytest.raises(AssertionError, match="moved the noise input"):
        assert_no_leak(frozen, ["same", "same"])
    frozen.runs[1] = frozen.runs[0]
    assert_no_leak(frozen, ["same", "same"])
    for first, second in (
        ("a", "b"),
        ([1], [1, 2]),
        ({"x": 0.0}, {"x": 1e-300}),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (1, 1.0),
    ):
        with pytest.raises(AssertionError):
            assert_same_bits(first, second, "here")
    frozen.runs.append([*frozen.runs[0]])
    with pytest.raises(AssertionError, match="more often"):
        frozen(ClippedSum({"w": torch.zeros(1)}, 1.0), 1.0, {}, KEY, "train", 1)


def test_the_noise_inputs_do_move(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(
        build("linear", 1), tuple(unit_of(i, 1) for i in range(4)), random_masks(build("linear", 1), "weight", 0.5, 1), 0.1
    )
    chosen = settings_for(world, batch_size=4)
    frozen, _ = replayed(monkeypatch, [lambda w=w: run(w, chosen, 1) for w in (world, world.with_unit(0, ()))])
    moved = frozen.runs[0][0].total.tensors["1.bias"] - frozen.runs[1][0].total.tensors["1.bias"]
    assert bool(moved.any())
