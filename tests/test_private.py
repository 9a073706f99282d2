"""The private side of a loop: what is charged and when, and what is refused before anything is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsedp
from sparsedp import private as private_module
from sparsedp import sources
from sparsedp.dp import accounting, mechanism
from sparsedp.dp.clipping import reference
from sparsedp.dp.ledger import Ledger, snip_event
from sparsedp.dp.noise import add_noise
from sparsedp.dp.sampling import participants
from sparsedp.engines import Plan
from sparsedp.engines.care import seeded
from sparsedp.errors import BudgetError, UsageError
from tests.made_up import KEY, OTHER_KEY
from tests.own_loop import ROWS, WIDTH, attach, cross_entropy, data_of, loop, model_of, ready
from tests.replay import assert_no_leak, replayed, tensors_of


def counted(private: sparsedp.Private) -> int:
    return sum(entry.count for entry in private.ledger.entries)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_every_step_is_charged_once_and_before_it_reads() -> None:
    model, optimizer, private = ready()
    seen: list[int] = []

    class Watched:
        num_units = ROWS

        def __init__(self) -> None:
            self.inner = sources.TensorSource(*data_of())

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def read(self, units: Tensor, step: int) -> Any:
            seen.append(counted(private))
            assert counted(private) == step + 1
            return self.inner.read(units, step)

        def example(self) -> Any:
            return self.inner.example()

        def rows_of(self, units: Tensor) -> Tensor:
            return self.inner.rows_of(units)

    loop(private, optimizer, Watched())
    assert seen
    assert counted(private) == private.taken == 6
    assert private.spent(1e-3).epsilon == pytest.approx(accounting.epsilon(private.ledger, 1e-3).epsilon)


def test_epsilon_and_steps_give_the_noise_and_the_target_is_never_passed() -> None:
    model = model_of()
    optimizer = sgd(model)
    private = attach(model, optimizer, noise_multiplier=None, epsilon=2.0, steps=4)
    loop(private, optimizer)
    assert 1.95 < private.spent(1e-3).epsilon <= 2.0
    with pytest.raises(StopIteration):
        next(private.batches(data_of()))
    with pytest.raises(BudgetError, match="step 5 is past the 4 that the privacy target allows"):
        private.backward(private_module.Batch(sources.TensorSource(*data_of()), 4))
    assert counted(private) == 4


def test_epsilon_and_noise_give_the_steps() -> None:
    model = model_of()
    private = attach(model, sgd(model), epsilon=8.0, noise_multiplier=1.0, steps=None)
    assert private.steps is not None
    more = private.ledger.append("train", private.settings.event, private.steps + 1)
    within = private.ledger.append("train", private.settings.event, private.steps)
    epsilon = accounting.epsilon
    assert epsilon(within, 1e-3).epsilon <= 8.0 < epsilon(more, 1e-3).epsilon


def test_what_was_spent_before_counts() -> None:
    model = model_of()
    before = Ledger().append("dp-snip", snip_event(2.0))
    alone = attach(model, sgd(model), noise_multiplier=None, epsilon=2.0)
    m = model_of()
    with_snip = attach(m, sgd(m), noise_multiplier=None, epsilon=2.0, ledger=before)
    assert with_snip.settings.noise_multiplier > alone.settings.noise_multiplier
    assert with_snip.ledger.entries[0].what == "dp-snip"


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("drop rate 1", {"drop": "random", "drop_rate": 1.0}, r"drop_rate is 1.0, but a rate is the fraction dropped, in \[0, 1\)"),
    ("drop rate below 0", {"drop": "random", "drop_rate": -0.1}, "drop_rate is -0.1"),
    ("clip 0", {"clip": 0.0}, "clip is 0.0, but the clipping norm must be above zero"),
    ("clip below 0", {"clip": -1.0}, "clip is -1.0"),
    ("clip infinite", {"clip": float("inf")}, "clip is inf"),
    ("sigma below 0", {"noise_multiplier": -1.0}, "noise_multiplier is -1.0, but noise cannot be negative"),
    ("B over N", {"batch_size": 41}, "batch_size is 41, but there are 40 privacy units"),
    ("B of 0", {"batch_size": 0}, "batch_size is 0"),
    ("no example", {"num_examples": 0}, "num_examples is 0"),
    ("delta 0", {"delta": 0.0}, r"delta is 0.0, but it must lie in \[1e-14, 1\)"),
    ("delta 1", {"delta": 1.0}, "delta is 1.0"),
    ("epsilon 0", {"epsilon": 0.0, "noise_multiplier": None}, "epsilon is 0.0"),
    ("steps 0", {"steps": 0}, "steps is 0"),
    ("two missing", {"steps": None}, "two of epsilon, noise_multiplier and steps decide the third"),
    ("criterion", {"drop": "largest", "drop_rate": 0.5}, "drop is 'largest', which is not known; choose one of magnitude"),
    ("a rate of nothing", {"drop_rate": 0.5}, "drop_rate is 0.5, but nothing is dropped while drop is 'none'"),
    ("patterns of nothing", {"drop": "random", "drop_rate": 0.5, "maskable": ["0.*", "nosuch*"]}, r"maskable pattern is 'nosuch\*', but no"),
    ("no noise to speak of", {"noise_multiplier": 1e-200}, "noise_multiplier is 1e-200, but it must be 0, or finite and at least 0.001"),
    ("rows at once", {"micro_batch": 0}, "micro_batch is 0, but there must be at least one"),
    ("half a step", {"steps": 2.5}, "steps is 2.5, but it must be a whole number or left out"),
    ("exact and no noise", {"exact": True, "noise_multiplier": 0.0}, "exact arithmetic is that of the noise, and this run has none"),
    ("past the target", {"epsilon": 0.1}, "epsilon 0.1 would be passed"),
    ("granularity", {"granularity": "channel"}, "granularity is 'channel'"),
    ("a mask of nothing", {"pruned": {"no.weight": torch.ones(2, dtype=torch.bool)}}, "mask for 'no.weight', but no trained"),
    ("a mask of another shape", {"pruned": {"0.weight": torch.ones(3, 3, dtype=torch.bool)}}, r"mask of 0.weight .* shape \(5, 6\)"),
    ("a mask of numbers", {"pruned": {"0.weight": torch.ones(5, 6)}}, "it must be bool"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_setting_that_cannot_be_is_refused_in_one_sentence(changes: dict[str, Any], message: str) -> None:
    model = model_of()
    with pytest.raises(UsageError, match=message) as caught:
        attach(model, sgd(model), **changes)
    assert str(caught.value).count("\n") == 0 and str(caught.value).endswith(".")


def worst(output: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(output, labels)[:1]


LATE: list[tuple[str, dict[str, Any], Any, str]] = [
    ("too many coordinates", {"exact": True, "noise_multiplier": 1e5}, None, "selected coordinates is .* has a grid for at most 1; drop"),
    ("labels of floats", {}, (data_of()[0], data_of()[1].float()), r"whose targets are float32 \(\)"),
    ("labels in a column", {}, (data_of()[0], data_of()[1][:, None]), r"whose targets are int64 \(1,\)"),
    ("own criterion of a wrong shape", {"drop": lambda layer, weight, draw: weight[0], "drop_rate": 0.5}, None, "scores for 0.weight"),
    ("loss averaged", {"loss": nn.CrossEntropyLoss()}, None, r"loss returned \(\) for .* rows.*reduction='none'"),
    ("loss of one row", {"loss": worst}, None, r"loss returned \(1,\) for .* rows"),
    ("loss that is no tensor", {"loss": lambda output, labels: 0.0}, None, "loss returned float"),
    ("label too high", {}, (data_of()[0], torch.full((ROWS,), 3)), "labels go from 3 to 3, but the loss does not take them"),
    ("label below 0", {}, (data_of()[0], data_of()[1] - 1), "labels go from -1 to 1"),
    ("other number of units", {}, data_of(ROWS - 1), "privacy units is 39, but num_examples says 40"),
    ("rows that see each other", {"loss": lambda o, y: cross_entropy(o - o.mean(0), y)}, None, "depends on the other rows"),
    ("engine", {"engine": "quick"}, None, "engine is 'quick', which is not known; choose one of auto"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "data", "message"), [case[1:] for case in LATE], ids=[case[0] for case in LATE])
def test_what_only_the_first_batch_shows_is_refused_before_anything_is_spent(
    changes: dict[str, Any], data: Any, message: str
) -> None:
    model = model_of()
    changes = dict(changes)
    optimizer = sgd(model)
    private = attach(model, optimizer, changes.pop("loss", cross_entropy), **changes)
    before = tensors_of(model)
    with pytest.raises(UsageError, match=message) as caught:
        loop(private, optimizer, data)
    assert str(caught.value).count("\n") == 0
    assert private.ledger.entries == () and private.taken == 0
    assert all(torch.equal(before[n], t) for n, t in tensors_of(model).items())


def test_dropping_where_nothing_can_be_dropped_is_refused_and_what_is_left_whole_is_told() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(WIDTH, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.w

    bare = Bare()
    with pytest.raises(
        UsageError, match=r"^drop_rate is 0.9, but the model has no weight that may be masked; give maskable patterns"
    ):
        attach(bare, sgd(bare), drop="random", drop_rate=0.9)
    assert attach(bare, sgd(bare), drop="random", drop_rate=0.9, maskable=["w"]).notes == ()
    half = nn.Sequential(bare, nn.Linear(3, 3))
    private = attach(half, optimizer := sgd(half), drop="random", drop_rate=0.5)
    loop(private, optimizer)
    assert private.notes[0] == "not masked, and take part in every step: 0.w; give maskable patterns to mask them."
    assert attach(half, sgd(half)).notes == ()


def test_spent_answers_at_the_delta_that_was_asked_for() -> None:
    _, optimizer, private = ready(delta=1e-4)
    loop(private, optimizer)
    assert private.spent() == private.spent(1e-4) != private.spent(1e-5)


def test_batchnorm_in_training_mode_is_refused() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    with pytest.raises(UsageError, match="layer '1' is a BatchNorm1d, which mixes the examples"):
        attach(model, sgd(model))


@pytest.mark.parametrize("delta", [1 / ROWS, 0.5])
def test_a_delta_of_one_record_or_more_warns(delta: float) -> None:
    model = model_of()
    with pytest.warns(UserWarning, match=f"delta {delta} is at least 1/{ROWS}: it would allow one record to be published"):
        attach(model, sgd(model), delta=delta)


def test_a_batch_is_used_exactly_once() -> None:
    _, optimizer, private = ready()
    batches = private.batches(data_of())
    first = next(batches)
    with pytest.raises(UsageError, match="called 0 times for one batch, but every batch is used exactly once"):
        next(batches)
    private.backward(first)
    optimizer.step()
    with pytest.raises(UsageError, match="the batch's step is 0, but the next step is 1; use each batch once"):
        private.backward(first)
    assert counted(private) == 1


def test_two_batches_without_a_step_between_them_are_refused_before_the_second_is_paid_for() -> None:
    _, optimizer, private = ready()
    batches = private.batches(data_of())
    private.backward(next(batches))
    with pytest.raises(UsageError, match=r"again before optimizer.step\(\), so the gradient that was paid for"):
        private.backward(next(batches))
    assert counted(private) == 1
    optimizer.step()


def test_a_data_set_is_looked_through_once_so_that_a_loop_of_epochs_does_not_end_with_a_record() -> None:
    class Spoiling(torch.utils.data.Dataset[Any]):
        spoilt = False

        def __init__(self) -> None:
            self.inputs, self.labels = data_of()

        def __len__(self) -> int:
            return ROWS

        def __getitem__(self, row: int) -> Any:
            if self.spoilt and row == 3:
                raise ValueError("broken")
            return self.inputs[row], self.labels[row]

    _, optimizer, private = ready()
    rows = Spoiling()
    for _ in range(2):
        for batch in private.batches(rows):
            private.backward(batch)
            optimizer.step()
            if private.taken == 3:
                break
        rows.spoilt = True
    assert private.taken == 6


def test_empty_batches_are_steps_with_noise_alone() -> None:
    """One example that joins one step in a hundred: nearly every step is noise, is applied, and is charged."""
    model = model_of()
    optimizer = sgd(model)
    settings = mechanism.Settings(num_units=1, batch_size=0.01, noise_multiplier=1.0, clip=1.0)
    private = sparsedp.Private(model, optimizer, cross_entropy, settings, steps=8, key=KEY, engine="functional")
    sizes = [len(participants(KEY, step, 1, 0.01)) for step in range(8)]
    assert sizes == [0] * 8
    before = tensors_of(model)
    for batch in private.batches(data_of(1)):
        private.backward(batch)
        assert all(bool((p.grad != 0).all()) for p in model.parameters())
        optimizer.step()
    assert counted(private) == 8
    assert all(not torch.equal(before[n], t) for n, t in tensors_of(model).items())


def test_the_same_key_gives_the_same_weights_and_another_key_others() -> None:
    ends = []
    for key in (KEY, KEY, OTHER_KEY):
        model = model_of()
        optimizer = sgd(model)
        loop(attach(model, optimizer, key=key, drop="random", drop_rate=0.3), optimizer)
        ends.append(model[0].weight.detach().clone())
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_a_key_of_nobodys_choice_is_fresh_every_time() -> None:
    first, second = (attach(m := model_of(), sgd(m), key=None) for _ in range(2))
    assert first.key.secret != second.key.secret
    assert not first.key.given


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no room"), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_running_out_of_memory_halves_the_rows_and_charges_nothing_more(error: Exception) -> None:
    sizes: list[int] = []
    failures = 2

    def engine(model: nn.Module, loss: Any, rows: Any, masks: Any, clip: float) -> dict[str, Tensor]:
        nonlocal failures
        sizes.append(len(rows.unit))
        if failures and len(rows.unit) > 4:
            failures -= 1
            raise error
        return reference(model, loss, rows, masks, clip)

    plans: list[tuple[int, int | None]] = []
    ends = []
    for asked in (engine, "reference"):
        model = model_of()
        optimizer = sgd(model)
        private = attach(model, optimizer, engine=asked, micro_batch=16, batch_size=30, steps=2)
        private._on_plan = lambda step, plan: plans.append((step, plan.micro_batch))
        loop(private, optimizer)
        assert counted(private) == 2
        ends.append(tensors_of(model))
    assert plans[:3] == [(0, 16), (0, 8), (0, 4)]
    assert max(sizes[2:]) <= 4
    assert all(torch.allclose(ends[0][n], ends[1][n], atol=1e-6) for n in ends[0])


def test_running_out_of_memory_for_good_is_said_and_can_be_tried_again_at_no_cost() -> None:
    full = True

    def engine(model: nn.Module, loss: Any, rows: Any, masks: Any, clip: float) -> dict[str, Tensor]:
        if full:
            raise MemoryError("no room")
        return reference(model, loss, rows, masks, clip)

    model = model_of()
    optimizer = sgd(model)
    private = attach(model, optimizer, engine=engine, micro_batch=4)
    batch = next(private.batches(data_of()))
    with pytest.raises(MemoryError):
        private.backward(batch)
    assert counted(private) == 1 and private.taken == 0
    full = False
    private.backward(batch)
    assert counted(private) == 1 and private.taken == 1


def test_a_step_that_is_done_again_is_not_done_with_other_rows_at_once() -> None:
    """Other parts round differently, and the same noise would meet two sums."""

    def engine(model: nn.Module, loss: Any, rows: Any, masks: Any, clip: float) -> dict[str, Tensor]:
        if len(rows.unit) > 4:
            raise MemoryError
        return reference(model, loss, rows, masks, clip)

    model = model_of()
    private = attach(model, sgd(model), engine=engine, micro_batch=32, batch_size=30)
    private.resume(0, Ledger().append("train", private.settings.event, 2), 2, {0: Plan(engine="custom", micro_batch=32)})
    with pytest.raises(UsageError, match="step 0, which is done again after a crash and must be done as it was the first time"):
        private.backward(next(private.batches(data_of())))
    assert counted(private) == 2


def test_other_errors_of_an_engine_are_not_taken_for_memory() -> None:
    """They are a record's, and cost that record's unit alone (tests/test_broken_records.py); the parts stay as large as they were."""

    def engine(*_: Any) -> dict[str, Tensor]:
        raise RuntimeError("shapes do not fit")

    ends = []
    for asked in (engine, "reference"):
        model = model_of()
        optimizer = sgd(model)
        private = attach(model, optimizer, engine=asked, micro_batch=16, steps=2)
        loop(private, optimizer)
        assert private.micro_batch == 16
        ends.append(tensors_of(model))
    assert all(torch.allclose(ends[0][n], t, atol=1e-6) for n, t in ends[1].items())


def test_resumed_steps_are_replayed_at_no_cost_and_to_the_bit() -> None:
    model, optimizer, private = ready(drop="random", drop_rate=0.5)
    batches = private.batches(data_of())
    for _ in range(2):
        private.backward(next(batches))
        optimizer.step()
    middle = tensors_of(model)
    for batch in batches:
        private.backward(batch)
        optimizer.step()
    again, other, resumed = ready(drop="random", drop_rate=0.5)
    again.load_state_dict(middle)
    resumed.resume(2, Ledger().append("train", private.settings.event, 5), 5, private.plans)
    loop(resumed, other)
    assert counted(resumed) == 6
    assert all(torch.equal(t, tensors_of(again)[n]) for n, t in tensors_of(model).items())


@pytest.mark.parametrize("exact", [False, True])
def test_modules_that_draw_are_seeded_by_the_step(exact: bool) -> None:
    """Dropout repeats to the bit under the same key, and leaves the generator of the user's own program alone."""
    ends = []
    for seed in (1, 2):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = nn.Sequential(*model_of(), nn.Dropout(0.5))
            optimizer = sgd(model)
            private = attach(model, optimizer, exact=exact, steps=3, engine="reference")
            batches = private.batches(data_of())
            private.prepare(sources.TensorSource(*data_of()))
            state = torch.get_rng_state()
            for batch in batches:
                private.backward(batch)
                optimizer.step()
            assert torch.equal(torch.get_rng_state(), state)
            ends.append(tensors_of(model))
    assert all(torch.equal(ends[0][n], t) for n, t in ends[1].items())


def test_every_part_and_step_draws_afresh() -> None:
    def draw(model: Any, loss: Any, rows: Any, masks: Any, clip: float) -> dict[str, Tensor]:
        return {"drawn": torch.rand(())}

    first, second = (seeded(draw, KEY, step) for step in (0, 1))
    drawn = [float(run(None, None, None, {}, 1.0)["drawn"]) for run in (first, first, second, second)]  # type: ignore[arg-type]
    assert len(set(drawn)) == 4
    assert float(seeded(draw, KEY, 0)(None, None, None, {}, 1.0)["drawn"]) == drawn[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [
    {"drop": "magnitude", "drop_rate": 0.5},
    {"drop": "random", "drop_rate": 0.5, "granularity": "filter"},
    {"exact": True},
    {"micro_batch": 3},
], ids=["magnitude", "filter", "exact", "parts"])  # fmt: skip
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_neighbours_under_frozen_noise_leave_the_same(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], optimizer: str
) -> None:
    inputs, labels = data_of()
    spoilt = inputs.clone()
    spoilt[7] = torch.nan
    bombed = inputs.clone()
    bombed[7] = 1e30
    relabelled = labels.clone()
    relabelled[7] = (labels[7] + 1) % 3

    def run(data: Any) -> Any:
        model = model_of()
        own = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1, weight_decay=0.01)
        private = attach(model, own, batch_size=30, steps=4, **changes)
        loop(private, own, data)
        return [tensors_of(model), own.state_dict(), private.ledger, private.plans[0].micro_batch]

    sets = [(inputs, labels), (spoilt, labels), (bombed, labels), (inputs, relabelled)]
    frozen, results = replayed(monkeypatch, [lambda data=data: run(data) for data in sets])
    assert_no_leak(frozen, results, units_replaced=True)


def test_the_noise_is_drawn_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counting(*args: Any) -> Any:
        calls.append(args[-1])
        return add_noise(*args)

    monkeypatch.setattr(mechanism, "add_noise", counting)
    _, optimizer, private = ready(micro_batch=2)
    loop(private, optimizer)
    assert calls == list(range(6))
    assert counted(private) == 6


def test_a_model_of_sixteen_bits_trains_by_the_largest_weights() -> None:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 3).bfloat16()
    optimizer = sgd(model)
    private = attach(model, optimizer, drop="magnitude", drop_rate=0.5)
    data = data_of()
    before = model.weight.detach().clone()
    batch = next(private.batches((data[0].bfloat16(), data[1])))
    private.backward(batch)
    kept = before.abs() >= before.abs().flatten().sort().values[before.numel() // 2]
    assert torch.equal(model.weight.grad != 0, kept)
