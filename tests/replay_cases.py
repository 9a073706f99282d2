"""Whole runs to be replayed: configurations drawn over all that a run can be, and the neighbours of the data set that they train on."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sparsedp import keys, state, training
from sparsedp.config import Model, Sparsity
from sparsedp.data.values import DataSet, UnitIndex
from sparsedp.dp.clipping import Rows
from sparsedp.dp.sampling import participants
from sparsedp.evaluation import Metrics
from sparsedp.images import ImageSource
from sparsedp.recipes import RECIPES
from tests.replay import tensors_of
from tests.whole_runs import UNITS, go, images, published, stopped, tiny

RELATIONS = ("emptied", "other image", "other label", "copied")
"""One unit: none of its rows can be read; a row's pixels are others; a row's label is another; a row is another unit's."""
DRAWN = 50

_SNIP = {"prune": "dp-snip", "prune_rate": 0.5}
PRUNE: dict[str, dict[str, Any]] = {
    "no pruning": {},
    "random": {"prune": "random", "prune_rate": 0.3},
    "synflow": {"prune": "synflow", "prune_rate": 0.6},
    "dp-snip, all": {**_SNIP, "snip_noise_multiplier": 2.0},
    "dp-snip, sampled": {**_SNIP, "snip_noise_multiplier": 2.0, "snip_batch_size": 20, "snip_clip": 0.1},
    "dp-snip, epsilon": {**_SNIP, "prune_rate": 0.99, "snip_epsilon": 0.5},
}  # fmt: skip
DROP: dict[str, dict[str, Any]] = {
    "no dropping": {},
    "drop random": {"drop": "random", "drop_rate": 0.4},
    "drop magnitude": {"drop": "magnitude", "drop_rate": 0.5},
    "drop nearly all": {"drop": "magnitude", "drop_rate": 0.999},
}
OPTIMISERS: dict[str, dict[str, Any]] = {
    "SGD": {},
    "momentum": {"momentum": 0.9, "weight_decay": 0.01, "schedule": "cosine"},
    "Adam": {"name": "Adam", "lr": 0.01, "average_decay": None},
    "AdamW": {"name": "AdamW", "lr": 0.01, "weight_decay": 0.1, "warmup": 2},
    "RMSprop": {"name": "RMSprop", "lr": 0.001, "momentum": 0.5, "schedule": "linear"},
    "Adagrad": {"name": "Adagrad", "lr": 0.05},
    "Rprop": {"name": "Rprop", "lr": 0.01, "average_decay": 0.5},
}
VIEWS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "one view": {"augment": "crop", "pad": 2},
    "three views": {"augment": "crop-flip", "pad": 2, "views": 3},
}
ACCOUNTANTS: dict[str, dict[str, Any]] = {
    "pld": {},
    "pld, replace-one": {"neighbouring": "replace-one", "unit_norm": False},
    "rdp": {"accountant": "rdp", "clip": 0.1},
    "paper": {"accountant": "paper"},
}
ARITHMETIC: dict[str, dict[str, Any]] = {
    "float": {}, "float again": {}, "autocast": {"autocast": "bf16"}, "exact": {"arithmetic": "exact"},
}  # fmt: skip
ENGINES = ("functional", "fast", "reference", "auto")
MODELS = (Model(), Model(train="head"), Model(name="norm_cnn"), Model(name="norm_cnn", train="norm-bias"))
CADENCE: dict[str, dict[str, int]] = {
    "at the end": {"evaluate_every": 0, "checkpoint_every": 50},
    "every step": {"evaluate_every": 1, "checkpoint_every": 1},
    "now and then": {"evaluate_every": 2, "checkpoint_every": 3},
}


@dataclass(frozen=True)
class Case:
    """A configuration, how many rows a unit has, and after which step the run is stopped and taken up again, if it is."""

    words: tuple[str, ...]
    changes: dict[str, Any] = field(repr=False)
    rows_per_unit: int = 1
    stop_at: int | None = None

    def __str__(self) -> str:
        return " + ".join(self.words)


def drawn(number: int) -> Case:
    """The configuration of that number: one word from every list."""
    own = random.Random(number)

    def one(options: Any) -> tuple[str, Any]:
        word = own.choice(sorted(options, key=str))
        return str(word), options[word] if isinstance(options, dict) else word

    prune, drop, optimiser, views, accountant, arithmetic, cadence, engine = (
        one(options) for options in (PRUNE, DROP, OPTIMISERS, VIEWS, ACCOUNTANTS, ARITHMETIC, CADENCE, ENGINES)
    )
    grain, pruned, each, stop = (own.choice(few) for few in (("weight", "filter"), ("keep", "zero"), (1, 1, 2), (None, 2)))
    exact = arithmetic[0] == "exact"
    model = MODELS[1] if exact else own.choice(MODELS)
    changes = {
        "model": model, "sparsity": Sparsity(granularity=grain, pruned_weights=pruned, **prune[1], **drop[1]), "optim": optimiser[1],
        "data": {} if exact else views[1],
        "mechanism": {"steps": 4, "batch_size": 8, **accountant[1], **({"arithmetic": "exact"} if exact else {})},
        "runtime": {"engine": engine[1], **cadence[1], **({} if exact else arithmetic[1])},
    }  # fmt: skip
    first = (word for word, _ in (prune, drop, optimiser, views, accountant, arithmetic, cadence, engine))
    words = (*first, grain, pruned, model.name, model.train, f"{each} rows a unit", f"stopped at {stop}")
    return Case(words, changes, each, stop)


def of_recipe(name: str) -> Case:
    """What a recipe says of masks, mechanism and optimiser, on images of 28 x 28 and for a few steps."""
    run = RECIPES[name]()
    views = {} if run.data.augment == "none" else {"augment": "crop-flip", "views": min(run.data.views, 2)}
    mechanism = {k: getattr(run.mechanism, k) for k in ("accountant", "neighbouring", "clip", "unit_norm", "arithmetic")}
    changes = {
        "sparsity": run.sparsity, "data": views, "mechanism": {"steps": 4, "batch_size": 8, **mechanism},
        "optim": {f.name: getattr(run.optim, f.name) for f in dataclasses.fields(run.optim)}, "runtime": {"evaluate_every": 2},
    }  # fmt: skip
    return Case(("recipe", name), changes)


def cases(count: int = DRAWN) -> list[Case]:
    """The recipes, and the first so many that are drawn."""
    return [*(of_recipe(name) for name in RECIPES), *(drawn(number) for number in range(count))]


class Told(training.Silence):
    """A reporter that keeps what it is told and may tell everybody."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def step(self, taken: int) -> None:
        self.said.append(taken)

    def evaluated(self, taken: int, results: Mapping[str, Metrics]) -> None:
        self.said.append({name: metrics.to_json() for name, metrics in results.items()})


@contextmanager
def states_seen(seen: list[Any]) -> Iterator[None]:
    """Keeps every state that is put away, but for the clock and for the checksum that says which data it belongs to."""
    real = state.save

    def save(folder: Any, learner: Any, progress: Any, bits_depend_on: Any) -> None:
        of_data = {name: value for name, value in bits_depend_on.items() if name != "data"}
        seen.append(copy.deepcopy([learner.state(), {**vars(progress), "seconds": 0.0}, of_data]))
        real(folder, learner, progress, bits_depend_on)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "save", save)
        yield


@contextmanager
def neighbour(place: Path, relation: str | None, case: Case) -> Iterator[None]:
    """The data set in `place`, with one unit changed as the relation says: one that is in the run's first batch."""
    images(place)
    each = case.rows_per_unit
    batch = tiny(place, **case.changes).mechanism.batch_size
    unit = int(participants(keys.chosen("known to all"), 0, UNITS // each, batch * each / UNITS)[0])
    row, other = unit * each, (unit * each + 1 + UNITS // 2) % UNITS
    with pytest.MonkeyPatch.context() as patch:
        if relation in ("other image", "copied", "other label"):
            _rewrite(place, relation, row, other)
        if relation == "emptied":
            patch.setattr(ImageSource, "read", _without(unit, ImageSource.read))
        if each > 1:
            patch.setattr(training, "load_data", lambda run, real=training.load_data: in_units(real(run), each))
        yield


def in_units(data: DataSet, each: int) -> DataSet:
    """The data set with so many rows in a unit."""
    index = UnitIndex.of(torch.arange(len(data.train)) // each)
    return dataclasses.replace(data, train=dataclasses.replace(data.train, index=index))  # type: ignore[type-var]


def _without(unit: int, real: Any) -> Any:
    def read(self: ImageSource, units: Tensor, step: int) -> Rows:
        rows = real(self, units, step)
        rows.inputs[units[rows.unit] == unit] = torch.nan
        return rows

    return read


def _rewrite(place: Path, relation: str, row: int, other: int) -> None:
    """Write another image, another label, or both of another row, over a row."""
    for kind, head, size in (("images-idx3", 16, 28 * 28), ("labels-idx1", 8, 1)):
        path = place / f"train-{kind}-ubyte"
        content = bytearray(path.read_bytes())
        here, there = (slice(head + r * size, head + (r + 1) * size) for r in (row, other))
        if relation == "copied":
            content[here] = content[there]
        elif relation == "other image" and size > 1:
            content[here] = np.random.default_rng(row).integers(0, 256, size, dtype=np.uint8).tobytes()
        elif relation == "other label" and size == 1:
            content[here] = bytes([(content[here][0] + 1) % 10])
        path.write_bytes(content)


def everything_of(case: Case, relation: str | None, place: Path, folder: Path) -> list[Any]:
    """Train, and return all that leaves: weights, average, every public byte, every state on the way, what the reporter was told."""
    told, states = Told(), []
    with neighbour(place, relation, case), states_seen(states):
        run = tiny(place, **case.changes)
        if case.stop_at is not None:
            stopped(run, folder, case.stop_at)
        result = go(run, folder, reporter=told)
    average = None if result.average is None else tensors_of(result.average)
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return [tensors_of(result.model), average, published(folder), states, told.said, names, result.ledger.to_json()]
