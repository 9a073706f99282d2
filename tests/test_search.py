"""A search before any record is read: what it costs, that it meets its target as a whole, and what it refuses."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from pathlib import Path
from typing import Any

import dp_accounting as dp
import pytest
import torch
from dp_accounting.rdp import RdpAccountant

from sparsedp import mask_files
from sparsedp.config import Data, Mechanism, Optim, Run, Runtime, Sparsity
from sparsedp.data import DataSet, Normalisation
from sparsedp.data.values import ArrayImages, Batch, UnitIndex
from sparsedp.dp.accounting import epsilon
from sparsedp.dp.ledger import Ledger
from sparsedp.errors import UsageError
from sparsedp.models import build
from sparsedp.pruning import prune
from sparsedp.search import Search, plan_search
from tests import whole_runs
from tests.dp.test_tuning import key

ROWS, DELTA = 60, 1e-3
SHAPES = {"geometric": 1.0, "logarithmic": 0.0, "poisson": math.inf}
RUN = Run(
    data=Data(name="mnist"), mechanism=Mechanism(noise_multiplier=1.5, steps=6, batch_size=16, delta=DELTA),
    optim=Optim(lr=0.5), runtime=Runtime(engine="functional", device="cpu"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_runs.quick_accounting(monkeypatch)


class Sealed(ArrayImages):
    """Images that nobody may look at yet."""

    def read(self, indices: torch.Tensor) -> Batch:
        raise AssertionError("a private record was read")


def data_set(units: int = ROWS, evaluation: bool = True) -> DataSet:
    pixels, labels = torch.zeros(ROWS, 1, 28, 28, dtype=torch.uint8), torch.arange(ROWS) % 10
    index = None if units == ROWS else UnitIndex.of(torch.arange(ROWS) % units)
    train = Sealed(pixels, labels, 10, index)
    return DataSet("mnist", train, train if evaluation else None, tuple("0123456789"), Normalisation((0.0,), (1.0,)))


def search(**changes: Any) -> Search:
    return Search(**{"tries": ("optim.lr=0.5,1",), "score": "public", "trials_mean": 3.0, **changes})


def changed(section: str, **fields: Any) -> Run:
    return dataclasses.replace(RUN, **{section: dataclasses.replace(getattr(RUN, section), **fields)})


def independent(sigma: float, units: int, law: str, mean: float, noise: float | None) -> float:
    """What dp_accounting says of the best of a random number of runs, each with a noised score where there is one."""
    step = dp.PoissonSampledDpEvent(16 / units, dp.GaussianDpEvent(sigma))
    parts = [dp.SelfComposedDpEvent(step, 6)] + ([] if noise is None else [dp.GaussianDpEvent(noise)])
    accountant = RdpAccountant()
    accountant.compose(dp.dp_event.RepeatAndSelectDpEvent(dp.ComposedDpEvent(tuple(parts)), mean, SHAPES[law]))
    return float(accountant.get_epsilon(DELTA))


@pytest.mark.parametrize(("law", "score"), list(itertools.product(SHAPES, ("public", "held-out"))))
def test_the_whole_search_is_charged(law: str, score: str) -> None:
    """Guarantee: the epsilon of a search is that of the best of a random number of trials, their scores included.

    By an accountant that knows nothing of ours.
    """
    planned = plan_search(RUN, search(distribution=law, score=score), data_set())
    units, noise = (ROWS, None) if score == "public" else (54, math.sqrt(6) / 2)
    assert planned.spent.epsilon == pytest.approx(independent(1.5, units, law, 3.0, noise), rel=1e-9)
    assert (planned.spent.accountant, planned.spent.delta, planned.spent.neighbouring) == ("rdp", DELTA, "add-remove")
    assert epsilon(planned.ledger, DELTA).epsilon == planned.spent.epsilon
    assert planned.spent.epsilon > planned.plan.spent.epsilon > epsilon(planned.plan.at_end, DELTA, "pld").epsilon * 0.999
    assert (planned.plan.num_units, planned.aside, planned.score_noise) == (units, ROWS - units, noise)


@pytest.mark.parametrize(
    ("change", "score"), [({"noise_multiplier": None, "epsilon": 4.0}, "held-out"), ({"steps": None, "epsilon": 9.0}, "public")]
)
def test_a_target_is_that_of_the_whole_search(change: dict[str, Any], score: str) -> None:
    asked = search(score=score, score_noise=8.0)
    target = change["epsilon"]
    planned = plan_search(changed("mechanism", **change), asked, data_set())
    assert planned.spent.epsilon <= target
    m = planned.trial.mechanism
    assert (m.epsilon, m.noise_multiplier, m.steps) == (None, planned.plan.noise_multiplier, planned.plan.steps)
    wasteful = dataclasses.replace(m, noise_multiplier=m.noise_multiplier * 0.98, steps=m.steps + 1)  # type: ignore[operator]
    worse = dataclasses.replace(RUN, mechanism=wasteful)
    assert plan_search(worse, asked, data_set()).spent.epsilon > target, "no more noise than it takes"


def test_a_target_that_would_be_passed_is_refused() -> None:
    alone = plan_search(RUN, search(), data_set()).plan.spent.epsilon
    with pytest.raises(UsageError, match="would be passed"):
        plan_search(changed("mechanism", epsilon=alone * 1.05), search(), data_set())


def test_units_of_several_rows_are_what_is_held_out_and_counted() -> None:
    planned = plan_search(changed("mechanism", batch_size=5), search(score="held-out", held_out=0.25), data_set(units=20))
    assert (planned.aside, planned.plan.num_units, planned.settings()["held_out_units"]) == (5, 15, 5)


def test_dp_snip_is_part_of_every_trial() -> None:
    run = dataclasses.replace(RUN, sparsity=Sparsity(prune="dp-snip", prune_rate=0.5, snip_noise_multiplier=2.0))
    assert plan_search(run, search(), data_set()).spent.epsilon > plan_search(RUN, search(), data_set()).spent.epsilon
    found = plan_search(run, search(tries=("sparsity.prune_rate=0.5,0.9", "sparsity.snip_clip=1,2")), data_set())
    assert [e.what for e in found.plan.at_end.entries] == ["dp-snip", "train"]


def test_settings_that_cost_nothing_may_vary() -> None:
    tries = ("sparsity.prune=random,synflow", "sparsity.prune_rate=0.2,0.5", "sparsity.drop=random,magnitude", "sparsity.drop_rate=0.1",
             "mechanism.clip=1,2", "data.augment=crop,crop-flip", "data.views=1,2")  # fmt: skip
    assert len(plan_search(RUN, search(tries=tries), data_set()).grid) == 64


REFUSED: dict[str, tuple[Run, dict[str, Any], str]] = {
    "no score": (RUN, {"score": None}, "score is left out, but somebody must say"),
    "another score": (RUN, {"score": "private"}, "choose one of held-out, public"),
    "one trial": (RUN, {"trials_mean": 1.0}, "trials_mean is 1.0"),
    "no law": (RUN, {"distribution": "uniform"}, "choose one of geometric, logarithmic, poisson"),
    "no noise": (RUN, {"score": "held-out", "score_noise": 0.0}, "score_noise is 0.0"),
    "all held out": (RUN, {"score": "held-out", "held_out": 1.0}, "held_out is 1.0"),
    "none held out": (RUN, {"score": "held-out", "held_out": 0.001}, "leaves none in one of the parts"),
    "a batch of more than is left": (changed("mechanism", batch_size=55), {"score": "held-out"}, "there are 54 privacy units"),
    "nothing to try": (RUN, {"tries": ()}, "tune needs something to try"),
    "not private": (changed("mechanism", private=False), {}, "mechanism.private is False.*costs nothing"),
    "replace-one": (changed("mechanism", neighbouring="replace-one"), {}, "under add-remove alone"),
    "the paper's sum": (changed("mechanism", accountant="paper"), {}, "not defined for a search"),
    "tensorboard": (changed("runtime", tensorboard=True), {}, "epsilon of one trial"),
    "a bad value": (RUN, {"tries": ("optim.lr=1,-1",)}, "lr is -1.0"),
    "a bad optimiser": (RUN, {"tries": ("optim.name=SGD,Adm",)}, "optim.name is 'Adm'"),
    "a bad model": (RUN, {"tries": ("model.name=small_cnn,vgg",)}, "'vgg'"),
    "snip noise": (dataclasses.replace(RUN, sparsity=Sparsity(prune="dp-snip", prune_rate=0.5, snip_noise_multiplier=2.0)),
                   {"tries": ("sparsity.snip_noise_multiplier=1,2",)}, "every trial of a search is the same event"),
    "snip batch": (dataclasses.replace(RUN, sparsity=Sparsity(prune="dp-snip", prune_rate=0.5, snip_noise_multiplier=2.0)),
                   {"tries": ("sparsity.snip_batch_size=none,30",)}, "every trial of a search is the same event"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_search_is_refused_before_anything_is_read(kind: str) -> None:
    run, changes, words = REFUSED[kind]
    with pytest.raises(UsageError, match=words) as caught:
        plan_search(run, search(**changes), data_set())
    assert "\n" not in str(caught.value)


def test_a_public_score_needs_evaluation_data() -> None:
    with pytest.raises(UsageError, match="no evaluation data; name a split, or give --score held-out"):
        plan_search(RUN, search(), data_set(evaluation=False))
    assert plan_search(RUN, search(score="held-out"), data_set(evaluation=False)).aside == 6


def test_masks_from_files_must_fit_and_cost_the_same(tmp_path: Path) -> None:
    model = build(RUN.model, (1, 28, 28), 10)
    sparse = Sparsity(prune="random", prune_rate=0.5)
    pruned = prune(model, sparse, key(1), input_shape=(1, 28, 28))
    mask_files.save(tmp_path / "one", pruned)
    mask_files.save(tmp_path / "paid", dataclasses.replace(pruned, event=dp.GaussianDpEvent(3.0)))
    mask_files.save(tmp_path / "other", prune(build(RUN.model, (3, 32, 32), 10), sparse, key(1), input_shape=(3, 32, 32)))
    assert len(plan_search(RUN, search(tries=(f"sparsity.mask_file=none,{tmp_path}/one",)), data_set()).grid) == 2
    for name, words in (("paid", "every trial of a search is the same event"), ("other", "mask")):
        with pytest.raises(UsageError, match=words):
            plan_search(RUN, search(tries=(f"sparsity.mask_file=none,{tmp_path}/{name}",)), data_set())


def test_its_settings_are_plain_and_in_the_order_given() -> None:
    said = plan_search(RUN, search(tries=("optim.momentum=0,0.5", "optim.lr=1,2"), score="held-out"), data_set()).settings()
    assert list(said["tried"]) == ["optim.momentum", "optim.lr"]
    assert (said["candidates"], said["distribution"], said["trials_mean"], said["score"]) == (4, "geometric", 3.0, "held-out")
    assert (said["held_out_units"], said["score_noise_multiplier"], said["keep_trials"]) == (6, math.sqrt(6) / 2, False)


def test_a_search_is_one_entry_of_a_ledger() -> None:
    planned = plan_search(RUN, search(), data_set())
    assert [(e.count, e.what) for e in planned.ledger.entries] == [
        (1, "the best of a random number of trials (geometric, mean 3)")
    ]
    assert Ledger.from_json(planned.ledger.to_json()) == planned.ledger


def test_the_numbers_of_the_page_are_what_its_code_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "tuning.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "docs/tuning.md", "exec"), {})
    *rows, alone, three, thirty = capsys.readouterr().out.splitlines()
    assert len(rows) == 3 and all(row in page for row in rows)
    assert all(number in page for number in (*alone.split(), three, thirty)) and len(alone.split()) == 4
