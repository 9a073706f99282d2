"""Whole searches: the best trial is published and nothing of the others, stopping and killing change nothing, and all of it is charged."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dp_accounting as dp
import pytest
import torch
from dp_accounting.rdp import RdpAccountant

from sparsedp import beginning, cli, data, disk, keys, planning, training, tune
from sparsedp.budget_file import BudgetFile, place
from sparsedp.config import Data, Mechanism, Run, Runtime
from sparsedp.data.values import ArrayImages
from sparsedp.dp import tuning
from sparsedp.dp.ledger import Ledger
from sparsedp.errors import UsageError
from sparsedp.evaluation import Metrics
from sparsedp.rundir import RunDir
from sparsedp.search import Search
from sparsedp.state import FRESH
from sparsedp.training import Stopped
from tests import whole_runs
from tests.data.pictures import made_up, save_folder
from tests.whole_runs import STEPS, UNITS, after, go, images, in_a_child, same_public, tiny

SCRIPT = Path(__file__).parents[1] / "examples" / "recompute_epsilon.py"
MEAN, HELD = 3.0, 6
RATES = (0.25, 0.5, 1.0)
ALWAYS = {"config.json", "ledger.json", "search.json", "privacy.json", "privacy.md", "summary.json", "model_card.md", "metrics.jsonl",
          "model.safetensors", "average.safetensors"}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_runs.quick_accounting(monkeypatch)


@pytest.fixture
def place_of(tmp_path: Path) -> Path:
    return images(tmp_path / "data")


def key_for(trials: int, law: str = "geometric") -> str:
    """A text whose key says so many trials, the first two of which are different candidates."""
    for number in range(1000):
        key = keys.chosen(f"key {number}")
        if tuning.number_of_trials(law, MEAN, key) == trials and tuning.choice(3, key, 0) != tuning.choice(3, key, 1):
            return f"key {number}"
    raise AssertionError("no such key")


TWO, THREE, NONE = key_for(2), key_for(3), key_for(0, "poisson")


def asked(score: str = "public", **changes: Any) -> Search:
    return Search(**{"tries": ("optim.lr=0.25,0.5,1",), "score": score, "trials_mean": MEAN, **changes})


def run_of(place: Path, key: str | None = THREE, **changes: Any) -> Run:
    return tiny(place, **{**changes, "runtime": {"key": key, **changes.get("runtime", {})}})


def find(run: Run, search: Search, folder: Path, **more: Any) -> tune.Tuned:
    """Search into a folder, with a budget file of its own beside it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SPARSEDP_HOME", f"{folder}-home")
        return tune.tune(run, search, folder, **more)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


LEFT = {"id", "lock", "where.json"}


def left(folder: Path) -> set[str]:
    """What a finished search leaves in private/, but for what the operator was told."""
    return files(folder / "private") - {"notes.txt"}


# --- What is published --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", ["public", "held-out"])
def test_the_best_trial_is_published_and_no_other(tmp_path: Path, place_of: Path, score: str) -> None:
    """All trials are kept here, to be looked at: the published weights and settings are those of the highest score."""
    folder = tmp_path / "run"
    find(run_of(place_of), asked(score, keep_trials=True), folder)
    trials = sorted((folder / "private" / "trials").iterdir())
    assert [t.name for t in trials] == ["0", "1", "2"]
    if score == "public":
        scores = [read(t / "public" / "summary.json")["accuracy_average"] for t in trials]
    else:
        scores = [read(t / "private" / "score.json")["score"] for t in trials]
    best = trials[scores.index(max(scores))]
    for name in ("model.safetensors", "average.safetensors", "config.json"):
        assert (folder / "public" / name).read_bytes() == (best / "public" / name).read_bytes()
        assert len({(t / "public" / name).read_bytes() for t in trials}) >= 2, name
    assert files(folder / "public") == ALWAYS
    assert (
        files(folder / "private") >= {"id", "lock", "where.json"}
        and not list(folder.rglob("key"))
        and not list(folder.rglob("state"))
    )
    summary = read(folder / "public" / "summary.json")
    assert (summary["private"], summary["stamp"]) == (
        False,
        "not private: the key was chosen by the user, so the noise can be computed again",
    )
    assert summary["tuning"]["covered"] is False, "somebody may choose among the kept ones"
    drawn = [tuning.choice(3, keys.chosen(THREE), number) for number in range(3)]
    assert [read(t / "public" / "config.json")["optim"]["lr"] for t in trials] == [RATES[d] for d in drawn]
    for trial in trials:
        (entry,) = Ledger.from_json(read(trial / "public" / "ledger.json")).entries
        assert (entry.what, entry.count) == ("train", STEPS)


def test_more_trials_that_lose_change_no_published_byte(
    tmp_path: Path, place_of: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: of trials that did not win, and of how many there were, nothing is published."""
    run = run_of(place_of, runtime={"evaluate_every": 2})
    find(run, asked(), tmp_path / "three")
    real, trained = tune._Searching._score, []

    def score(self: Any, path: Path, number: int) -> float:
        trained.append(number)
        return real(self, path, number) if number < 3 else -1.0

    monkeypatch.setattr(tune._Searching, "_score", score)
    monkeypatch.setattr(tuning, "number_of_trials", lambda *_: 5)
    find(run, asked(), tmp_path / "five")
    assert trained == [0, 1, 2, 3, 4]
    same_public(tmp_path / "three", tmp_path / "five")


def test_what_is_published_stands_alone(tmp_path: Path, place_of: Path) -> None:
    """Under a key of the operating system: nothing is left in private/, no key in public/, and the statement fits the files."""
    made: list[bytes] = []
    with pytest.MonkeyPatch.context() as patched:
        fresh = keys.fresh
        patched.setattr(keys, "fresh", lambda: (made.append((k := fresh()).secret), k)[1])
        find(run_of(place_of, None), asked(), tmp_path / "run")
    public = tmp_path / "run" / "public"
    assert files(public) == ALWAYS and left(tmp_path / "run") == LEFT
    content = b"".join((public / name).read_bytes() for name in ALWAYS)
    assert len(made) >= 2
    assert not [k for k in made if k in content or k.hex().encode() in content]
    stated, summary = read(public / "privacy.json"), read(public / "summary.json")
    assert summary["stamp"] == stated["stamp"] == "differentially private" and summary["private"] is True
    for name, checksum in stated["files"].items():
        assert training.outputs.statement.digest(public / name) == checksum
    assert stated["config"] == read(public / "config.json")
    assert stated["tuning"] == summary["tuning"] and stated["tuning"]["covered"] is True
    assert stated["events"] == read(public / "ledger.json")
    lines = [json.loads(line) for line in (public / "metrics.jsonl").read_text().splitlines()]
    assert lines and all("epsilon" not in line for line in lines), "one trial's epsilon is no claim"
    page, card = (public / "privacy.md").read_text(), (public / "model_card.md").read_text()
    assert summary["tuning"]["words"] in page and summary["tuning"]["words"] in card
    assert "how many trials the search had" in " ".join(stated["not_covered"])
    assert "number of trials is published" in " ".join(stated["void_if"])


def test_held_out_units_train_nothing(tmp_path: Path, place_of: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Record and replay: with the noised scores frozen, another image of a held-out unit changes no published byte."""
    calls: list[tuple[int, int]] = []

    def frozen(right: Any, rows: Any, noise: float, key: Any, trial: int) -> float:
        calls.append((trial, len(rows)))
        return float(trial == 1)

    monkeypatch.setattr(tuning, "noised_count", frozen)
    find(run_of(place_of), asked("held-out"), tmp_path / "run")
    assert calls == [(0, HELD), (1, HELD), (2, HELD)]
    held = tuning.held_out(UNITS, HELD, keys.chosen(THREE))
    assert len(held) == HELD
    find(run_of(images(place_of, seed=5, row=int(held[2]))), asked("held-out"), tmp_path / "held")
    same_public(tmp_path / "run", tmp_path / "held")
    trained = next(row for row in range(UNITS) if row not in held)
    find(run_of(images(place_of, seed=5, row=trained)), asked("held-out"), tmp_path / "trained")
    weights = [(tmp_path / name / "public" / "model.safetensors").read_bytes() for name in ("run", "trained")]
    assert weights[0] != weights[1], "of a unit that is trained on, another image is seen"


def test_scores_are_noised_counts_of_units_that_were_held_out(
    tmp_path: Path, place_of: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The score is the count of the held-out images that the trial's average gets right, and its own draw of noise."""
    counted: list[float] = []
    real = tuning.noised_count

    def counting(right: Any, rows: Any, noise: float, key: Any, trial: int) -> float:
        counted.append(float((right / rows).sum()))
        return real(right, rows, noise, key, trial)

    monkeypatch.setattr(tuning, "noised_count", counting)
    find(run_of(place_of), asked("held-out", keep_trials=True, score_noise=2.5), tmp_path / "run")
    assert read(tmp_path / "run" / "public" / "summary.json")["tuning"]["score_noise_multiplier"] == 2.5
    scores = [read(tmp_path / "run" / "private" / "trials" / str(n) / "private" / "score.json")["score"] for n in range(3)]
    noise = [score - count for score, count in zip(scores, counted, strict=True)]
    expected = [real(torch.tensor([0]), torch.tensor([1]), 2.5, keys.chosen(THREE), n) for n in range(3)]
    assert noise == pytest.approx(expected) and len(set(noise)) == 3 and 0 not in noise
    assert all(0 <= count <= HELD and count == int(count) for count in counted)


def test_no_trial_at_all_is_an_answer_too(tmp_path: Path, place_of: Path) -> None:
    folder = tmp_path / "run"
    found = find(run_of(place_of, NONE), asked(distribution="poisson"), folder)
    assert found.summary["stamp"].startswith("no model: the number of trials was drawn as zero")
    assert files(folder / "public") == {"config.json", "ledger.json", "search.json", "summary.json"}
    assert left(folder) == LEFT
    assert found.summary["accuracy"] is None and found.summary["epsilon"] > 0
    assert found.summary["epsilon"] == independent("poisson", None)


# --- What it costs ------------------------------------------------------------------------------------------------------


def independent(law: str, noise: float | None, units: int = UNITS) -> float:
    """What dp_accounting says of the best of a random number of runs."""
    shape = {"geometric": 1.0, "logarithmic": 0.0, "poisson": float("inf")}[law]
    parts = [dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(16 / units, dp.GaussianDpEvent(1.0)), STEPS)]
    parts += [] if noise is None else [dp.GaussianDpEvent(noise)]
    accountant = RdpAccountant()
    accountant.compose(dp.dp_event.RepeatAndSelectDpEvent(dp.ComposedDpEvent(tuple(parts)), MEAN, shape))
    return float(accountant.get_epsilon(1e-3))


def test_epsilon_is_that_of_the_whole_search_and_a_third_party_finds_it_again(tmp_path: Path, place_of: Path) -> None:
    """Guarantee: the epsilon of a search is that of the best of a random number of trials, their scores included."""
    folder = tmp_path / "run"
    find(run_of(place_of, None), asked("held-out", score_noise=4.0), folder)
    summary, stated = (read(folder / "public" / name) for name in ("summary.json", "privacy.json"))
    expected = independent("geometric", 4.0, UNITS - HELD)
    assert summary["epsilon"] == stated["epsilon"] == pytest.approx(expected, rel=1e-9)
    assert (summary["accountant"], summary["delta"], stated["accountant"]["name"]) == ("rdp", 1e-3, "rdp")
    assert summary["tuning"]["epsilon_of_one_run"] < summary["epsilon"]
    assert stated["others"]["epsilon"] == {
        "pld, add-remove": None,
        "rdp, add-remove": summary["epsilon"],
        "pld, replace-one": None,
    }
    assert (stated["units"], stated["one_over_n"], stated["mechanism"]["num_units"]) == (UNITS, 1 / UNITS, UNITS - HELD)
    assert "16 expected of 54" in (folder / "public" / "privacy.md").read_text()
    assert stated["profile"]["right_at_even_odds_at_most"] > 0.5
    command = [sys.executable, "-W", "error", str(SCRIPT), str(folder / "public" / "privacy.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert not [line for line in done.stderr.splitlines() if not re.match("WARNING:absl:.* Excluding this order", line)]
    words = re.fullmatch(r"differentially private: stated ([\d.]+), computed ([\d.]+)\n", done.stdout)
    assert done.returncode == 0 and words and abs(float(words[2]) - expected) <= 1e-4


def test_the_ledger_and_the_budget_are_written_before_the_first_trial(
    tmp_path: Path, place_of: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: a search is charged whole before its first trial reads anything. Records are read before only to check them."""
    seen: list[str] = []
    checks, trains, reads = data.check, training.train, ArrayImages.read
    account = Path(f"{tmp_path / 'run'}-home") / "budgets"

    def train(*args: Any, **kwargs: Any) -> Any:
        seen.append("train")
        (entry,) = Ledger.from_json(read(tmp_path / "run" / "public" / "ledger.json")).entries
        assert isinstance(entry.event, dp.dp_event.RepeatAndSelectDpEvent) and entry.event.mean == MEAN
        (booked,) = read(next(account.glob("*.json")))["runs"].values()
        assert booked == {"finished": False, "private": False, "ledger": [*Ledger((entry,)).to_json()]}  # its key is given
        return trains(*args, **kwargs)

    def check(dataset: Any) -> Any:
        seen.append("check")
        report = checks(dataset)
        seen.append("checked")
        return report

    def reading(self: ArrayImages, rows: Any) -> Any:
        assert "train" in seen or seen[-1:] == ["check"], "a record was read before it was charged"
        return reads(self, rows)

    monkeypatch.setattr(data, "check", check)
    monkeypatch.setattr(training, "train", train)
    monkeypatch.setattr(ArrayImages, "read", reading)
    find(run_of(place_of), asked("held-out"), tmp_path / "run")
    assert seen == ["check", "checked", "train", "train", "train"]


def test_plain_runs_say_that_tuning_is_not_covered_and_the_budget_counts_everything(
    tmp_path: Path, place_of: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs and a search of three trials are three entries: a search counts as the one thing that it is."""
    monkeypatch.setenv("SPARSEDP_HOME", str(tmp_path / "home"))
    plain = tiny(place_of, runtime={"key": None})
    for name in ("one", "two"):
        training.train(plain, tmp_path / name)
    for number, name in enumerate(("one", "two"), 1):
        told = read(tmp_path / name / "public" / "privacy.json")["tuning"]
        assert told["covered"] is False and told["runs_on_this_data"] == number
        assert "choosing among runs on the same data costs more" in told["words"]
        assert (
            f"counts {number} run{'s' if number > 1 else ''} on these data, "
            in (tmp_path / name / "public" / "privacy.md").read_text()
        )
    tune.tune(run_of(place_of), asked(), tmp_path / "search")
    told = read(tmp_path / "search" / "public" / "privacy.json")["tuning"]
    assert told["covered"] is True and told["runs_on_this_data"] == 3
    two = read(tmp_path / "two" / "public" / "privacy.json")["tuning"]
    assert told["runs_not_private"] == 1 and told["epsilon_of_all"] == two["epsilon_of_all"], "this search's key was given"
    booked = read(place(plain.data))["runs"]
    assert len(booked) == 3 and all(entry["finished"] for entry in booked.values())
    assert [entry["ledger"][0]["event"]["type"] for entry in booked.values()].count("RepeatAndSelectDpEvent") == 1
    path = place(plain.data)
    path.write_text(path.read_text().replace('"private": false', '"private": true'))
    account = BudgetFile(path, "mnist", "none", planning.budget(plain, 60), plain.mechanism.delta, training.Silence())
    assert account.total() > max(told["epsilon_of_the_search"], two["epsilon_of_all"]), "a private one is part of the sum"


# --- Stopping, dying, and other people's folders ------------------------------------------------------------------------


@pytest.mark.parametrize(("score", "steps"), [("public", (1, 8)), ("held-out", (5, 6, 7))])
def test_a_search_that_was_stopped_ends_as_one_that_was_not(
    tmp_path: Path, place_of: Path, monkeypatch: pytest.MonkeyPatch, score: str, steps: tuple[int, ...]
) -> None:
    run, search = run_of(place_of), asked(score)
    find(run, search, tmp_path / "whole")
    scored: list[int] = []
    real = tuning.noised_count
    monkeypatch.setattr(tuning, "noised_count", lambda *a: (scored.append(a[-1]), real(*a))[1])
    for count in steps:
        with pytest.raises(Stopped, match="^the search was stopped; the same command takes it up again.$"):
            find(run, search, tmp_path / "cut", stop=after(count))
    assert not (tmp_path / "cut" / "public" / "summary.json").exists()
    assert files(tmp_path / "cut" / "public") == {"config.json", "ledger.json", "search.json"}, (
        "nothing of an unfinished search"
    )
    find(run, search, tmp_path / "cut")
    same_public(tmp_path / "whole", tmp_path / "cut")
    assert scored == ([0, 1, 2] if score == "held-out" else []), "noise of a score is drawn once"
    assert left(tmp_path / "cut") == LEFT


class Dies:
    """Counts the writes and the erasures of a search, and dies at the n-th: before it or after it."""

    def __init__(self, at: int, patched: pytest.MonkeyPatch) -> None:
        self.at, self.seen = at, 0
        for name in ("_replace", "erase"):
            patched.setattr(disk, name, self._watched(getattr(disk, name)))

    def _watched(self, real: Callable[..., None]) -> Callable[..., None]:
        def work(*args: Any) -> None:
            self.seen += 1
            if self.seen == self.at and self.at % 2:
                whole_runs.die()
            real(*args)
            if self.seen == self.at:
                whole_runs.die()

        return work


@pytest.mark.slow
def test_dying_at_any_write_changes_nothing(tmp_path: Path, place_of: Path) -> None:
    """At the first writes, at the last ones (publishing and erasing), and now and then between."""
    run, search = run_of(place_of, TWO, mechanism={"steps": 2}), asked("held-out")
    with pytest.MonkeyPatch.context() as patched:
        counter = Dies(-1, patched)
        find(run, search, tmp_path / "whole")
    last = counter.seen
    assert last > 60
    for at in (*range(2, 9, 3), *range(12, last - 30, 17), *range(last - 28, last + 1, 4)):
        folder = tmp_path / f"at-{at}"
        with pytest.MonkeyPatch.context() as patched:
            Dies(at, patched)
            assert in_a_child(lambda folder=folder: find(run, search, folder)) != 0
        if (folder / "public" / "summary.json").exists():
            with pytest.raises(UsageError, match="is finished"):
                find(run, search, folder)
        else:
            find(run, search, folder)
        same_public(tmp_path / "whole", folder)
        assert left(folder) == LEFT, f"left after dying at {at} of {last}"


def test_a_trial_on_another_machine_is_done_anew(tmp_path: Path, place_of: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be another mechanism than the rest. Its folder goes at once: what is left of it is no trial's."""
    run, search = run_of(place_of), asked(keep_trials=True)
    find(run, search, tmp_path / "whole")
    with pytest.raises(Stopped):
        find(run, search, tmp_path / "cut", stop=after(STEPS + 3))
    began = read(tmp_path / "cut" / "private" / "trials" / "1" / "public" / "ledger.json")
    here = beginning.fingerprint
    monkeypatch.setattr(beginning, "fingerprint", lambda device: {**here(device), "torch": "another"})
    real = disk.erase_all
    monkeypatch.setattr(disk, "erase_all", lambda folder: whole_runs.die())
    assert in_a_child(lambda: find(run, search, tmp_path / "cut")) != 0
    monkeypatch.setattr(disk, "erase_all", real)
    left = tmp_path / "cut" / "private" / "trials"
    assert sorted(p.name for p in left.iterdir()) == ["0", "1.gone"]
    assert any(row["what"].startswith(FRESH) for row in read(left / "1.gone" / "public" / "ledger.json"))
    find(run, search, tmp_path / "cut")
    assert sorted(p.name for p in left.iterdir()) == ["0", "1", "2"]
    assert began[0]["count"] < STEPS
    same_public(tmp_path / "whole", tmp_path / "cut")


def test_a_trial_that_ended_under_a_fresh_key_right_before_a_crash_is_done_anew(
    tmp_path: Path, place_of: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, search = run_of(place_of), asked(keep_trials=True)
    with pytest.raises(Stopped):
        find(run, search, tmp_path / "cut", stop=after(3))
    monkeypatch.setattr(tune, "fresh_keys", lambda ledger: whole_runs.die())
    assert in_a_child(lambda: find(run, search, tmp_path / "cut")) != 0
    monkeypatch.undo()
    whole_runs.quick_accounting(monkeypatch)
    ended = tmp_path / "cut" / "private" / "trials" / "0" / "public"
    (ended / "ledger.json").write_text(json.dumps(with_fresh_key(read(ended / "ledger.json"))))
    find(run, search, tmp_path / "cut")
    assert [row["what"] for row in read(ended / "ledger.json")] == ["train"]


def with_fresh_key(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [*rows, {"what": f"{FRESH}: 1 steps are charged again", "event": {"type": "NoOpDpEvent"}, "count": 1}]


@pytest.fixture
def begun(tmp_path: Path, place_of: Path) -> Path:
    with pytest.raises(Stopped):
        find(run_of(place_of), asked("held-out"), tmp_path / "begun", stop=after(2))
    return tmp_path / "begun"


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "values": ({}, {"tries": ("optim.lr=0.25,0.5",)}, "was started with other settings"),
    "score": ({}, {"score": "public"}, "was started with other settings"),
    "law": ({}, {"distribution": "poisson"}, "was started with other settings"),
    "mean": ({}, {"trials_mean": 4.0}, "was started with other settings"),
    "kept": ({}, {"keep_trials": True}, "was started with other settings"),
    "score's noise": ({}, {"score_noise": 3.0}, "was started with other settings"),
    "run": ({"optim": {"momentum": 0.5}}, {}, "was started with another configuration .optim.momentum"),
    "key": ({"runtime": {"key": "other"}}, {}, "runtime.key is not the one"),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_an_unfinished_search_goes_on_with_the_same_settings_alone(begun: Path, place_of: Path, kind: str) -> None:
    run, search, words = OTHERS[kind]
    before = {name: (begun / name).read_bytes() for name in files(begun)}
    with pytest.raises(UsageError, match=words):
        find(run_of(place_of, **run), asked(**{"score": "held-out", **search}), begun)
    assert {name: (begun / name).read_bytes() for name in files(begun)} == before


def test_the_order_of_what_is_tried_is_part_of_a_search(tmp_path: Path, place_of: Path) -> None:
    """The number of a candidate means another one in another order."""
    tries = ("optim.lr=0.25,0.5", "optim.momentum=0,0.5")
    with pytest.raises(Stopped):
        find(run_of(place_of), asked(tries=tries), tmp_path / "run", stop=after(2))
    with pytest.raises(UsageError, match="was started with other settings"):
        find(run_of(place_of), asked(tries=tries[::-1]), tmp_path / "run")


def test_all_trials_see_the_same_data(begun: Path, place_of: Path) -> None:
    images(place_of, seed=3)
    with pytest.raises(UsageError, match="The training data are not those that the search in .* began with"):
        find(run_of(place_of), asked("held-out"), begun)


def test_a_search_without_its_key_does_not_begin_anew(begun: Path, place_of: Path) -> None:
    (begun / "private" / "key").unlink()
    with pytest.raises(UsageError, match="The key of the search in .* is lost, and its number of trials with it"):
        find(run_of(place_of), asked("held-out"), begun)


def test_a_search_and_a_run_do_not_take_each_other_up(tmp_path: Path, begun: Path, place_of: Path) -> None:
    """A run there would write its own steps over the ledger of the search."""
    ledger = (begun / "public" / "ledger.json").read_bytes()
    with pytest.raises(UsageError, match="is that of a search; take it up with 'sparsedp tune'"):
        go(run_of(place_of), begun)
    assert (begun / "public" / "ledger.json").read_bytes() == ledger
    whole_runs.stopped(run_of(place_of), tmp_path / "plain", 2)
    with pytest.raises(UsageError, match="is not a search; take it up with 'sparsedp train'"):
        find(run_of(place_of), asked(), tmp_path / "plain")
    assert not (tmp_path / "plain" / "public" / "search.json").exists()


def patients(place: Path) -> Run:
    """Twelve patients of three images each, ill or well."""
    pixels, labels = made_up(44, 14, 1, classes=2)
    save_folder(place, pixels, labels, ("ill", "well"))
    rows = ["path,label,unit,split"]
    for number, label in enumerate(labels):
        name = ("ill", "well")[label]
        rows.append(
            f"{name}/{number:05d}.png,{name},{f'visitor {number},test' if number >= 36 else f'patient {number % 12},train'}"
        )
    (place / "manifest.csv").write_text("\n".join(rows) + "\n")
    return Run(
        data=Data(name="manifest", dir=str(place / "manifest.csv"), size=14, channels=1),
        mechanism=Mechanism(noise_multiplier=1.0, steps=3, batch_size=2, delta=1e-3),
        runtime=Runtime(engine="functional", key=THREE, device="cpu"),
    )


def test_patients_are_held_out_with_all_their_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, search = patients(tmp_path / "data"), asked("held-out", held_out=0.25)
    scored: list[list[int]] = []
    real = tuning.noised_count
    monkeypatch.setattr(tuning, "noised_count", lambda *a: (scored.append(a[1].tolist()), real(*a))[1])
    summary = find(run, search, tmp_path / "run").summary
    assert (summary["num_units"], summary["tuning"]["held_out_units"], scored) == (9, 3, [[3, 3, 3]] * 3)
    stated = read(tmp_path / "run" / "public" / "privacy.json")
    assert (stated["units"], stated["unit"]) == (12, "all training rows with one unit number")


def test_data_that_are_refused_leave_nothing_behind(tmp_path: Path) -> None:
    """The check names the file, of a patient who would be held out too."""
    run = patients(tmp_path / "data")
    number = int(tuning.held_out(12, 3, keys.chosen(THREE))[0])
    (broken,) = (tmp_path / "data").glob(f"*/{number:05d}.png")
    broken.write_bytes(b"no image")
    with pytest.raises(UsageError, match=f"the file is .*{number:05d}.png"):
        find(run, asked("held-out", held_out=0.25), tmp_path / "run")
    assert not (tmp_path / "run").exists() and not Path(f"{tmp_path / 'run'}-home").exists()


class Hears(whole_runs.Heard):
    """Must never be told how good a trial is."""

    def evaluated(self, taken: int, results: dict[str, Metrics]) -> None:  # type: ignore[override]
        raise AssertionError("how good a trial is was shown")


def test_the_operator_sees_steps_and_not_how_good_a_trial_is(tmp_path: Path, place_of: Path) -> None:
    heard = Hears()
    find(run_of(place_of, runtime={"evaluate_every": 2}), asked(), tmp_path / "run", reporter=heard)
    assert heard.steps == [*range(1, STEPS + 1)] * 3
    assert "the whole search spends epsilon" in heard.notes[0]


def test_two_searches_at_once_are_refused(tmp_path: Path, begun: Path, place_of: Path) -> None:
    folder = RunDir(begun)
    held = disk.lock(folder.private / "lock")
    assert held is not None
    before = (begun / "public" / "config.json").read_bytes()
    with pytest.raises(UsageError, match="is being trained by another process"):
        find(run_of(place_of), asked("held-out"), begun)
    os.close(held)
    assert (begun / "public" / "config.json").read_bytes() == before


def test_a_forecast_reads_no_record_and_says_what_the_search_costs(
    place_of: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a private record was read")

    monkeypatch.setattr(ArrayImages, "read", refuse)
    told = tune.forecast(run_of(place_of, None), asked("held-out", score_noise=4.0))
    assert told["search"]["epsilon"] == pytest.approx(independent("geometric", 4.0, UNITS - HELD), rel=1e-9)
    assert told["search"]["epsilon_of_one_run"] == told["privacy"]["epsilon"] < told["search"]["epsilon"]
    assert told["search"]["hours_on_average"] == pytest.approx(MEAN * told["time"]["hours"])
    assert not (home / "budgets").exists()


# --- The command --------------------------------------------------------------------------------------------------------


def command(place: Path, folder: Path, *more: str) -> list[str]:
    return [
        "tune", "smoke", "--try", "optim.lr=0.5,1", "--trials-mean", "3", "--data.dir", str(place), "--mechanism.steps", "2",
        "--mechanism.batch-size", "16", "--mechanism.epsilon", "None", "--mechanism.noise-multiplier", "1.0", "--mechanism.delta", "1e-3",
        "--runtime.engine", "functional", "--runtime.device", "cpu", "--run-dir", str(folder), *more,
    ]  # fmt: skip


def test_the_command_says_what_the_search_found_and_cost(
    tmp_path: Path, place_of: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command(place_of, tmp_path / "run", "--score", "public")) == 0
    out, err = capsys.readouterr()
    summary = read(tmp_path / "run" / "public" / "summary.json")
    assert err == "" and [line.split()[0] for line in out.splitlines()] == ["accuracy", "epsilon", "search", "time", "written"]
    assert summary["tuning"]["words"] in out and f"{summary['epsilon']:.4g} at delta 0.001 (rdp, add-remove)" in out
    assert cli.main(["evaluate", str(tmp_path / "run"), "--average", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == summary["accuracy_average"]
    assert cli.main(command(place_of, tmp_path / "run", "--score", "public")) == 2
    assert "is finished; name another --run-dir" in capsys.readouterr().err


def test_the_command_answers_in_json_and_with_1_where_no_trial_was_drawn(
    tmp_path: Path, place_of: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    poisson = ("--score", "held-out", "--distribution", "poisson", "--runtime.key", NONE)
    assert cli.main(command(place_of, tmp_path / "run", *poisson, "--json")) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"run_dir": str(tmp_path / "run"), **read(tmp_path / "run" / "public" / "summary.json")}
    assert cli.main(command(place_of, tmp_path / "again", *poisson)) == 1
    assert "no model: the number of trials was drawn as zero" in capsys.readouterr().out


def test_a_dry_run_of_a_search_touches_nothing(
    tmp_path: Path, place_of: Path, capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    assert cli.main(command(place_of, tmp_path / "run", "--score", "held-out", "--dry-run", "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["search"]["held_out_units"] == HELD and told["privacy"]["num_units"] == UNITS - HELD
    assert not (tmp_path / "run").exists() and not (home / "budgets").exists()
