"""Whole runs: what they leave, that stopping and killing change nothing, and that nothing private is published."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sparsedp import beginning, disk, environment, keys, private_metrics, statement, training
from sparsedp.config import Data, Mechanism, Model, Optim, Run, Runtime, Sparsity
from sparsedp.data import check, load
from sparsedp.dp.accounting import epsilon
from sparsedp.dp.ledger import Ledger
from sparsedp.errors import UsageError
from sparsedp.finished import finished_run
from sparsedp.prune_run import prune_alone
from sparsedp.state import FRESH
from sparsedp.training import Stopped, train
from tests import whole_runs
from tests.data.pictures import made_up, save_folder
from tests.replay import assert_no_leak, replayed, tensors_of
from tests.whole_runs import SPARSE, STEPS, UNITS, Heard, after, go, images, in_a_child, published, same_public, stopped, tiny


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_runs.quick_accounting(monkeypatch)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return images(tmp_path / "data")


def ledger_of(folder: Path) -> Ledger:
    return Ledger.from_json(json.loads((folder / "public" / "ledger.json").read_text()))


def charged(folder: Path) -> int:
    return sum(e.count for e in ledger_of(folder).entries if e.what == "train")


KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "random": {"sparsity": SPARSE},
    "magnitude": {"sparsity": Sparsity(drop="magnitude", drop_rate=0.5), "optim": {"momentum": 0.9, "weight_decay": 0.01}},
    "synflow-zero": {"sparsity": Sparsity(prune="synflow", prune_rate=0.5, pruned_weights="zero", drop="magnitude", drop_rate=0.3)},
    "snip-keep": {"sparsity": Sparsity(prune="dp-snip", prune_rate=0.5, snip_noise_multiplier=2.0)},
    "snip-zero-filter": {
        "sparsity": Sparsity(prune="dp-snip", prune_rate=0.4, snip_noise_multiplier=2.0, snip_batch_size=20, pruned_weights="zero",
                             granularity="filter", drop="random", drop_rate=0.3),
    },
    "views": {"data": {"augment": "crop-flip", "views": 3, "pad": 2}, "optim": {"name": "Adam", "lr": 0.01, "schedule": "cosine"}},
    "exact": {"mechanism": {"arithmetic": "exact", "steps": 4, "batch_size": 4}, "model": Model(train="head")},
    "head": {"model": Model(train="head"), "optim": {"name": "NAdam", "lr": 0.01, "average_decay": None}},
    "bf16": {"runtime": {"autocast": "bf16"}, "sparsity": SPARSE},
    "not-private": {"mechanism": Mechanism(private=False, steps=STEPS, batch_size=16), "optim": {"momentum": 0.9, "schedule": "linear", "warmup": 2}},
    "rprop": {"optim": {"name": "Rprop", "lr": 0.01}, "sparsity": Sparsity(drop="random", drop_rate=0.7, granularity="filter")},
    "wrn": {"model": Model(name="wrn_10_1"), "data": {"augment": "crop", "pad": 1}, "sparsity": SPARSE, "mechanism": {"batch_size": 4, "steps": 4}},
    "fast": {"runtime": {"engine": "fast"}, "sparsity": SPARSE},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(tmp_path: Path, data: Path, kind: str) -> None:
    run = tiny(data, **KINDS[kind])
    steps = run.mechanism.steps
    assert steps is not None
    for step in (1, steps - 2):
        stopped(run, tmp_path / "cut", step)
    if kind == "fast":  # its plan is measured: another run has the same bits under the same plan
        (tmp_path / "whole" / "private").mkdir(parents=True)
        shutil.copy(tmp_path / "cut" / "private" / "plans.json", tmp_path / "whole" / "private")
    whole = go(run, tmp_path / "whole")
    again = go(run, tmp_path / "cut")
    same_public(tmp_path / "whole", tmp_path / "cut")
    assert again.ledger == whole.ledger
    for one, other in ((whole.model, again.model), (whole.average, again.average)):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert all(torch.equal(t, tensors_of(other)[n]) for n, t in tensors_of(one).items())
    if run.mechanism.private:
        assert charged(tmp_path / "cut") == steps


def test_a_recorded_plan_serves_again(tmp_path: Path, data: Path) -> None:
    """With the fast engine, a step that is done again after a crash has the bits that it had."""
    run = tiny(data, **KINDS["fast"])
    stopped(run, tmp_path / "run", 3)
    plans = json.loads((tmp_path / "run" / "private" / "plans.json").read_text())
    assert list(plans) == ["0"] and plans["0"]["engine"] == "fast"
    ends = []
    for name in ("one", "other"):
        shutil.copytree(tmp_path / "run", tmp_path / name)
        ends.append(go(run, tmp_path / name))
        assert charged(tmp_path / name) == STEPS
    same_public(tmp_path / "one", tmp_path / "other")


@pytest.mark.parametrize("step", range(1, STEPS))
def test_stopping_at_any_step_changes_nothing(tmp_path: Path, data: Path, step: int) -> None:
    run = tiny(data, sparsity=SPARSE, runtime={"evaluate_every": 2, "checkpoint_every": 3}, optim={"momentum": 0.9})
    go(run, tmp_path / "whole")
    stopped(run, tmp_path / "cut", step)
    go(run, tmp_path / "cut")
    same_public(tmp_path / "whole", tmp_path / "cut")
    lines = (tmp_path / "cut" / "public" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 4, 6]


class Faults:
    """Dies at the n-th write of the run: before it, in its middle, or right after."""

    def __init__(self, at: int, phase: str) -> None:
        self.at, self.phase, self.seen, self.real = at, phase, 0, disk._replace

    def __call__(self, path: Path, content: bytes, mode: int) -> None:
        self.seen += 1
        if self.seen == self.at and self.phase == "before":
            whole_runs.die()
        if self.seen == self.at and self.phase == "torn":
            (path.parent / f".{path.name}.abcd{disk.UNFINISHED}").write_bytes(content[: len(content) // 2])
            whole_runs.die()
        self.real(path, content, mode)
        if self.seen == self.at:
            whole_runs.die()


CRASHES = tiny(Path(), sparsity=SPARSE, runtime={"evaluate_every": 2}, optim={"name": "Adam", "lr": 0.01})


def crashing(data: Path) -> Run:
    return tiny(data, sparsity=CRASHES.sparsity, runtime=CRASHES.runtime, optim=CRASHES.optim)


@pytest.mark.slow
def test_dying_at_any_write_loses_nothing_and_counts_everything(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash at every third write of a run, in three ways in turn; each taken up to the end that it would have had."""
    run = crashing(data)
    counter = Faults(-1, "")
    monkeypatch.setattr(disk, "_replace", counter)
    go(run, tmp_path / "whole")
    writes = counter.seen
    assert writes > 15
    for number, at in enumerate(range(1, writes + 1, 3)):
        folder = tmp_path / f"at-{at}"
        monkeypatch.setattr(disk, "_replace", Faults(at, ("before", "torn", "after")[number % 3]))
        assert in_a_child(lambda folder=folder: go(run, folder)) == signal.SIGKILL
        monkeypatch.setattr(disk, "_replace", counter.real)
        if (folder / "public" / "summary.json").exists():
            assert at == writes
            continue
        went = charged(folder) if (folder / "public" / "ledger.json").exists() else 0
        go(run, folder)
        assert went <= charged(folder) == STEPS
        same_public(tmp_path / "whole", folder)
        assert not list(folder.rglob(f".*{disk.UNFINISHED}"))


@pytest.mark.slow
def test_being_killed_again_and_again_at_random_moments(tmp_path: Path, data: Path) -> None:
    run = crashing(data)
    began = time.monotonic()
    go(run, tmp_path / "whole")
    longest = time.monotonic() - began
    own, kills = random.Random(3), 0
    for _ in range(5):
        went = charged(tmp_path / "cut") if (tmp_path / "cut" / "public" / "ledger.json").exists() else 0
        kills += killed_after(run, tmp_path / "cut", own.uniform(0.1, 0.7) * longest)
        if (tmp_path / "cut" / "public" / "summary.json").exists():
            break
        assert not (tmp_path / "cut" / "public" / "ledger.json").exists() or charged(tmp_path / "cut") >= went
    else:
        go(run, tmp_path / "cut")
    assert kills
    same_public(tmp_path / "whole", tmp_path / "cut")
    assert charged(tmp_path / "cut") == STEPS


def killed_after(run: Run, folder: Path, seconds: float) -> bool:
    """Train in a child that is killed after so many seconds; whether it had not ended by then."""

    def work() -> None:
        signal.signal(signal.SIGALRM, lambda *_: whole_runs.die())
        signal.setitimer(signal.ITIMER_REAL, seconds)
        go(run, folder)

    return in_a_child(work) == signal.SIGKILL


def test_another_machine_takes_fresh_noise_pays_again_and_keeps_the_target(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny(data, mechanism=Mechanism(epsilon=6.0, steps=STEPS, batch_size=16, delta=1e-3), runtime={"checkpoint_every": 10})
    assert in_a_child(lambda: dying_in_step(monkeypatch, run, tmp_path / "run", 4)) == signal.SIGKILL
    assert charged(tmp_path / "run") == 4
    here = environment.fingerprint(torch.device("cpu"))
    monkeypatch.setattr(beginning, "fingerprint", lambda device: {**here, "torch": "another"})
    result = go(run, tmp_path / "run")
    assert [e.what for e in result.ledger.entries] == ["train", f"{FRESH}: 4 steps are charged again", "train"]
    assert charged(tmp_path / "run") == STEPS
    assert epsilon(result.ledger, 1e-3).epsilon <= 6.0
    assert "4 steps are charged again" in (tmp_path / "run" / "public" / "privacy.md").read_text()
    whole = go(run, tmp_path / "whole")
    assert not torch.equal(whole.model.classifier.weight, result.model.classifier.weight)


def dying_in_step(monkeypatch: pytest.MonkeyPatch, run: Run, folder: Path, step: int) -> None:
    """Die right after the ledger has counted a step."""
    from sparsedp.rundir import RunDir

    real = RunDir.write_ledger

    def write(self: RunDir, ledger: Ledger) -> None:
        real(self, ledger)
        if sum(e.count for e in ledger.entries if e.what == "train") == step:
            whole_runs.die()

    monkeypatch.setattr(RunDir, "write_ledger", write)
    go(run, folder)


def test_a_key_that_was_lost_is_a_fresh_one_and_is_paid_for(tmp_path: Path, data: Path) -> None:
    """Also where the weights come from a file, so that the key shows in nothing but the noise."""
    go(tiny(data), tmp_path / "first")
    run = tiny(data, runtime={"key": None}, model={"weights": str(tmp_path / "first" / "public" / "model.safetensors")})
    stopped(run, tmp_path / "run", 3)
    (tmp_path / "run" / "private" / "key").unlink()
    result = go(run, tmp_path / "run")
    assert any(e.what.startswith(FRESH) for e in result.ledger.entries)
    assert charged(tmp_path / "run") == STEPS


def test_data_that_changed_meanwhile_are_other_data(tmp_path: Path, data: Path) -> None:
    run = tiny(data)
    stopped(run, tmp_path / "run", 3)
    images(data, seed=5)
    assert any(e.what.startswith(FRESH) for e in go(run, tmp_path / "run").ledger.entries)


def smoothed(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output, targets, reduction="none", label_smoothing=0.3)


def test_another_loss_takes_fresh_noise(tmp_path: Path, data: Path) -> None:
    """Under the same noise the difference of two releases of a step would be that of two sums, bare."""
    run = tiny(data, runtime={"checkpoint_every": 10})
    assert in_a_child(lambda: go(run, tmp_path / "run", stop=whole_runs.die_after(3))) == signal.SIGKILL
    ledger = go(run, tmp_path / "run", loss=smoothed).ledger
    assert [e.what for e in ledger.entries] == ["train", f"{FRESH}: 3 steps are charged again", "train"]


@pytest.mark.parametrize("engine", ["functional", "fast"])
def test_a_plan_that_was_lost_takes_fresh_noise_once(tmp_path: Path, data: Path, engine: str) -> None:
    run = tiny(data, runtime={"checkpoint_every": 10, "engine": engine})
    assert in_a_child(lambda: go(run, tmp_path / "run", stop=whole_runs.die_after(3))) == signal.SIGKILL
    (tmp_path / "run" / "private" / "plans.json").unlink()
    stopped(run, tmp_path / "run", 1)
    ledger = go(run, tmp_path / "run").ledger
    assert [e.what for e in ledger.entries] == ["train", f"{FRESH}: 3 steps are charged again", "train"]


def test_an_old_ledger_is_refused(tmp_path: Path, data: Path) -> None:
    run = tiny(data)
    stopped(run, tmp_path / "run", 2)
    old = (tmp_path / "run" / "public" / "ledger.json").read_bytes()
    stopped(run, tmp_path / "run", 2)
    (tmp_path / "run" / "public" / "ledger.json").write_bytes(old)
    with pytest.raises(UsageError, match="counts 2 steps, but the checkpoint has taken 4: it is older than the run"):
        go(run, tmp_path / "run")


def test_a_damaged_checkpoint_falls_back_and_still_ends_the_same(tmp_path: Path, data: Path) -> None:
    run = tiny(data)
    go(run, tmp_path / "whole")
    stopped(run, tmp_path / "cut", 5)
    newest = max((tmp_path / "cut" / "private" / "state").glob("*.state"))
    newest.write_bytes(newest.read_bytes()[:100])
    said = Heard()
    go(run, tmp_path / "cut", reporter=said)
    assert any("step-00000005.state is damaged" in note for note in said.notes)
    same_public(tmp_path / "whole", tmp_path / "cut")


def test_what_the_operator_is_told_is_kept_for_one_who_was_not_there(tmp_path: Path, data: Path) -> None:
    listener = Heard()
    go(tiny(data, mechanism={"delta": 0.1}), tmp_path / "run", reporter=listener)
    kept = (tmp_path / "run" / "private" / "notes.txt").read_text("utf-8").splitlines()
    assert kept == listener.notes and any("delta" in line for line in kept)


def test_where_things_lie_is_not_published(tmp_path: Path) -> None:
    """A path may name a person or an illness. It stays in private/, where `evaluate` finds it."""
    place = images(tmp_path / "clinic of Dr Secret" / "scans")
    go(tiny(place), tmp_path / "first")
    weights = tmp_path / "clinic of Dr Secret" / "start.safetensors"
    shutil.copy(tmp_path / "first" / "public" / "model.safetensors", weights)
    go(tiny(place, model={"weights": str(weights)}), tmp_path / "run")
    for path in (tmp_path / "run" / "public").rglob("*"):
        assert path.is_dir() or b"Secret" not in path.read_bytes(), path.name
    run, dataset, _, _ = finished_run(tmp_path / "run", None, average=False)
    assert run.data.dir == str(place) and dataset.evaluation is not None


def test_a_finished_run_leaves_no_key_and_is_not_taken_up_again(tmp_path: Path, data: Path) -> None:
    run = tiny(data, runtime={"key": None})
    go(run, tmp_path / "run")
    assert sorted(p.name for p in (tmp_path / "run" / "private").iterdir()) == ["id", "lock", "notes.txt", "where.json"]
    with pytest.raises(UsageError, match="is finished"):
        go(run, tmp_path / "run")


def test_what_a_run_publishes(tmp_path: Path, data: Path) -> None:
    result = go(tiny(data, sparsity=SPARSE, runtime={"key": None}), tmp_path / "run")
    public = tmp_path / "run" / "public"
    assert sorted(p.name for p in public.iterdir()) == [
        "average.safetensors", "config.json", "ledger.json", "mask.safetensors", "metrics.jsonl", "model.safetensors", "model_card.md",
        "privacy.json", "privacy.md", "summary.json",
    ]  # fmt: skip
    summary = json.loads((public / "summary.json").read_text())
    assert summary == json.loads(json.dumps(dict(result.summary)))
    assert summary["stamp"] == "differentially private" and summary["private"] is True
    assert summary["epsilon"] == epsilon(result.ledger, 1e-3).epsilon
    assert (summary["steps"], summary["batch_size"], summary["num_units"]) == (STEPS, 16, UNITS)
    assert 0 <= summary["accuracy"] <= 1 and 0 <= summary["accuracy_average"] <= 1
    plain = load_file(public / "model.safetensors")
    assert all(torch.equal(plain[n], t) for n, t in result.model.state_dict().items())
    assert summary["throughput"] == pytest.approx(STEPS * 16 / summary["seconds"], rel=0.05), (
        "of expected batches, not of realised ones"
    )


def test_pruned_weights_stay_through_the_run(tmp_path: Path, data: Path) -> None:
    for how in ("keep", "zero"):
        sparsity = Sparsity(prune="random", prune_rate=0.5, pruned_weights=how, drop="magnitude", drop_rate=0.2)  # type: ignore[arg-type]
        changes: dict[str, Any] = {"sparsity": sparsity, "optim": {"momentum": 0.9, "weight_decay": 0.1}}
        start = go(tiny(data, **changes, mechanism={"steps": 1}), tmp_path / f"{how}-1")
        result = go(tiny(data, **changes), tmp_path / how)
        from sparsedp.mask_files import load as load_mask

        masks = load_mask(tmp_path / how / "public" / "mask.safetensors", result.model).masks
        assert masks
        for model, first in ((result.model, start.model), (result.average, start.average)):
            assert model is not None and first is not None
            for name, mask in masks.items():
                now, then = dict(model.named_parameters())[name], dict(first.named_parameters())[name]
                if how == "zero":
                    assert not now[~mask].any()
                else:
                    assert torch.equal(now[~mask], then[~mask]) and now[~mask].any()
                assert not torch.equal(now[mask], then[mask])


NEIGHBOURS: dict[str, Callable[[Path], Path]] = {
    "other-image": lambda place: images(place, seed=1),
    "other-label": whole_runs.relabelled,
    "noisier-image": lambda place: images(place, seed=2, row=30),
}


@pytest.mark.parametrize(
    "kind", ["random", "magnitude", "synflow-zero", "snip-keep", "snip-zero-filter", "views", "exact", "head", "bf16"]
)
def test_neighbours_publish_the_same_bytes_under_frozen_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Record and replay: all of public/, and what is left of private/, is the same for neighbouring data sets."""
    place, number = tmp_path / "data", iter(range(9))

    def one(make: Callable[[Path], Path]) -> Any:
        make(place)
        folder = tmp_path / f"run-{next(number)}"
        changes = dict(KINDS[kind])
        runtime = {"evaluate_every": 2, **changes.pop("runtime", {})}
        result = go(tiny(place, runtime=runtime, **changes), folder)
        return [tensors_of(result.model), published(folder), sorted(p.name for p in folder.rglob("*"))]

    makes = [images, *NEIGHBOURS.values()]
    frozen, results = replayed(monkeypatch, [lambda make=make: one(make) for make in makes])
    assert len(frozen.runs[0]) >= 4
    assert_no_leak(frozen, results, units_replaced=True)
    assert any(
        not torch.equal(a.total.tensors[n], b.total.tensors[n]) for a, b in zip(frozen.runs[0], frozen.runs[1], strict=True)
        for n in a.total.tensors
    ), "the changed image was never in a batch: the test shows nothing"  # fmt: skip


def test_neighbours_publish_the_same_bytes_when_stopped_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, number = tmp_path / "data", iter(range(9))

    def one(make: Callable[[Path], Path]) -> Any:
        make(place)
        folder = tmp_path / f"run-{next(number)}"
        run = tiny(place, sparsity=SPARSE)
        stopped(run, folder, 3)
        result = go(run, folder)
        return [tensors_of(result.model), published(folder)]

    frozen, results = replayed(monkeypatch, [lambda make=make: one(make) for make in (images, *NEIGHBOURS.values())])
    assert_no_leak(frozen, results, units_replaced=True)


@pytest.mark.parametrize("chosen", ["open sesame 42", None])
def test_no_key_is_in_any_public_file(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None) -> None:
    secret = keys.chosen(chosen or "stands for the operating system").secret
    if chosen is None:
        monkeypatch.setattr(keys, "fresh", lambda: keys.Key(secret, given=False))
    run = tiny(data, runtime={"key": chosen, "evaluate_every": 2, "unsafe_metrics": True})
    for folder in (tmp_path / "cut", tmp_path / "run"):
        stopped(run, folder, 3) if folder.name == "cut" else go(run, folder)
        for path in (folder / "public").rglob("*"):
            content = path.read_bytes() if path.is_file() else b""
            for hidden in (secret, secret.hex().encode(), secret[:8], secret[:8].hex().encode(), b"sesame"):
                assert hidden not in content, path
    stamp = json.loads((tmp_path / "run" / "public" / "summary.json").read_text())["stamp"]
    assert stamp.startswith("not private: the key was chosen" if chosen else "differentially private")


def test_private_metrics_are_off_unless_asked_for_and_never_public(tmp_path: Path, data: Path) -> None:
    changes: dict[str, Any] = {"sparsity": SPARSE}
    go(tiny(data, runtime={"evaluate_every": 2}, **changes), tmp_path / "off")
    assert not (tmp_path / "off" / "private" / "metrics.jsonl").exists()
    run = tiny(data, runtime={"evaluate_every": 2, "unsafe_metrics": True}, **changes)
    stopped(run, tmp_path / "on", 3)
    result = go(run, tmp_path / "on")
    lines = [json.loads(line) for line in (tmp_path / "on" / "private" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert all(line["stamp"] == private_metrics.STAMP and line["train_rows"] == UNITS for line in lines)
    assert len({line["realised_batch"] for line in lines}) > 1
    off, on = published(tmp_path / "off"), published(tmp_path / "on")
    assert off.keys() == on.keys()
    assert all(off[n] == on[n] for n in off if not n.endswith((".json", "card.md", "privacy.md"))), "asking changes no weight"
    training_set = load(run.data).train
    batch = training_set.read(torch.arange(UNITS))
    result.model.eval()
    with torch.no_grad():
        from sparsedp.data.augment import Augmentation, evaluation_view

        spec = Augmentation("none", load(run.data).normalisation)
        right = (result.model(evaluation_view(batch.pixels, spec)).argmax(1) == batch.labels).float().mean()
    assert lines[-1]["train_accuracy"] == pytest.approx(float(right))


def test_nothing_of_any_one_batch_is_published_or_told(tmp_path: Path, data: Path) -> None:
    said = Heard()
    go(tiny(data, runtime={"evaluate_every": 2}), tmp_path / "run", reporter=said)
    assert (
        said.steps == list(range(1, STEPS + 1))
        and said.notes == ["trained: all 26010 parameters."]
        or said.steps == list(range(1, STEPS + 1))
    )
    words = ("realised", "gradient_norm", "clipped_fraction", "train_accuracy", "train_loss", "checksum_of_data")
    for name, content in published(tmp_path / "run").items():
        assert not any(word.encode() in content for word in words), name
    digest = check(load(tiny(data).data)).checksum
    assert not any(digest[:16].encode() in content for content in published(tmp_path / "run").values())


@pytest.mark.parametrize(("changes", "stamp"), [
    ({"mechanism": Mechanism(private=False, steps=2, batch_size=16)}, "not private: no clipping and no noise"),
    ({"mechanism": Mechanism(noise_multiplier=0.0, steps=2, batch_size=16)}, "not private: something was released without noise"),
    ({"sparsity": Sparsity(prune="snip-not-private", prune_rate=0.5)}, "not private: pruned by SNIP without noise"),
])  # fmt: skip
def test_what_is_not_private_is_stamped(tmp_path: Path, data: Path, changes: dict[str, Any], stamp: str) -> None:
    summary = go(tiny(data, runtime={"key": None}, **changes), tmp_path / "run").summary
    assert summary["stamp"] == stamp and summary["private"] is False
    written = json.loads((tmp_path / "run" / "public" / "summary.json").read_text())
    assert written["epsilon"] is None
    assert stamp in (tmp_path / "run" / "public" / "privacy.md").read_text()
    assert stamp in (tmp_path / "run" / "public" / "model_card.md").read_text()


SNIP = Sparsity(prune="dp-snip", prune_rate=0.5, snip_noise_multiplier=2.0)


@pytest.mark.parametrize(
    ("prune", "key", "private"), [("dp-snip", "known", False), ("dp-snip", None, True), ("random", "known", True)]
)
def test_a_mask_made_with_a_key_of_ones_own_makes_no_private_run(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, prune: Any, key: str | None, private: bool
) -> None:
    """Who knows the key takes the noise off DP-SNIP's scores. A random mask reads no data, whoever draws it."""
    monkeypatch.setenv("SPARSEDP_HOME", str(tmp_path / "home"))
    sparsity = SNIP if prune == "dp-snip" else Sparsity(prune=prune, prune_rate=0.5)
    made = prune_alone(tiny(data, sparsity=sparsity, runtime={"key": key}), tmp_path / "mask")
    assert made.key_given == (key is not None) and made.report.to_json()["private"] is private
    summary = go(
        tiny(data, sparsity=Sparsity(mask_file=str(tmp_path / "mask")), runtime={"key": None}), tmp_path / "run"
    ).summary
    stated = json.loads((tmp_path / "run" / "public" / "privacy.json").read_text())
    said = "differentially private" if private else (
        "not private: the key of the mask was chosen by the user, so the mask's noise can be computed again"
    )  # fmt: skip
    assert (summary["stamp"], summary["private"]) == (said, private) and stated["stamp"] == said
    assert (stated["profile"] is None) != private


def test_what_the_statement_cannot_tell_is_refused_before_anything_is_spent(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Any:
        raise UsageError("no profile.")

    monkeypatch.setattr(statement, "profile", failing)
    with pytest.raises(UsageError, match="no profile"):
        go(tiny(data, sparsity=SNIP), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_next_to_no_noise_is_told_as_such(tmp_path: Path, data: Path) -> None:
    """The loss is too wide for any grid: the statement says the epsilon of millions, and that attacks can be right."""
    go(tiny(data, mechanism={"noise_multiplier": 1e-3}, runtime={"key": None}), tmp_path / "run")
    stated = json.loads((tmp_path / "run" / "public" / "privacy.json").read_text())
    assert stated["epsilon"] > 1e6 and stated["profile"]["best_attack"][0]["true_positive_rate_at_most"] == 1


def test_weights_that_are_not_masked_are_told(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = Heard()
    go(tiny(data, sparsity=SPARSE), tmp_path / "run", reporter=said)
    assert not any("not masked" in note for note in said.notes)
    from sparsedp.dp import masks

    real = masks.maskable_layers
    monkeypatch.setattr(training, "maskable_layers", lambda *given: real(*given)[1:])
    go(tiny(data, sparsity=SPARSE), tmp_path / "other", reporter=said)
    assert "not masked, and take part in every step: conv1.weight; give maskable patterns to mask them." in said.notes


def test_without_clipping_and_noise_it_is_sgd(tmp_path: Path, data: Path) -> None:
    run = tiny(data, mechanism=Mechanism(private=False, steps=3, batch_size=UNITS), optim=Optim(lr=0.3, average_decay=None))
    result = go(run, tmp_path / "run")
    start = go(
        tiny(data, mechanism=Mechanism(private=False, steps=1, batch_size=UNITS), optim=Optim(lr=1e-30, average_decay=None)),
        tmp_path / "start",
    )
    model = start.model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    from sparsedp.data.augment import Augmentation, evaluation_view

    dataset = load(run.data)
    batch = dataset.train.read(torch.arange(UNITS))
    inputs = evaluation_view(batch.pixels, Augmentation("none", dataset.normalisation))
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), batch.labels).backward()
        optimizer.step()
    assert all(torch.allclose(t, tensors_of(result.model)[n], atol=1e-5) for n, t in tensors_of(model).items())


def test_what_goes_wrong_before_the_first_event_leaves_nothing_behind(tmp_path: Path, data: Path) -> None:
    labels = data / "train-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:8] + labels.read_bytes()[8:].replace(b"\x09", b"\x00"))
    with pytest.raises(UsageError, match="the class '9' has no training image"):
        go(tiny(data), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "run-home").exists()


@pytest.mark.parametrize(("changes", "said"), [
    ({"optim": {"name": "SGDD"}}, "optim.name is 'SGDD', which is not known; choose one of ASGD"),
    ({"optim": {"name": "Adam", "momentum": 0.9}}, "optim.momentum is 0.9, but Adam has no such setting"),
    ({"runtime": {"engine": "quick"}}, "engine is 'quick', which is not known"),
    ({"sparsity": {"snip_batch_size": 61, "prune": "dp-snip", "prune_rate": 0.5, "snip_noise_multiplier": 2.0}}, "snip_batch_size is 61, but there"),
    ({"sparsity": {"maskable": ("conv*", "nosuch*"), "drop": "random", "drop_rate": 0.5}}, r"maskable pattern is 'nosuch\*'"),
    ({"sparsity": {"drop": "random", "drop_rate": 0.5}, "model": Model(train="*bias")}, "drop_rate is 0.5, but the model has no weight"),
    ({"mechanism": {"arithmetic": "exact", "noise_multiplier": 1500.0}}, "coordinates is .* has a grid for at most 7635; drop more"),
    ({"runtime": {"device": "abacus"}}, "device is 'abacus', but this machine has no such device"),
    ({"model": Model(name="wrn")}, "wrn"),
    ({"mechanism": {"batch_size": 61}}, "batch_size is 61, but there are 60 privacy units"),
    ({"data": {"name": "mnits"}}, "data.name is 'mnits'"),
    ({"data": {"dir": "/nowhere/at/all"}}, "nowhere"),
])  # fmt: skip
def test_a_setting_that_cannot_work_is_refused_before_pruning_spends(
    tmp_path: Path, data: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        go(tiny(data, **{"sparsity": SNIP, **changes}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_of_images_and_embedded_mnist_train(tmp_path: Path) -> None:
    for split, seed in (("train", 0), ("test", 1)):
        pixels, labels = made_up(36, side=16, classes=3, seed=seed)
        save_folder(tmp_path / "images" / split, pixels, labels, ("ant", "bee", "cat"))
    own = Run(
        data=Data(name="folder", dir=str(tmp_path / "images"), size=14, augment="crop-flip", pad=1),
        mechanism=Mechanism(noise_multiplier=1.0, steps=3, batch_size=8, delta=1e-3), optim=Optim(average_decay=None),
        runtime=Runtime(workers=1, engine="functional"),
    )  # fmt: skip
    stopped(own, tmp_path / "own", 2)
    assert go(own, tmp_path / "own").summary["num_units"] == 36
    mnist = Run(
        data=Data(name="mnist", limit=200, evaluation="none"), mechanism=Mechanism(noise_multiplier=1.0, steps=2, batch_size=32, delta=1e-3),
        runtime=Runtime(engine="functional"),
    )  # fmt: skip
    summary = go(mnist, tmp_path / "mnist").summary
    assert summary["num_units"] == 200 and summary["accuracy"] is None
    assert "No evaluation data were declared" in (tmp_path / "mnist" / "public" / "model_card.md").read_text()


@pytest.mark.parametrize(
    ("error", "why"),
    [(OSError(errno.EMFILE, os.strerror(errno.EMFILE)), os.strerror(errno.EMFILE)), (MemoryError(), "memory ran out")],
)
def test_an_image_that_could_not_be_read_for_a_while_stops_the_run_and_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, why: str
) -> None:
    """Counted as zero it would be back when the step is done again: two sums under one noise differ by one record."""
    pixels, labels = made_up(24, side=14, channels=1, classes=2)
    save_folder(tmp_path / "images" / "train", pixels, labels, ("a", "b"))
    run = tiny(tmp_path, data=Data(name="folder", dir=str(tmp_path / "images"), size=14, channels=1, evaluation="none"))
    go(run, tmp_path / "whole")
    failing, opened = False, Path.open

    def flaky(self: Path, *how: Any, **named: Any) -> Any:
        if failing and self.name == "00007.png":
            raise error
        return opened(self, *how, **named)

    class Begun(training.Silence):
        def step(self, taken: int) -> None:
            nonlocal failing
            failing = taken >= 2

    monkeypatch.setattr(Path, "open", flaky)
    with pytest.raises(UsageError, match=f"^An image could not be used.*{why}.*at no new cost") as caught:
        go(run, tmp_path / "run", reporter=Begun())
    assert "00007" not in str(caught.value)
    assert charged(tmp_path / "run") >= 3
    failing = False
    go(run, tmp_path / "run")
    same_public(tmp_path / "whole", tmp_path / "run")
    assert charged(tmp_path / "run") == STEPS


def test_patients_of_a_manifest_are_the_units(tmp_path: Path) -> None:
    pixels, labels = made_up(24, side=14, channels=1, classes=2)
    save_folder(tmp_path / "m", pixels, labels, ("ill", "well"))
    rows = ["path,label,unit,split"]
    for number, label in enumerate(labels):
        name = ("ill", "well")[label]
        rows.append(f"{name}/{number:05d}.png,{name},patient {number // 4},{'test' if number >= 20 else 'train'}")
    (tmp_path / "m" / "manifest.csv").write_text("\n".join(rows) + "\n")
    run = Run(
        data=Data(name="manifest", dir=str(tmp_path / "m" / "manifest.csv"), size=14, channels=1),
        mechanism=Mechanism(noise_multiplier=1.0, steps=3, batch_size=2, delta=1e-3), runtime=Runtime(engine="functional"),
    )  # fmt: skip
    result = go(run, tmp_path / "run")
    assert result.summary["num_units"] == 5
    assert "unit number" in (tmp_path / "run" / "public" / "privacy.md").read_text()


def test_a_loss_of_ones_own(tmp_path: Path, data: Path) -> None:
    def focal(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        chance = output.softmax(1).gather(1, labels[:, None])[:, 0]
        return -((1 - chance) ** 2) * chance.log()

    one, other = go(tiny(data), tmp_path / "one"), go(tiny(data), tmp_path / "other", loss=focal)
    assert not torch.equal(one.model.classifier.weight, other.model.classifier.weight)
    with pytest.raises(UsageError, match="it must return one number per row"):
        go(tiny(data), tmp_path / "bad", loss=lambda output, labels: output.sum())
    assert not (tmp_path / "bad" / "public" / "ledger.json").exists()


def test_a_full_disk_in_mid_run_stops_it_with_a_sentence_and_it_goes_on_when_there_is_room(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny(data)
    go(run, tmp_path / "whole")
    real, writes = disk._replace, 0

    def filling(path: Path, content: bytes, mode: int) -> None:
        nonlocal writes
        writes += 1
        if writes > 12:
            raise OSError(28, "No space left on device")
        real(path, content, mode)

    monkeypatch.setattr(disk, "_replace", filling)
    with pytest.raises(UsageError, match="cannot be written .No space left on device.; free space"):
        go(run, tmp_path / "cut")
    monkeypatch.setattr(disk, "_replace", real)
    go(run, tmp_path / "cut")
    same_public(tmp_path / "whole", tmp_path / "cut")
    assert charged(tmp_path / "cut") == STEPS


def test_running_out_of_memory_in_a_run_is_recorded_and_survived(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparsedp.dp import clipping

    real, failed = clipping.reference, 0

    def short(model: Any, loss: Any, rows: Any, masks: Any, clip: float) -> Any:
        nonlocal failed
        if len(rows.unit) > 5 and failed < 3 and not torch.equal(rows.inputs, rows.inputs.round()):
            failed += 1
            raise MemoryError
        return real(model, loss, rows, masks, clip)

    run = tiny(data, runtime={"engine": "reference", "micro_batch": 40})
    from sparsedp.engines import choice

    monkeypatch.setitem(choice._BUILDERS, "reference", lambda *given: (short, choice.Plan(engine="reference")))
    result = go(run, tmp_path / "run")
    assert failed == 3
    assert charged(tmp_path / "run") == STEPS
    assert result.summary["steps"] == STEPS


def test_the_average_is_taken_once_a_step(tmp_path: Path, data: Path) -> None:
    run = tiny(data, optim={"average_decay": 0.5}, mechanism={"steps": 2})
    start, first, second = (
        go(tiny(data, optim={"average_decay": 0.5, "lr": lr}, mechanism={"steps": steps}), tmp_path / f"{steps}-{lr}").model
        for steps, lr in ((1, 1e-30), (1, 0.5), (2, 0.5))
    )
    result = go(run, tmp_path / "run")
    assert result.average is not None
    for name, w0 in tensors_of(start).items():
        w1, w2 = tensors_of(first)[name], tensors_of(second)[name]
        average = w0 + (w1 - w0) * (1 - 1 / 10)
        average = average + (w2 - average) * (1 - 2 / 11)
        assert torch.allclose(average, tensors_of(result.average)[name], atol=1e-6)


def test_stopping_says_how_far_it_went(tmp_path: Path, data: Path) -> None:
    with pytest.raises(Stopped, match=f"stopped after 2 of {STEPS} steps"):
        train(tiny(data), tmp_path / "run", stop=after(2))
    assert np.isclose(charged(tmp_path / "run"), 2)
