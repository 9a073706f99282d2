"""A search before any private record is read: what is tried, how it is scored, and the noise at which it meets its target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from sparsedp import keys, mask_files, training
from sparsedp.assembly import assemble
from sparsedp.config import Run
from sparsedp.data import DataSet
from sparsedp.dp import tuning
from sparsedp.dp.accounting import Spent, epsilon, parts_of
from sparsedp.dp.ledger import Ledger
from sparsedp.errors import UsageError, one_of, require
from sparsedp.grid import Grid, grid_of
from sparsedp.holdout import held_out_units
from sparsedp.planning import Budget, budget, ledger_at_end
from sparsedp.prune_run import before_training


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is tried, how many trials are drawn, and how they are scored."""

    tries: tuple[str, ...]
    """Settings and their values, as 'optim.lr=1,2,4'. Every trial draws one value of each."""
    score: Literal["public", "held-out"] | None = None
    """public: accuracy on the evaluation split, which the user declares public; held-out: on units taken from the training data."""
    trials_mean: float = 10.0
    distribution: tuning.Law = "geometric"
    held_out: float = 0.1
    score_noise: float | None = None
    """Deviation of the Gaussian noise on the count of held-out units that are right; left out, half the root of their number."""
    keep_trials: bool = False

    def __post_init__(self) -> None:
        if self.score is None:
            raise UsageError(
                "score is left out, but somebody must say what trials are compared on; give --score public if the evaluation split "
                "may be seen by anyone, or --score held-out to take units from the training data."
            )
        one_of("score", self.score, ("public", "held-out"))
        tuning.check_law(self.distribution, self.trials_mean)
        noise = self.score_noise
        require(noise is None or 0 < noise <= 65536, "score_noise", noise, "it must lie above zero, up to 65536", "10 is usual")

    def public(self, units: int) -> tuple[int, float | None]:
        """Of a data set of so many units: how many are trained on, and the noise of a score."""
        if self.score == "public":
            return units, None
        aside = held_out_units(units, self.held_out)
        return units - aside, self.score_noise or aside**0.5 / 2

    def whole(self, noise: float | None) -> Callable[[Ledger], Ledger]:
        """From the ledger of one trial to that of the search."""
        return lambda trial: tuning.search(trial, self.distribution, self.trials_mean, noise)


@dataclass(frozen=True)
class Planned:
    """A search before any record is read. `trial` has its noise and its steps; every candidate has the same."""

    search: Search
    run: Run
    trial: Run
    grid: Grid
    plan: Budget
    """Of one trial; what `spent` says is the cost of one trial alone."""
    ledger: Ledger
    spent: Spent
    score_noise: float | None
    aside: int
    """How many units are put aside to score on."""

    def settings(self) -> dict[str, Any]:
        """The public settings of the search."""
        s = self.search
        return {
            "tried": self.grid.to_json(), "candidates": len(self.grid), "distribution": s.distribution, "trials_mean": s.trials_mean,
            "score": s.score, "held_out_units": self.aside, "score_noise_multiplier": self.score_noise, "keep_trials": s.keep_trials,
        }  # fmt: skip


def plan_search(run: Run, search: Search, dataset: DataSet) -> Planned:
    """Solve for what was left out, so that the whole search meets the target; refuse candidates that would cost something else.

    Guarantee: the epsilon of a search is that of the best of a random number of trials, their scores included.
    """
    _refuse(run, search, dataset)
    grid = grid_of(run, search.tries)
    for _ in grid.candidates(run):
        pass  # a value that breaks a rule is told before the noise is worked out
    units, noise = search.public(dataset.train.num_units)
    whole, m, s = search.whole(noise), run.mechanism, run.sparsity
    solved = budget(run, units, before_training(run), whole)
    mechanism = replace(m, epsilon=None, noise_multiplier=solved.noise_multiplier, steps=solved.steps)
    snip = replace(s, snip_noise_multiplier=solved.snip_noise_multiplier, snip_epsilon=None, snip_share=None)
    trial = replace(run, mechanism=mechanism, sparsity=snip)
    one = replace(solved, spent=epsilon(solved.at_end, m.delta, m.accountant, m.neighbouring, units), target=None)
    ledger = whole(solved.at_end)
    spent = epsilon(ledger, m.delta, "rdp", m.neighbouring, dataset.train.num_units)
    planned = Planned(search, run, trial, grid, one, ledger, spent, noise, dataset.train.num_units - units)
    _check_candidates(planned, dataset)
    return planned


def _refuse(run: Run, search: Search, dataset: DataSet) -> None:
    m = run.mechanism
    require(
        m.private, "mechanism.private", m.private, "a search without privacy costs nothing to charge for", "use train in a loop"
    )
    require(m.neighbouring == "add-remove", "mechanism.neighbouring", m.neighbouring, "a search is accounted for under add-remove alone",
            "use add-remove")  # fmt: skip
    require(
        m.accountant != "paper", "mechanism.accountant", m.accountant, "the paper's sum is not defined for a search", "use rdp"
    )
    require(not run.runtime.tensorboard, "runtime.tensorboard", True, "its files tell the epsilon of one trial", "leave it out")
    if search.score == "public" and dataset.evaluation is None:
        raise UsageError("score is 'public', but the run declares no evaluation data; name a split, or give --score held-out.")


def _check_candidates(planned: Planned, dataset: DataSet) -> None:
    """Every candidate can be built, and its trial is the same event; so nothing is refused after something was spent."""
    units, trial = planned.plan.num_units, planned.trial
    expected = parts_of(planned.plan.at_end)
    models: list[tuple[Any, Any]] = []
    for candidate in planned.grid.candidates(trial):
        if parts_of(ledger_at_end(candidate, units, before_training(candidate))) != expected:
            raise UsageError(
                "--try varies what a trial costs (pre-pruning that reads the data in some candidates alone, or with other noise), but "
                "every trial of a search is the same event; try only settings that leave the cost as it is."
            )
        built = (candidate.model, candidate.data)
        known = next((model for key, model in models if key == built), None)
        if known is None:
            known = assemble(candidate, dataset, keys.fresh()).model
            models.append((built, known))
        training.refuse_early(candidate, known)
        if candidate.sparsity.mask_file is not None:
            mask_files.load(candidate.sparsity.mask_file, known)
