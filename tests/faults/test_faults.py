"""A few faults of every kind, in whole runs; `make faults` prints them, and all of them are done by `make faults FULL=1`."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsedp import checkpoint, disk, keys
from sparsedp.errors import UsageError
from tests import whole_runs
from tests.faults import __main__ as faults
from tests.faults import children, damage, decoders, disks, suite, worlds
from tests.faults.children import Ended, Noised
from tests.faults.worlds import World

pytestmark = pytest.mark.slow
Made = tuple[dict[str, World], World]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    with pytest.MonkeyPatch.context() as patch:
        worlds.quick(patch)
        place = tmp_path_factory.mktemp("faults").resolve()
        yield suite.runs(place, False)


@pytest.mark.parametrize("name", dict.fromkeys(part.name for part in suite.PARTS))
def test_nothing_is_lost_nothing_is_under_counted_and_every_message_is_clear(name: str, made: Made) -> None:
    found = [outcome for part in suite.PARTS if part.name == name for outcome in part.cases(*made, False)]
    wrong = [f"{outcome.kind}: {outcome.wrong}" for outcome in found if outcome.wrong]
    assert len(found) >= 3
    assert not wrong, "\n".join(wrong)


def seen(made: Made, break_it: Callable[[], Any], name: str = "random") -> tuple[Ended, str]:
    """A run in which the code is wrong, killed after four steps and taken up again: how the first went, and what is found."""
    world = made[0][name]
    folder, asked = world.folder(), whole_runs.after(4)

    def work() -> None:
        break_it()
        world.train(folder, stop=lambda: asked() and whole_runs.die())()

    ended = children.run(work)
    return ended, worlds.finish(world, folder, ended.noised)


def forgetting(broken: Callable[[Path, Any], Any]) -> Callable[[], None]:
    """The ledger is written otherwise."""

    def forget() -> None:
        write = disk.write_json
        disk.write_json = lambda path, value, mode=0o644: write(path, broken(path, value), mode)  # type: ignore[assignment]

    return forget


def test_a_ledger_that_is_not_written_is_seen(made: Made) -> None:
    ended, found = seen(made, forgetting(lambda path, value: [] if path.name == "ledger.json" else value))
    assert ended.how == "killed" and len(ended.noised) == 5
    assert found == "the ledger counts 0 of 5 noised sums"


def test_a_ledger_that_lags_one_step_behind_is_seen(made: Made) -> None:
    def late(path: Path, value: Any) -> Any:
        lags = path.name == "ledger.json" and value[-1]["count"] > 1
        return [*value[:-1], {**value[-1], "count": value[-1]["count"] - 1}] if lags else value

    assert seen(made, forgetting(late))[1] == "the ledger counts 4 of 5 noised sums"


def test_a_budget_file_without_the_run_is_seen(made: Made) -> None:
    def without(path: Path, value: Any) -> Any:
        return {**value, "runs": {}} if isinstance(value, dict) and "runs" in value else value

    assert seen(made, forgetting(without))[1] == "the budget file counts 0 of 5 noised sums"


def test_a_resumption_from_other_weights_is_seen(made: Made) -> None:
    def shift() -> None:
        save = checkpoint.save

        def other(folder: Path, step: int, state: dict[str, Any]) -> Path:
            return save(folder, step, {**state, "model": {name: value + 1e-3 for name, value in state["model"].items()}})

        checkpoint.save = other

    ended, found = seen(made, shift)
    assert ended.how == "killed" and "met two different sums" in found


def test_other_weights_from_the_start_are_seen(made: Made) -> None:
    def shift() -> None:
        save = checkpoint.save

        def other(folder: Path, step: int, state: dict[str, Any]) -> Path:
            next(iter(state["model"].values())).add_(1e-3)
            return save(folder, step, state)

        checkpoint.save = other

    ended, found = seen(made, shift)
    assert ended.how == "killed" and found == "other sums than undisturbed"


def test_a_single_bit_of_the_average_is_seen(made: Made) -> None:
    """The sums do not depend on it: only the bytes in public/ show it."""

    def flip() -> None:
        save = checkpoint.save

        def other(folder: Path, step: int, state: dict[str, Any]) -> Path:
            average = {name: value.clone() for name, value in state["average"].items()}
            next(value for value in average.values() if value.ndim > 1).flatten()[0].view(torch.int32).bitwise_xor_(1 << 20)
            return save(folder, step, {**state, "average": average})

        checkpoint.save = other

    ended, found = seen(made, flip)
    assert ended.how == "killed" and found.startswith("not the same to the byte: ['public/average.safetensors'")


def test_a_key_that_is_made_anew_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worlds.keys_of_the_system(monkeypatch)
    monkeypatch.setenv("SPARSEDP_HOME", f"{tmp_path}{worlds.HOME}")
    first = keys.fresh()
    assert keys.fresh().secret == first.secret and not first.given
    (tmp_path / "public").mkdir()
    (tmp_path / "public" / "ledger.json").write_text("[]")
    assert keys.fresh().secret != first.secret


def test_what_is_left_behind_is_seen(made: Made) -> None:
    world = made[0]["random"]
    folder = world.folder()
    assert children.run(world.train(folder)).how == "done"
    assert worlds.different(world, folder) == ""
    for path in (folder / "public" / ".summary.json.x.part", folder / "private" / "key"):
        path.write_text("")
        assert path.name in worlds.different(world, folder)
        path.unlink()
    (entry,) = Path(f"{folder}{worlds.HOME}", "budgets").glob("*.json")
    entry.write_text(entry.read_text().replace('"finished": true', '"finished": false'))
    assert worlds.different(world, folder) == "the budget file has another entry"


def test_a_damaged_checkpoint_that_is_taken_is_seen(made: Made) -> None:
    """Its bytes differ from those that were written, but the run does not say that it was refused."""
    world = made[0]["random"]
    with pytest.MonkeyPatch.context() as patch:
        decode = checkpoint.decode
        patch.setattr(checkpoint, "decode", lambda content, name: decode(content[: content.rindex(b"end")], name))
        encode = checkpoint.encode
        patch.setattr(checkpoint, "encode", lambda state: encode(state) + b"end")
        patch.setattr(damage, "KINDS", (damage.lengthened,))
        (outcome,) = damage.checkpoints({"random": world}, 1, seed=2)
    assert "it is not said in a sentence that it was refused" in outcome.wrong


def test_a_worker_that_outlives_its_run_is_seen(tmp_path: Path) -> None:
    environment = {**os.environ, "SPARSEDP_HOME": f"{tmp_path}{worlds.HOME}"}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment) as worker:
        assert decoders.alive(tmp_path, 0.2) == 1
        worker.communicate(b"\n")
    assert decoders.alive(tmp_path, 0.2) == 0


def test_a_fault_that_was_not_injected_is_seen(made: Made) -> None:
    world = made[0]["random"]
    outcome = disks.judged(world, world.folder(), Ended("done", "0", (), False), "full", "", errno.ENOSPC)
    assert "nothing was refused" in outcome.wrong
    (outcome,) = decoders.in_mid_answer(world, 1)  # it has no workers
    assert "no worker was killed" in outcome.wrong


def test_an_end_with_a_traceback_is_not_clear() -> None:
    def leak() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert "it raised: Traceback" in worlds.unclear(children.run(leak), Path("/"))

    def mumble() -> None:
        raise UsageError("no")

    assert worlds.unclear(children.run(mumble), Path("/")) == "not one clear sentence: no"

    def elsewhere() -> None:
        raise UsageError("The run cannot go on; start another.")

    ended = children.run(elsewhere)
    assert worlds.unclear(ended, Path("/")) == ""
    assert worlds.unclear(ended, Path("/"), "No space") == "nothing of ['No space']: The run cannot go on; start another."


def test_a_sum_that_meets_the_same_noise_twice_is_seen(tmp_path: Path) -> None:
    one, other = Noised("k", "train", 3, "a"), Noised("k", "train", 3, "b")
    assert worlds.under_counted(tmp_path, (one, other)) == "the noise of train step 3 met two different sums"
    assert worlds.under_counted(tmp_path, (one, one)) == "the ledger counts 0 of 1 noised sums"


def test_parts_that_are_done_one_by_one_come_on_one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = (
        suite.Part("a", "one", lambda w, f, whole: [worlds.Outcome("fault", "x", "all well")] * (3 if whole else 1)),
        suite.Part("a", "other", lambda w, f, whole: [worlds.Outcome("fault", "x", "all well"), worlds.Outcome("b", "", "", "bad")]),
    )  # fmt: skip
    monkeypatch.setattr(faults, "PARTS", parts)
    monkeypatch.setattr(suite, "runs", lambda *_: ({}, None))
    results, page = tmp_path / "some" / "results.json", tmp_path / "faults.md"

    def call(*options: str) -> int:
        monkeypatch.setattr(sys, "argv", ["faults", "--full", "--results", str(results), *options])
        return faults.main()

    assert call("--only", "a: one") == 0
    with pytest.raises(UsageError, match="not all done"):
        call("--only", "a: one", "--write", str(page))
    assert call("--only", "a: other", "--write", str(page)) == 1
    text = page.read_text()
    assert "5 faults in 0 minutes, 1 of them with an end that should not have been" in text
    assert "| fault | all well | 4 | 4 |\n| b | - | 1 | 0 |\n" in text
