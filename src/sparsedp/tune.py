"""A search for good settings that is charged for: the best of a random number of trials (Papernot and Steinke 2022).

Every trial is an ordinary private run into a folder of its own below `private/`; only the best one's public part is published, with
a statement of what the whole search cost. How many trials there are follows from the search's key, so a search that was stopped
or killed goes on with the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparsedp import data, disk, keys, training, tuned_outputs
from sparsedp.assembly import load_data
from sparsedp.budget_file import BudgetFile, place
from sparsedp.config import Run
from sparsedp.dp import tuning
from sparsedp.dp.randomness import Key
from sparsedp.errors import UsageError
from sparsedp.holdout import Part, right_rows, split
from sparsedp.outputs import number
from sparsedp.rundir import RunDir, describe
from sparsedp.search import Planned, Search, plan_search
from sparsedp.state import fresh_keys
from sparsedp.training import Stopped

GONE = ".gone"  # ends the name of a trial's folder that is being erased


@dataclass(frozen=True)
class Tuned:
    """What a finished search leaves. `summary` is what stands in public/summary.json; without a trial it has no model."""

    summary: Mapping[str, Any]
    path: Path


def tune(
    run: Run,
    search: Search,
    run_dir: str | Path,
    *,
    reporter: training.Reporter | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Tuned:
    """Carry a search out into the folder `run_dir`; an unfinished search with the same settings there is taken up again.

    Guarantee: of trials that did not win, and of how many there were, nothing is published.

    Guarantee: a search is charged whole before its first trial reads anything.
    """
    reporter = reporter or training.Silence()
    dataset = load_data(run)
    planned = plan_search(run, search, dataset)
    folder = _open(Path(run_dir), planned)
    try:
        try:
            checked = data.check(dataset)  # of all units: those that are held out are as private as the others
            _same_data(folder, checked.checksum)
            key, held = folder.key(run.runtime.key), None
            if search.score == "held-out":
                dataset, held = split(dataset, search.held_out, key)
        except BaseException:
            folder.discard()
            raise
        whole = (
            f"the whole search spends epsilon {number(planned.spent.epsilon)}; what is shown below is one trial's by itself."
        )
        for line in (whole, *planned.spent.warnings, *checked.sentences()):
            reporter.note(line)
            folder.note(line)
        trial = training.Trial(dataset, checked, planned.plan)
        return _Searching(planned, folder, key, trial, held, reporter, stop).carry_out()
    finally:
        folder.close()


def _open(path: Path, planned: Planned) -> RunDir:
    """The folder of the search: new, or the one of the same search, with its key."""
    folder = RunDir.open(path, planned.run, search=True)
    try:
        if folder.read_ledger().entries:
            _same_search(folder, planned)
        else:
            disk.write_json(folder.base, describe(planned.run), mode=0o600)
            disk.write_json(folder.settings, planned.settings())
    except BaseException:
        folder.discard()
        folder.close()
        raise
    return folder


def _same_search(folder: RunDir, planned: Planned) -> None:
    """Refuse a folder in which something else was begun: every trial is the same mechanism, and the ledger says which."""
    path = folder.path
    if not folder.settings.exists():
        raise UsageError(f"The run in {path} is not a search; take it up with 'sparsedp train', or name another --run-dir.")
    recorded = disk.read_json(folder.settings, "the settings of the search")
    if json.dumps(recorded) != json.dumps(planned.settings()) or folder.read_ledger() != planned.ledger:
        raise UsageError(
            f"The search in {path} was started with other settings; give the same ones, or name another --run-dir."
        )
    if not (folder.private / "key").exists():
        raise UsageError(
            f"The key of the search in {path} is lost, and its number of trials with it; start a new search in another folder, and "
            "count this one as spent."
        )


def _same_data(folder: RunDir, checksum: str) -> None:
    """Refuse training data that were changed since the first trial: every trial is the same mechanism."""
    path, found = folder.private / "data.json", {"checksum": checksum}
    if not folder.read_ledger().entries:
        disk.write_json(path, found, mode=0o600)
    elif disk.read_json(path, "the checksum of the data") != found:
        raise UsageError(
            f"The training data are not those that the search in {folder.path} began with, and all its trials must see the same; "
            "restore them, or start a new search in another folder and count this one as spent."
        )


@dataclass(frozen=True, eq=False)
class _Searching:
    planned: Planned
    folder: RunDir
    key: Key
    trial: training.Trial
    held: Part | None
    reporter: training.Reporter
    stop: Callable[[], bool]

    def carry_out(self) -> Tuned:
        p, run = self.planned, self.planned.run
        entry = replace(p.plan, at_end=p.ledger, spent=p.spent)
        where = (place(run.data), self.trial.dataset.name, self.folder.name)
        with BudgetFile(*where, entry, run.mechanism.delta, self.reporter, not self.key.given) as account:
            self.folder.write_ledger(p.ledger)  # before the first trial reads anything
            for left in self.folder.trials.glob(f"*{GONE}"):
                disk.erase_all(left)
            best = self._best()
            account.spent(p.ledger)
            together = account.together()
        facts = tuned_outputs.Facts(p.settings(), p.ledger, p.spent, p.plan.spent, together, self.key.given)
        summary = tuned_outputs.publish(self.folder.public, best, facts)
        self.folder.finish()
        return Tuned(summary, self.folder.path)

    def _best(self) -> Path | None:
        """The public folder of the trial with the highest score, the earlier one where two are equal; None if none was drawn."""
        best, highest = None, -float("inf")
        for which in range(
            tuning.number_of_trials(self.planned.search.distribution, self.planned.search.trials_mean, self.key)
        ):
            path = self.folder.trials / str(which)
            self._train(path, which)
            score = self._score(path, which)
            if best is None or score > highest:
                best, highest = path / "public", score
        return best

    def _train(self, path: Path, number: int) -> None:
        """A whole run. One that went on under a fresh key is another mechanism than the rest: nobody saw it, and it is done anew."""
        while True:
            if not (path / "public" / "summary.json").exists():
                self._go_on(path, number)
            ended = RunDir(path)
            ended.finish()  # of a run that died right after its summary the key is there still
            if not fresh_keys(ended.read_ledger()):
                return
            gone = path.rename(path.with_name(f"{path.name}{GONE}"))  # at once: half of it would be the folder of no run
            disk.erase_all(gone)

    def _go_on(self, path: Path, number: int) -> None:
        try:
            training.train(self._candidate(number), path, reporter=_OfTrial(self.reporter), stop=self.stop, trial=self.trial)
        except Stopped:
            raise Stopped("the search was stopped; the same command takes it up again.") from None

    def _candidate(self, number: int) -> Run:
        made = self.planned.grid.candidate(self.planned.trial, tuning.choice(len(self.planned.grid), self.key, number))
        given = made.runtime.key
        return made if given is None else replace(made, runtime=replace(made.runtime, key=f"{given}, trial {number}"))

    def _score(self, path: Path, number: int) -> float:
        """What the trial is compared by: of the moving average of its weights where there is one, else of the last iterate."""
        average = (path / "public" / "average.safetensors").exists()
        if self.held is None:
            name = "accuracy_average" if average else "accuracy"
            return disk.read_number(path / "public" / "summary.json", "the trial's summary", name)
        kept = path / "private" / "score.json"
        if not kept.exists():
            assert self.planned.score_noise is not None
            right, rows = self._right(path, average)
            score = tuning.noised_count(right, rows, self.planned.score_noise, self.key, number)
            disk.write_json(kept, {"score": score}, mode=0o600)
        return disk.read_number(kept, "the trial's score", "score")

    def _right(self, path: Path, average: bool) -> Any:
        from sparsedp.data.augment import Augmentation
        from sparsedp.environment import pick_device
        from sparsedp.finished import load_model

        assert self.held is not None
        run, model, _, _ = load_model(path, average)
        spec = Augmentation(run.data.augment, self.trial.dataset.normalisation, run.data.pad)
        return right_rows(model, self.held, spec, pick_device(run.runtime.device))


class _OfTrial(training.Silence):
    """Shows the steps of a trial, and not how good it is."""

    def __init__(self, reporter: training.Reporter) -> None:
        self.start, self.step, self.finish = reporter.start, reporter.step, reporter.finish  # type: ignore[method-assign]


def forecast(run: Run, search: Search) -> dict[str, Any]:
    """What a search would do and cost, before any private record is read."""
    from sparsedp import dryrun

    dataset = load_data(run)
    planned = plan_search(run, search, dataset)
    if search.score == "held-out":
        dataset, _ = split(dataset, search.held_out, keys.fresh())
    told = dryrun.forecast(planned.trial, dataset, planned.plan)
    hours = told["time"]["hours"] * search.trials_mean
    spent = {"epsilon": planned.spent.epsilon, "delta": planned.spent.delta, "epsilon_of_one_run": planned.plan.spent.epsilon}
    return {"search": {**planned.settings(), **spent, "hours_on_average": hours}, **told}
