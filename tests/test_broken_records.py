"""After the first event, one record decides nothing but its own contribution, which is zero."""

from __future__ import annotations

import errno
import os
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import sparsedp
from sparsedp import keys
from sparsedp.dp.clipping import Rows
from sparsedp.engines.care import sheltered
from sparsedp.errors import UsageError

LOSS = nn.CrossEntropyLoss(reduction="none")
N = 30


class Records(Dataset[tuple[Tensor, int]]):
    """Thirty records, one of which may be broken in some way: from the start, or once training has begun."""

    def __init__(self, broken: str, begun: bool = False) -> None:
        self.broken, self.begun = broken, begun
        generator = torch.Generator().manual_seed(0)
        self.inputs, self.labels = torch.randn(N, 4, generator=generator), torch.randint(0, 3, (N,), generator=generator)

    def __len__(self) -> int:
        return N

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        if place != 7 or not self.begun or self.broken == "nothing":
            return self.inputs[place], int(self.labels[place])
        if self.broken in RAISED:
            raise RAISED[self.broken]
        odd = {"label": (self.inputs[place], 9), "shape": (torch.zeros(5), 0), "double": (torch.zeros(4).double(), 0)}
        return odd.get(self.broken, (torch.full((4,), torch.nan), 0))


RAISED = {
    "raises": ValueError("image 7 of a patient with a name is truncated"),
    "open files": OSError(errno.EMFILE, "image 7 of a patient with a name"),
    "memory": MemoryError("image 7 of a patient with a name"),
    "allocation": RuntimeError("image 7 of a patient with a name: can't allocate memory"),
}


def attached(steps: int = 3, **changes: Any) -> tuple[nn.Module, torch.optim.Optimizer, sparsedp.Private]:
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
        **changes,
    )
    return model, optimizer, private


def trained(data: Records, collate: Any = None, **changes: Any) -> tuple[list[Tensor], sparsedp.Ledger]:
    """The weights after three steps, and the ledger; what is broken breaks after the data were looked at."""
    model, optimizer, private = attached(**changes)
    for batch in private.batches(data, collate=collate):
        data.begun = True
        private.backward(batch)
        optimizer.step()
    return [p.detach() for p in model.parameters()], private.ledger


def stacked(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """A collate of one's own, which raises where shapes differ."""
    return torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])


@pytest.mark.parametrize(
    ("collate", "exact"), [(None, False), (stacked, False), (None, True)], ids=["", "collated", "on the grid"]
)
@pytest.mark.parametrize("broken", ["raises", "label", "shape", "double", "nan"])
def test_a_record_that_breaks_counts_as_zero_in_silence(
    broken: str, collate: Any, exact: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """All ways of being broken are the same, and the run ends as ever with the same ledger."""
    weights, ledger = trained(Records(broken), collate, exact=exact)
    as_zero, _ = trained(Records("nan"), exact=exact)
    sound, same = trained(Records("nothing"), exact=exact)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(weights, as_zero, strict=True))
    assert not all(torch.allclose(a, b, atol=1e-6) for a, b in zip(weights, sound, strict=True))
    assert ledger == same
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("broken", "why"), [("open files", os.strerror(errno.EMFILE)), ("memory", "MemoryError"), ("allocation", "RuntimeError")]
)
def test_what_the_machine_fails_to_read_stops_the_step_and_is_never_a_zero(broken: str, why: str) -> None:
    """As a zero it would be back when the step is done again, and the difference of the two is a record without noise."""
    model, optimizer, private = attached()
    data = Records(broken)
    before = [p.clone() for p in model.parameters()]
    for batch in private.batches(data):
        data.begun = private.taken == 1
        if data.begun:
            with pytest.raises(UsageError, match=f"A record of the data set .*{re.escape(why)}.*at no new cost") as caught:
                private.backward(batch)
            assert "patient" not in str(caught.value) and caught.value.__suppress_context__
            assert private.taken == 1 and sum(entry.count for entry in private.ledger.entries) == 2
            data.begun = False
        private.backward(batch)
        optimizer.step()
    sound, ledger = trained(Records("nothing"))
    assert private.ledger == ledger
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), sound, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("broken", ["raises", "open files", "shape", "double"])
def test_records_that_are_broken_from_the_start_are_said_before_anything_is_spent(broken: str) -> None:
    _, _, private = attached()
    with pytest.raises(UsageError, match=r"^1 of 30 rows .* cannot be read|^29 have .*, 1 has inputs float(32|64)") as caught:
        next(private.batches(Records(broken, begun=True)))
    assert "patient" not in str(caught.value) and not private.ledger.entries


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


def test_the_others_of_a_part_go_through_the_same_engine() -> None:
    """An engine with factors of its own: were they handed to the reference, one record would change what all others weigh."""
    model = nn.Linear(2, 3)

    def engine(model: nn.Module, loss: Any, rows: Rows, masks: Any, clip: float) -> dict[str, Tensor]:
        if int(rows.targets.max()) > 2:
            raise IndexError("a label that is no class")
        return {name: torch.full_like(p, 0.25 * rows.units) for name, p in model.named_parameters()}

    rows = Rows.make(torch.randn(3, 2), torch.tensor([0, 99, 2]), torch.arange(3))
    found = sheltered(engine)(model, nn.CrossEntropyLoss(reduction="none"), rows, {}, 1.0)
    assert all(torch.equal(tensor, torch.full_like(tensor, 0.5)) for tensor in found.values()) and len(found) == 2
