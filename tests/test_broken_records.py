"""After the first event, one record decides nothing but its own contribution, which is zero."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import sparsedp
from sparsedp import keys
from sparsedp.errors import UsageError

LOSS = nn.CrossEntropyLoss(reduction="none")
N = 30


class Records(Dataset[tuple[Tensor, int]]):
    """Thirty records, one of which may be broken in some way."""

    def __init__(self, broken: str) -> None:
        self.broken = broken
        generator = torch.Generator().manual_seed(0)
        self.inputs, self.labels = torch.randn(N, 4, generator=generator), torch.randint(0, 3, (N,), generator=generator)

    def __len__(self) -> int:
        return N

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        if place != 7 or self.broken == "nothing":
            return self.inputs[place], int(self.labels[place])
        if self.broken == "raises":
            raise OSError("image 7 of a patient with a name is truncated")
        if self.broken == "label":
            return self.inputs[place], 9
        return torch.full((4,), torch.nan), 0


def trained(data: Records, steps: int = 3) -> tuple[list[Tensor], sparsedp.Ledger]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    private = sparsedp.attach(
        model,
        optimizer,
        LOSS,
        num_examples=N,
        batch_size=N,
        noise_multiplier=1.0,
        steps=steps,
        delta=1e-3,
        key=keys.chosen("a"),
    )
    for batch in private.batches(data):
        private.backward(batch)
        optimizer.step()
    return [p.detach() for p in model.parameters()], private.ledger


@pytest.mark.parametrize("broken", ["raises", "label", "nan"])
def test_a_record_that_breaks_counts_as_zero_in_silence(broken: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All ways of being broken are the same, and the run ends as ever with the same ledger."""
    weights, ledger = trained(Records(broken))
    as_zero, _ = trained(Records("nan"))
    sound, same = trained(Records("nothing"))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(weights, as_zero, strict=True))
    assert not all(torch.allclose(a, b, atol=1e-6) for a, b in zip(weights, sound, strict=True))
    assert ledger == same
    assert capsys.readouterr() == ("", "")


def test_frozen_parameters_with_old_gradients_do_not_move() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    data = Records("nothing")
    LOSS(model(data.inputs), data.labels).mean().backward()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    private = sparsedp.attach(model, optimizer, LOSS, num_examples=N, batch_size=5, noise_multiplier=1.0, steps=2, delta=1e-3)
    batches = private.batches(data)
    private.backward(next(batches))
    optimizer.step()
    assert torch.equal(model[0].weight, before)
    private.backward(next(batches))
    model[0].weight.grad = torch.ones_like(model[0].weight)
    with pytest.raises(UsageError, match="frozen parameter"):
        optimizer.step()


def test_a_ledger_that_cannot_be_written_charges_nothing_and_reads_nothing() -> None:
    written: list[sparsedp.Ledger] = []

    def on_spend(ledger: sparsedp.Ledger) -> None:
        if not written:
            written.append(ledger)
            raise OSError("disk full")
        written.append(ledger)

    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    private = sparsedp.attach(model, optimizer, LOSS, num_examples=N, batch_size=5, noise_multiplier=1.0, steps=2, delta=1e-3)
    private._on_spend = on_spend
    batch = next(private.batches(Records("nothing")))
    with pytest.raises(OSError, match="disk full"):
        private.backward(batch)
    assert private.taken == 0 and not private.ledger.entries
    private.backward(batch)
    assert [sum(e.count for e in ledger.entries) for ledger in written] == [1, 1], "the retry was written down too"


def test_adafactor_is_refused_where_coordinates_are_dropped() -> None:
    model = nn.Linear(4, 3)
    with pytest.raises(UsageError, match="Adafactor"):
        sparsedp.attach(
            model, torch.optim.Adafactor(model.parameters()), LOSS, num_examples=N, batch_size=5, noise_multiplier=1.0, steps=2,
            delta=1e-3, drop="random", drop_rate=0.5,
        )  # fmt: skip
