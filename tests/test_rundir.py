"""The run's folder: whose it is, what may be in public/, and what is gone when the run has ended."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparsedp import disk, rundir
from sparsedp.config import Data, Mechanism, Optim, Run, Runtime, Sparsity
from sparsedp.dp.ledger import Ledger, gaussian_event
from sparsedp.engines import Plan
from sparsedp.errors import UsageError
from sparsedp.recipes import RECIPES, recipe
from sparsedp.rundir import RunDir

RUN = Run(data=Data(limit=10), mechanism=Mechanism(epsilon=1.0, steps=4, batch_size=5))


def reopened(folder: RunDir) -> RunDir:
    """As the next process finds it. `folder` is closed by then."""
    folder.close()
    return RunDir.open(folder.path, RUN)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunDir]:
    made = RunDir.open(tmp_path / "run", RUN)
    yield made
    made.close()


def test_a_new_folder_has_two_parts_and_one_is_the_owners_alone(folder: RunDir) -> None:
    assert sorted(p.name for p in folder.path.iterdir()) == ["private", "public"]
    assert stat.S_IMODE(folder.private.stat().st_mode) == 0o700
    assert json.loads((folder.public / "config.json").read_text()) == rundir.describe(RUN)


def test_one_process_at_a_time(folder: RunDir) -> None:
    with pytest.raises(UsageError, match="is being trained by another process; wait for it, or name another --run-dir"):
        RunDir.open(folder.path, RUN)
    folder.close()
    RunDir.open(folder.path, RUN).close()


@pytest.mark.parametrize(("changed", "said"), [
    (dataclasses.replace(RUN, optim=Optim(lr=0.3)), r"optim.lr: 1.0, now 0.3"),
    (dataclasses.replace(RUN, data=Data(limit=11)), "data.limit: 10, now 11"),
    (dataclasses.replace(RUN, mechanism=Mechanism(epsilon=2.0, steps=4, batch_size=5)), "mechanism.epsilon: 1.0, now 2.0"),
    (dataclasses.replace(RUN, sparsity=Sparsity(drop="random", drop_rate=0.5)), "sparsity.drop: 'none', now 'random'; sparsity.drop_rate"),
    (dataclasses.replace(RUN, runtime=Runtime(micro_batch=3)), "runtime.micro_batch: None, now 3"),
    (dataclasses.replace(RUN, runtime=Runtime(key="x")), "runtime.key: None, now 'chosen by the user'"),
    (dataclasses.replace(RUN, runtime=Runtime(unsafe_metrics=True)), "runtime.unsafe_metrics: False, now True"),
], ids=lambda x: "" if isinstance(x, Run) else x.split(":")[0])  # fmt: skip
def test_another_configuration_is_refused_by_name(folder: RunDir, changed: Run, said: str) -> None:
    folder.close()
    with pytest.raises(UsageError, match=f"started with another configuration .*{said}.*resume it with the same one"):
        RunDir.open(folder.path, changed)
    RunDir.open(folder.path, RUN).close()


@pytest.mark.parametrize(
    "changes", [{"evaluate_every": 7}, {"checkpoint_every": 1}, {"workers": 1}, {"tensorboard": True}, {"export": ("onnx",)}]
)
def test_what_changes_no_number_may_change(folder: RunDir, changes: dict[str, Any]) -> None:
    folder.close()
    RunDir.open(folder.path, dataclasses.replace(RUN, runtime=Runtime(**changes))).close()


def test_the_run_of_a_config_is_the_run() -> None:
    for name in RECIPES:
        run = recipe(name)
        assert rundir.run_of(json.loads(json.dumps(rundir.describe(run)))) == run


@pytest.mark.parametrize(
    "spoilt",
    [
        {}, [], {"data": 3}, {**rundir.describe(RUN), "optim": {"speed": 1}}, {**rundir.describe(RUN), "model": None},
        {**rundir.describe(RUN), "mechanism": {"epsilon": 1.0, "steps": 1, "clip": 10**400}},
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_read_is_named(spoilt: Any) -> None:
    with pytest.raises(UsageError, match="configuration cannot be read.*use the version of sparsedp that wrote it"):
        rundir.run_of(spoilt)


@pytest.mark.parametrize(
    "section, name, odd",
    [
        ("data", "name", 3), ("data", "limit", 1.5), ("data", "limit", True), ("model", "name", None), ("mechanism", "private", 1),
        ("mechanism", "steps", 4.0), ("mechanism", "steps", True), ("mechanism", "accountant", "none"), ("optim", "lr", True),
        ("optim", "lr", 10**400), ("optim", "momentum", "0"), ("runtime", "threads", "2"), ("runtime", "export", [1]),
        ("runtime", "device", ["cpu"]),
    ],
)  # fmt: skip
def test_a_setting_of_another_kind_is_refused_by_name(section: str, name: str, odd: Any) -> None:
    described = rundir.describe(RUN)
    described[section] = {**described[section], name: odd}
    with pytest.raises(
        UsageError, match=rf"^(the recorded {section}\.)?{name} is .*\.$|^The configuration cannot be read \(.*\); use .*\.$"
    ):
        rundir.run_of(described)


def test_a_config_that_breaks_a_rule_is_refused() -> None:
    described = rundir.describe(RUN)
    described["mechanism"] = {**described["mechanism"], "clip": -1.0}
    with pytest.raises(UsageError, match="clip is -1.0"):
        rundir.run_of(described)


def test_other_peoples_folders_are_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="holds other files; name a new or empty folder"):
        RunDir.open(tmp_path, RUN)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UsageError, match="which is a file"):
        RunDir.open(tmp_path / "thesis.tex", RUN)
    with pytest.raises(UsageError, match="cannot be written"):
        RunDir.open(tmp_path / "thesis.tex" / "run", RUN)


def test_a_run_that_lost_its_config_is_not_begun_anew_over_its_ledger(folder: RunDir) -> None:
    folder.write_ledger(Ledger().append("train", gaussian_event(0.5, 1.0)))
    folder.close()
    (folder.public / "config.json").unlink()
    with pytest.raises(UsageError, match="lost its public/config.json; restore it.*count this one as spent"):
        RunDir.open(folder.path, RUN)


def test_a_finished_run_is_refused_and_its_key_erased(folder: RunDir) -> None:
    """Also where the process died between the summary and the erasing."""
    folder.key(None)
    (folder.public / "summary.json").write_text("{}")
    folder.close()
    with pytest.raises(UsageError, match="is finished; name another --run-dir, or look at it with 'sparsedp evaluate"):
        RunDir.open(folder.path, RUN)
    assert not (folder.private / "key").exists()
    assert not folder.states.exists()


def test_the_key_is_fresh_kept_for_the_owner_alone_and_erased(folder: RunDir, tmp_path: Path) -> None:
    key = folder.key(None)
    path = folder.private / "key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(key.secret) == 32 and not key.given
    again = reopened(folder)
    assert again.key(None) == key
    again.close()
    other = RunDir.open(tmp_path / "other", RUN)
    assert other.key(None).secret != key.secret
    other.close()
    twin = tmp_path / "twin"
    os.link(path, twin)
    folder.write_plans({0: Plan(engine="fast")})
    (folder.states / "step-00000001.state").write_bytes(b"x")
    folder.finish()
    assert twin.read_bytes() == bytes(32), "overwritten, and not only unlinked"
    assert sorted(p.name for p in folder.private.iterdir()) == ["lock", "where.json"]
    folder.finish()


def test_a_damaged_key_is_refused(folder: RunDir) -> None:
    folder.key(None)
    (folder.private / "key").write_bytes(b"short")
    again = reopened(folder)
    with pytest.raises(UsageError, match="is damaged; start a new run, what this one spent stays spent"):
        again.key(None)
    again.close()


def test_another_chosen_key_is_refused(folder: RunDir) -> None:
    first = folder.key("seven")
    again = reopened(folder)
    assert first.given and again.key("seven") == first
    with pytest.raises(UsageError, match="runtime.key is not the one that the run .* was started with"):
        again.key("eight")
    again.close()


def test_a_key_that_lies_in_a_new_folder_is_refused(folder: RunDir) -> None:
    (folder.private / "key").write_bytes(bytes(32))
    with pytest.raises(UsageError, match="was there before the run, so its noise may have been used before"):
        folder.key(None)


def test_a_chosen_key_is_not_told() -> None:
    run = dataclasses.replace(RUN, runtime=Runtime(key="a very secret word"))
    assert "secret word" not in json.dumps(rundir.describe(run))


def test_ledger_and_plans_come_back(folder: RunDir) -> None:
    assert folder.read_ledger() == Ledger() and folder.read_plans() == {}
    ledger = Ledger().append("a", gaussian_event(0.1, 2.0), 3).append("b", gaussian_event(1.0, 0.5))
    folder.write_ledger(ledger)
    plans = {0: Plan(engine="fast", methods={"w": "ghost"}, micro_batch=8), 5: Plan(engine="fast", micro_batch=4)}
    folder.write_plans(plans)
    assert folder.read_ledger() == ledger and folder.read_plans() == plans
    assert stat.S_IMODE((folder.private / "plans.json").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "odd", ["[]", "3", '{"x": {}}', '{"-1": {}}', '{"\u0663": {}}', '{"%s": {}}' % ("9" * 5000), '{"1": 3}']
)
def test_plans_that_were_damaged_are_refused_in_a_sentence(folder: RunDir, odd: str) -> None:
    (folder.private / "plans.json").write_text(odd)
    with pytest.raises(UsageError, match=r"^[^\n]*; start a new run\.$"):
        folder.read_plans()


def test_lines_of_metrics_that_are_no_text_are_let_go(folder: RunDir) -> None:
    path = folder.public / "metrics.jsonl"
    odd = (b"\xff\n", b"[1]\n", b'{"step": "x"}\n', b'{"step": 1e999}\n', b"[" * 100_000 + b"\n", b'{"step": NaN}\n')
    path.write_bytes(b'{"step": 2}\n' + b"".join(odd) + b'{"step": 3}\n')
    folder.keep_metrics(4, 10)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [2, 3]


def test_metrics_are_kept_up_to_the_checkpoint_and_a_torn_line_is_not(folder: RunDir) -> None:
    path = folder.public / "metrics.jsonl"
    folder.keep_metrics(3, 10)
    assert not path.exists()
    for step in (2, 4, 6, 10):
        disk.append_line(path, {"step": step})
    with path.open("a") as file:
        file.write('{"step": 1')
    folder.keep_metrics(4, 10)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [2, 4]
    disk.append_line(path, {"step": 10})
    folder.keep_metrics(10, 10)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [2, 4]


def test_what_a_dead_process_was_writing_is_swept(folder: RunDir) -> None:
    left = [part / f".ledger.json.x1y2{disk.UNFINISHED}" for part in (folder.public, folder.private, folder.states)]
    for path in left:
        path.write_text("half")
    folder.close()
    RunDir.open(folder.path, RUN).close()
    assert not any(path.exists() for path in left)


def test_discarding_removes_what_was_made_and_never_what_was_spent(tmp_path: Path) -> None:
    made = RunDir.open(tmp_path / "a" / "deep" / "down", RUN)
    made.discard()
    assert not (tmp_path / "a").exists()
    (tmp_path / "mine").mkdir()
    RunDir.open(tmp_path / "mine", RUN).discard()
    assert not any((tmp_path / "mine").iterdir())
    spent = RunDir.open(tmp_path / "b", RUN)
    spent.write_ledger(Ledger().append("train", gaussian_event(0.5, 1.0)))
    spent.discard()
    spent.close()
    old = RunDir.open(tmp_path / "b", RUN)
    old.discard()
    old.close()
    assert (tmp_path / "b" / "public" / "ledger.json").exists()


def test_another_run_in_the_same_place_has_another_name(folder: RunDir) -> None:
    name = folder.name
    assert folder.name == name and str(folder.path) in name
    (folder.private / "id").unlink()
    assert folder.name != name
