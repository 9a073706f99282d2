"""What only shows at shaken weights, in training mode, or after the first check."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import sparsedp
from sparsedp.dp.clipping import Rows
from sparsedp.engines import choose_engine
from sparsedp.engines.fitness import check_fitness, check_many, shaken, versions
from sparsedp.errors import UsageError

LOSS = nn.CrossEntropyLoss(reduction="none")


def rows() -> Rows:
    return Rows.make(torch.zeros(2, 6), torch.full((2,), 2))


class Mix(nn.Module):
    """Takes away the mean over the batch, while training only."""

    def forward(self, x: Tensor) -> Tensor:
        return x - 0.9 * x.mean(0) if self.training else x


class MixMany(nn.Module):
    """Takes away the mean over the batch where that has so many rows."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least = least

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if len(x) >= self.least else x


@pytest.mark.parametrize("dropout", [False, True])
def test_what_mixes_in_large_batches_alone_is_seen(dropout: bool) -> None:
    model = nn.Sequential(MixMany(17), nn.Dropout() if dropout else nn.Identity(), nn.Linear(6, 3))
    nn.init.zeros_(model[2].weight)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    check_fitness(model, LOSS, rows())
    with pytest.raises(UsageError, match="depends on the other rows"):
        choose_engine("auto", model, LOSS, rows())
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert choose_engine("auto", model, LOSS, rows(), rows=16).name == "fast", "which never works on more rows at once"


def test_rows_are_counted_not_units_and_memory_that_runs_out_halves_them() -> None:
    views = Rows.make(torch.zeros(32, 6), torch.full((32,), 2), views=16)
    seen: list[int] = []

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        seen.append(len(output))
        if len(output) > 200:
            raise MemoryError
        return LOSS(output, targets)

    check_many(nn.Linear(6, 3), loss, views, 10**9)
    assert seen == [512, 256, 128, 128]


def test_a_step_of_more_rows_than_the_tries_had_is_tried_before_it_is_charged() -> None:
    model = nn.Sequential(MixMany(17), nn.Linear(6, 3))
    private = attached(model)
    batch = next(private.batches((torch.randn(40, 6), torch.randint(0, 3, (40,)))))
    with pytest.raises(UsageError, match="depends on the other rows"):
        private.backward(batch)
    assert private.taken == 0 and not private.ledger.entries


class Counts(nn.Module):
    """A buffer that follows the data, in passes that record gradients only."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.seen += 0.1 * x.detach().mean(0)
        return x


class TimeMajor(nn.Module):
    """Reshapes with the units last, so that an engine that takes the first dimension for units is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(3, 3), nn.Linear(6, 3)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        steps = x.reshape(len(x), 2, 3).transpose(0, 1)
        out = torch.tanh(self.a(steps.reshape(-1, 3))).reshape(2, len(x), 3).transpose(0, 1)
        return self.head(out.reshape(len(x), 6))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Mix(), "depends on the other rows"),
        (nn.Sequential(Mix(), nn.Dropout()), "depends on the other rows"),
        (nn.Sequential(nn.Dropout(), nn.BatchNorm1d(6)), "changes"),
        (Counts(), "changes 0.seen"),
    ],
)
def test_what_happens_in_training_mode_only_is_seen(module: nn.Module, words: str) -> None:
    model = nn.Sequential(module, nn.Linear(6, 3))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(UsageError, match=words):
        check_fitness(model, LOSS, rows())
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items()), "the check leaves the model as it was"


def test_embeddings_that_rewrite_themselves_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(10, 6, max_norm=1.0), nn.Flatten(), nn.Linear(12, 3))
    with pytest.raises(UsageError, match="max_norm"):
        check_fitness(model, LOSS, Rows.make(torch.full((2, 2), 9), torch.full((2,), 2)))


def test_a_head_of_zeros_hides_nothing() -> None:
    model = TimeMajor()
    chosen = choose_engine("auto", model, LOSS, rows())
    made = torch.randn(5, 6), torch.randint(0, 3, (5,))
    nn.init.normal_(model.head.weight)
    from sparsedp.dp.clipping import reference

    ours, theirs = (engine(model, LOSS, Rows.make(*made), {}, 0.1) for engine in (chosen, reference))
    assert all(torch.allclose(ours[n], theirs[n], atol=1e-6) for n in theirs)


def test_shaking_moves_every_weight_and_puts_it_back_to_the_bit() -> None:
    model = TimeMajor()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with shaken(model):
        assert all(bool((p != before[n]).all()) for n, p in model.named_parameters())
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_versions_tell_a_write_and_a_replacement() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    seen = versions(model)
    assert versions(model) == seen
    with torch.no_grad():
        model[1].running_mean.add_(0)
    assert versions(model) != seen


def attached(model: nn.Module, engine: str = "auto") -> sparsedp.Private:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return sparsedp.attach(
        model, optimizer, LOSS, num_examples=40, batch_size=10, noise_multiplier=1.0, steps=9, delta=1e-3, engine=engine
    )


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_a_change_of_mode_is_checked_again_before_anything_is_spent(engine: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).eval()
    private = attached(model, engine)
    data = torch.randn(40, 6), torch.randint(0, 3, (40,))
    optimizer = private._guard._optimizer
    batches = private.batches(data)
    private.backward(next(batches))
    optimizer.step()
    model.train()
    batch = next(batches)
    with pytest.raises(UsageError, match="BatchNorm"):
        private.backward(batch)
    assert private.taken == 1 and sum(e.count for e in private.ledger.entries) == 1


class Late(nn.Module):
    """Starts to write to its buffer after some passes: no check on made-up rows can see that."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(6))
        self.armed = False

    def forward(self, x: Tensor) -> Tensor:
        if self.armed:
            self.seen.add_(x.detach().mean(0))
        return x


def test_a_write_during_a_private_step_is_caught_there() -> None:
    late = Late()
    model = nn.Sequential(late, nn.Linear(6, 3))
    private = attached(model)
    batches = private.batches((torch.randn(40, 6), torch.randint(0, 3, (40,))))
    private.backward(next(batches))
    private._guard._optimizer.step()
    late.armed = True
    with pytest.raises(UsageError, match="changed its own weights or buffers"):
        private.backward(next(batches))
