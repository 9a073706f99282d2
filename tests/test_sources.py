"""Reading rows by unit: tensors, data sets, patients, views, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from sparsedp.dp.clipping import Rows, clipped_sum, reference
from sparsedp.errors import UsageError
from sparsedp.sources import DatasetSource, TensorSource, as_source, parts
from tests.own_loop import ROWS, WIDTH, attach, cross_entropy, data_of, loop, model_of
from tests.replay import tensors_of


class Pairs(Dataset[tuple[Tensor, int]]):
    """A map-style data set that says which rows were read."""

    def __init__(self) -> None:
        self.inputs, self.labels = data_of()
        self.read: list[int] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.read.append(index)
        return self.inputs[index], int(self.labels[index])


def trained(data: Any, model: nn.Module | None = None, **how: Any) -> dict[str, Tensor]:
    model = model_of() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    changes = {k: how.pop(k) for k in ("num_examples", "batch_size", "micro_batch", "noise_multiplier") if k in how}
    loop(attach(model, optimizer, steps=3, **changes), optimizer, data, **how)
    return tensors_of(model)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(t, other[n]) for n, t in one.items())


def test_all_kinds_of_data_give_the_same() -> None:
    inputs, labels = data_of()
    expected = trained((inputs, labels))
    pairs = Pairs()
    assert same(expected, trained(pairs))
    assert same(expected, trained(TensorDataset(inputs, labels)))
    assert same(expected, trained([(x, int(y)) for x, y in zip(inputs, labels, strict=True)]))
    assert same(expected, trained(TensorSource(inputs, labels)))
    assert pairs.read[:ROWS] == list(range(ROWS)), "all are looked at once, before anything is spent"
    assert len(pairs.read) < 3 * ROWS, "rows that are not in the batch are not read"


def test_dictionaries_and_tuples_of_tensors() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model_of()

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.inner(torch.cat([left, right], 1))

    inputs, labels = data_of()
    left, right = inputs[:, :2], inputs[:, 2:]
    expected = trained((inputs, labels), noise_multiplier=0.0)  # noise goes by the parameters' names, which are others here
    for data in (({"left": left, "right": right}, labels), ((left, right), labels)):
        found = trained(data, Two(), noise_multiplier=0.0)
        assert same(expected, {n.removeprefix("inner."): t for n, t in found.items()})
    pairs = [({"left": a, "right": b}, int(y)) for a, b, y in zip(left, right, labels, strict=True)]
    assert same(expected, {n.removeprefix("inner."): t for n, t in trained(pairs, Two(), noise_multiplier=0.0).items()})


def test_targets_may_be_a_dictionary() -> None:
    inputs, labels = data_of()
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = attach(model, optimizer, lambda out, t: cross_entropy(out, t["class"]) * t["weight"], steps=2, engine="auto")
    loop(private, optimizer, (inputs, {"class": labels, "weight": torch.ones(ROWS)}))
    assert private.taken == 2


def test_a_patient_counts_once() -> None:
    """Rows of one unit are averaged and then clipped: the sum is that of the loop over patients."""
    inputs, labels = data_of()
    units = torch.arange(ROWS).remainder(7)
    source = TensorSource(inputs, labels, units)
    assert source.num_units == 7
    model, clip = model_of(), 0.05
    total = clipped_sum(reference, model, cross_entropy, parts(source, torch.tensor([1, 4, 6]), 0, 9), {}, clip)
    expected = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for unit in (1, 4, 6):
        rows = units == unit
        own = torch.autograd.grad(cross_entropy(model(inputs[rows]), labels[rows]).mean(), list(model.parameters()))
        norm = torch.cat([g.flatten() for g in own]).norm()
        assert norm > clip
        for name, g in zip(expected, own, strict=True):
            expected[name] += g * (clip / norm)
    assert all(torch.allclose(total.tensors[n], t, atol=1e-6) for n, t in expected.items())


def test_patients_train_and_the_size_of_parts_does_not_matter() -> None:
    units = torch.arange(ROWS).remainder(7)
    ends = [trained(data_of(), num_examples=7, batch_size=4, micro_batch=size, units=units) for size in (1, 6, 64)]
    for end in ends[1:]:
        assert all(torch.allclose(t, end[n], atol=1e-6) for n, t in ends[0].items())


def test_parts_hold_whole_units() -> None:
    units = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3, 3])
    source = TensorSource(torch.arange(10.0)[:, None], torch.zeros(10, dtype=torch.int64), units)
    cut = list(parts(source, torch.arange(4), 0, 3))
    assert [p.units for p in cut] == [1, 2, 1]
    assert [len(p.unit) for p in cut] == [3, 3, 4]
    assert torch.cat([p.inputs for p in cut]).flatten().tolist() == list(range(10))
    assert list(parts(source, torch.arange(0), 0, 3)) == []


@pytest.mark.parametrize(
    "make", [TensorSource, lambda x, y, u=None: DatasetSource(TensorDataset(x, y), u)], ids=["tensors", "data-set"]
)
def test_the_example_does_not_show_real_labels(make: Any) -> None:
    inputs, labels = data_of()
    example = make(inputs, labels, torch.arange(ROWS).remainder(5)).example()
    assert example.inputs.shape[1:] == inputs.shape[1:] and example.inputs.dtype == inputs.dtype
    assert len(example.unit) == len(example.inputs) == len(example.targets)


REFUSED: list[tuple[str, Any, dict[str, Any], str]] = [
    ("DataLoader", DataLoader(TensorDataset(*data_of()), batch_size=8), {}, r"data is a DataLoader.*own coin.*loader.dataset"),
    ("generator", iter([1]), {}, "data is a list_iterator, but a private step reads rows by number"),
    ("one tensor", torch.zeros(4), {}, "data is a Tensor"),
    ("unequal lengths", (torch.zeros(4, 2), torch.zeros(3)), {}, r"numbers of rows is \[3, 4\]"),
    ("a number for targets", (torch.zeros(4, 2), torch.zeros(())), {}, "numbers of rows"),
    ("no rows", (torch.zeros(0, 2), torch.zeros(0)), {}, "number of rows is 0"),
    ("units of another number", data_of(), {"units": torch.zeros(3)}, r"shape of the unit numbers is \(3,\), but there are 40"),
    ("a unit below 0", data_of(), {"units": torch.arange(ROWS) - 1}, "lowest unit number is -1"),
    ("a unit without rows", data_of(), {"units": torch.arange(ROWS) * 2}, "units without rows is 39"),
]


@pytest.mark.parametrize(("data", "how", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_cannot_be_read_is_refused(data: Any, how: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        as_source(data, **how)


ODD = {
    "of another shape": (torch.zeros(WIDTH + 1), 0), "of another type": (torch.zeros(WIDTH, dtype=torch.float64), 0), "nothing": None,
    "another label's shape": (torch.zeros(WIDTH), torch.zeros(2)),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_a_record_that_becomes_unlike_the_others_changes_nothing_of_them(odd: Any) -> None:
    """Collated with the others it would raise, or change the type of all of them. Also the first one decides nothing."""
    inputs, labels = data_of()
    for place in (7, 0):
        rows: list[Any] = [(x, int(y)) for x, y in zip(inputs, labels, strict=True)]
        source = DatasetSource(rows)
        (without,) = source.read(torch.tensor([3, 9, 4]), 0)
        rows[place] = odd
        (found,) = source.read(torch.tensor([3, place, 9, 4]), 0)
        _same_rows(found, without)


def _same_rows(found: Rows, without: Rows) -> None:
    assert torch.equal(found.inputs, without.inputs) and found.inputs.dtype == without.inputs.dtype
    assert torch.equal(found.targets, without.targets) and torch.equal(found.unit, without.unit) and found.units == 3


@pytest.mark.parametrize("place", [0, 7])
def test_rows_that_differ_from_the_start_are_told_in_one_sentence(place: int) -> None:
    inputs, labels = data_of()
    rows: list[Any] = [(x, int(y)) for x, y in zip(inputs, labels, strict=True)]
    rows[place] = (torch.zeros(WIDTH + 1), 0)
    said = rf"^39 have inputs float32 \({WIDTH},\) and targets int64 \(\), 1 has inputs float32 \({WIDTH + 1},\) .* of 40 rows .*\.$"
    with pytest.raises(UsageError, match=said):
        DatasetSource(rows)
    with pytest.raises(UsageError, match="of 20 units of the data set cannot be read and collated"):
        DatasetSource(rows, torch.arange(ROWS) // 2)


def test_names_beside_the_tensors_are_refused_and_not_quoted() -> None:
    """A list of names would reach every row of a micro-batch."""
    rows = [({"x": x, "name": f"patient {i}"}, 0) for i, x in enumerate(data_of()[0])]
    with pytest.raises(UsageError, match="and there are 37 kinds more of 40 rows") as caught:
        DatasetSource(rows)
    assert "patient" not in str(caught.value)


NUMBERS: list[Any] = [3, np.int32(3), np.uint8(3), torch.tensor(3, dtype=torch.int16), torch.tensor(3)]
FRACTIONS: list[Any] = [0.5, np.float64(0.5), np.float32(0.5), torch.tensor(0.5, dtype=torch.float16)]


@pytest.mark.parametrize(("written", "kind"), [(NUMBERS, torch.int64), (FRACTIONS, torch.float32)], ids=["whole", "fractions"])
def test_labels_count_however_a_number_is_written(written: list[Any], kind: torch.dtype) -> None:
    rows = [(torch.ones(WIDTH), number) for number in written]
    (found,) = DatasetSource(rows).read(torch.arange(len(rows)), 0)
    assert found.units == len(rows) and found.targets.dtype == kind
    assert found.targets.tolist() == [float(written[0])] * len(rows)


def pad(items: list[Any]) -> tuple[Tensor, Tensor]:
    return nn.utils.rnn.pad_sequence([x for x, _ in items], batch_first=True), torch.tensor([y for _, y in items])


def test_rows_of_other_lengths_are_never_padded_to_each_other() -> None:
    """They stand apart, in the order in which their lengths come; the rows of one unit are padded to that unit."""
    rows = [(torch.full((length,), float(length)), length) for length in (2, 5, 2, 3)]
    found = DatasetSource(rows, collate=pad).read(torch.tensor([0, 1, 2]), 0)
    assert [r.inputs.tolist() for r in found] == [[[2.0] * 2] * 2, [[5.0] * 5]]
    assert [(r.units, r.unit.tolist(), r.targets.tolist()) for r in found] == [(2, [0, 1], [2, 2]), (1, [0], [5])]
    (first, second) = DatasetSource(rows, torch.tensor([0, 0, 1, 1]), pad).read(torch.arange(2), 0)
    assert (
        first.inputs.shape == (2, 5) and first.inputs[0].tolist() == [2.0, 2.0, 0.0, 0.0, 0.0] and first.unit.tolist() == [0, 0]
    )
    assert second.inputs.shape == (2, 3)


def test_a_long_record_moves_the_sum_by_the_clip_at_most() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(9, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.words(x).mean(1))

    own = torch.Generator().manual_seed(0)
    rows = [(torch.randint(1, 9, (5,), generator=own), i % 3) for i in range(ROWS)]
    model, clip = Mean(), 0.01
    changed = [*rows[:3], (torch.randint(1, 9, (400,), generator=own), 0), *rows[4:]]
    sums = []
    for data in (changed, rows[:3] + rows[4:]):
        source = DatasetSource(data, collate=pad)
        sums.append(
            clipped_sum(reference, model, cross_entropy, parts(source, torch.arange(len(data)), 0, 64), {}, clip).tensors
        )
    moved = torch.cat([(t - sums[1][n]).flatten() for n, t in sums[0].items()]).norm()
    assert clip * 0.99 < float(moved) <= clip * (1 + 1e-4)


def test_a_collate_that_gives_no_rows_is_told_so() -> None:
    def by_time(items: list[Any]) -> tuple[Tensor, Tensor]:
        return nn.utils.rnn.pad_sequence([x for x, _ in items]), torch.tensor([y for _, y in items])

    with pytest.raises(
        UsageError, match=r"collate made a tensor of shape \(6, 1\) of 1 rows, but .* first dimension.*batch_first"
    ):
        DatasetSource([(torch.ones(6), 0)] * 3, collate=by_time)


def test_records_that_cannot_be_read_are_said_without_what_is_in_it() -> None:
    class Broken(Pairs):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            raise OSError("the image of a patient with a name is truncated")

    with pytest.raises(UsageError, match=r"40 of 40 rows of the data set cannot be read and collated \(OSError\)") as caught:
        DatasetSource(Broken())
    assert "patient" not in str(caught.value) and caught.value.__context__ is None


def test_an_iterable_data_set_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    with pytest.raises(UsageError, match="data is a Stream"):
        as_source(Stream())


def test_wide_and_narrow_integers_are_labels_too() -> None:
    inputs, labels = data_of()
    assert inputs.shape[1] == WIDTH
    for kind in (torch.uint8, torch.int32):
        loss = lambda out, y: cross_entropy(out, y.long())  # noqa: E731
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        private = attach(model, optimizer, loss, steps=1)
        loop(private, optimizer, (inputs, labels.to(kind)))
        assert private.taken == 1
