"""The command line: what it says, word for word (tests/golden/cli), its exit codes, and that its verbs agree with each other.

`pytest tests/test_cli.py --update-golden` writes what it says now.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsedp import cli, training, verbs
from sparsedp.arguments import respelt
from sparsedp.recipes import RECIPES
from tests import whole_runs
from tests.data.pictures import made_up, png
from tests.whole_runs import after, images, same_public, tiny

GOLDEN = Path(__file__).parent / "golden" / "cli"
SMALL = [
    "--data.dir", "data", "--mechanism.steps", "3", "--mechanism.batch-size", "16", "--mechanism.epsilon", "None",
    "--mechanism.noise-multiplier", "1.0", "--runtime.engine", "functional", "--runtime.device", "cpu",
]  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_runs.quick_accounting(monkeypatch)
    plain(monkeypatch)


def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of a known width without colours."""
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("COLUMNS", "100"), ("NO_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)


def said(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command line."""
    capsys.readouterr()
    try:
        code = cli.main(argv)
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a data set, a finished run and an unfinished one."""
    folder = tmp_path_factory.mktemp("cli")
    images(folder / "data")
    with pytest.MonkeyPatch.context() as patched:
        whole_runs.quick_accounting(patched)
        patched.setenv("SPARSEDP_HOME", str(folder / "home"))
        patched.chdir(folder)
        assert cli.main(["train", "smoke", "--run-dir", "done", *SMALL]) == 0
        with pytest.raises(training.Stopped):
            training.train(tiny(Path("data")), "begun", stop=after(2))
    yield folder


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    return place


HELP = {f"help-{verb}": ([verb, "--help"], 0) for verb in cli.VERBS}
HELP |= {f"help-{verb}-smoke": ([verb, "smoke", "--help"], 0) for verb in cli.TAKES_RECIPE}
ERRORS: dict[str, tuple[list[str], int]] = {
    "overview": (["--help"], 0),
    "nothing": ([], 2),
    "bad-verb": (["trian", "smoke"], 2),
    "no-recipe": (["train"], 2),
    "bad-recipe": (["train", "cifar11"], 2),
    "unknown-option": (["train", "smoke", "--speed", "3"], 2),
    "misspelt-option": (["train", "smoke", "--mechanism.step", "3"], 2),
    "wrong-type": (["train", "smoke", "--mechanism.batch-size", "many"], 2),
    "value-missing": (["train", "smoke", "--optim.lr"], 2),
    "rule-clip": (["train", "smoke", "--mechanism.clip", "-1"], 2),
    "rule-rate": (["train", "smoke", "--sparsity.drop-rate", "1"], 2),
    "rule-two-of-three": (["train", "smoke", "--mechanism.epsilon", "None"], 2),
    "rule-past-the-target": (["train", "smoke", *SMALL, "--mechanism.epsilon", "0.5"], 2),
    "rule-batch": (["train", "smoke", *SMALL, "--mechanism.batch-size", "61"], 2),
    "missing-data": (["train", "smoke", *SMALL, "--data.dir", "nowhere"], 2),
    "bad-data-name": (["train", "smoke", "--data.name", "mnits"], 2),
    "bad-model-name": (["train", "smoke", *SMALL, "--model.name", "vgg"], 2),
    "bad-optimiser": (["train", "smoke", *SMALL, "--optim.name", "LBFGS"], 2),
    "run-dir-is-a-file": (["train", "smoke", *SMALL, "--run-dir", "data/train-labels-idx1-ubyte"], 2),
    "run-dir-in-a-file": (["train", "smoke", *SMALL, "--run-dir", "data/train-labels-idx1-ubyte/run"], 2),
    "run-dir-of-others": (["train", "smoke", *SMALL, "--run-dir", "data"], 2),
    "finished-run": (["train", "smoke", *SMALL, "--run-dir", "done"], 2),
    "other-configuration": (["train", "smoke", *SMALL, "--run-dir", "begun"], 2),
    "evaluate-nothing": (["evaluate", "nowhere"], 2),
    "evaluate-unfinished": (["evaluate", "begun"], 2),
    "evaluate-no-average-of-the-data": (["evaluate", "done", "--dir", "nowhere"], 2),
    "predict-no-image": (["predict", "done"], 2),
    "predict-missing-image": (["predict", "done", "nowhere.png"], 2),
    "predict-not-an-image": (["predict", "done", "data/train-labels-idx1-ubyte"], 2),
    "account-too-little": (["account", "--num-examples", "100"], 2),
    "account-required": (["account"], 2),
    "account-bad-delta": (["account", "--num-examples", "100", "--batch-size", "10", "--steps", "3", "--epsilon", "1", "--delta", "2"], 2),
    "doctor-unfinished": (["doctor", "begun"], 2),
    "tune-no-score": (["tune", "smoke", *SMALL, "--try", "optim.lr=1,2"], 2),
    "tune-other-cost": (["tune", "smoke", *SMALL, "--try", "mechanism.steps=3,4", "--score", "public"], 2),
    "prune-none": (["prune", "smoke", *SMALL, "--sparsity.prune", "none", "--sparsity.prune-rate", "0"], 2),
    "prune-bad-rate": (["prune", "smoke", *SMALL, "--rate", "1.5"], 2),
    "account": (["account", "--num-examples", "100", "--batch-size", "10", "--steps", "3", "--noise-multiplier", "2"], 0),
    "prune": (["prune", "smoke", *SMALL, "--criterion", "synflow", "--rate", "0.7", "--out", "mask.safetensors"], 0),
    "predict": (["predict", "done", "three.png"], 0),
    "evaluate": (["evaluate", "done"], 0),
}  # fmt: skip
NUMBERS_VARY = ("predict", "evaluate", "prune")
"""Under a fresh key, so that their digits are masked."""


@pytest.mark.parametrize("name", [*HELP, *ERRORS])
def test_it_says_this_word_for_word(
    name: str, here: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    argv, expected = {**HELP, **ERRORS}[name]
    (here / "three.png").write_bytes(png(made_up(1, 28, 1)[0][0]))
    code, out, err = said(argv, capsys)
    assert code == expected
    if name in NUMBERS_VARY:
        out = re.sub(r"-{3,}", "---", re.sub(r" +", " ", re.sub(r"\d[\d,]*(\.\d+)?(e-\d+)?", "#", out)))
    errors = f"--- standard error\n{err}" if err else ""
    shown = f"$ sparsedp {' '.join(argv)}\n{out}{errors}--- exit {code}\n"
    shown = "\n".join(line.rstrip() for line in shown.splitlines()) + "\n"
    path = GOLDEN / f"{name}.txt"
    if request.config.getoption("--update-golden"):
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8")


def test_no_golden_file_is_left_over() -> None:
    assert {p.stem for p in GOLDEN.glob("*.txt")} == {*HELP, *ERRORS}


@pytest.mark.parametrize("name", [n for n, (_, code) in ERRORS.items() if code == 2])
def test_errors_are_no_tracebacks_and_nothing_is_left_behind(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(p for p in here.rglob("*") if "home" not in p.parts)
    _, out, err = said(ERRORS[name][0], capsys)
    assert "Traceback" not in out + err
    assert "object at 0x" not in out + err
    assert sorted(p for p in here.rglob("*") if "home" not in p.parts) == before


def test_a_choice_that_is_none_is_refused_with_the_legal_ones(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(["train", "smoke", "--sparsity.drop", "sideways"], capsys)
    assert code == 2
    assert all(word in err for word in ("sideways", "random", "magnitude", "none"))


def test_json_of_every_verb_parses(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "three.png").write_bytes(png(made_up(1, 28, 1)[0][0]))
    answers: dict[str, Any] = {}
    for name, argv in {
        "train": ["train", "smoke", *SMALL, "--run-dir", "json-run"],
        "dry": ["train", "smoke", *SMALL, "--dry-run"],
        "evaluate": ["evaluate", "done"],
        "average": ["evaluate", "done", "--average"],
        "predict": ["predict", "done", "three.png", "three.png"],
        "account": ["account", "--num-examples", "100", "--batch-size", "10", "--steps", "3", "--noise-multiplier", "2"],
        "prune": ["prune", "smoke", *SMALL, "--criterion", "random", "--rate", "0.5", "--out", "m.safetensors"],
        "explain": ["explain", "smoke", *SMALL],
        "doctor": ["doctor", "done", "--examples", "20"],
    }.items():
        code, out, err = said([*argv, "--json"], capsys)
        assert (code, err) == (0, ""), name
        answers[name] = json.loads(out)
    summary = json.loads((here / "done" / "public" / "summary.json").read_text())
    assert answers["train"]["run_dir"] == "json-run"
    assert answers["train"].keys() - {"run_dir"} == summary.keys()
    assert answers["evaluate"]["accuracy"] == summary["accuracy"]
    assert answers["average"]["accuracy"] == summary["accuracy_average"]
    assert answers["evaluate"] == summary["metrics"]["last"]
    assert [row["image"] for row in answers["predict"]] == ["three.png"] * 2
    assert 0 < answers["account"]["epsilon"] < 10
    assert answers["doctor"]["stamp"].startswith("NOT PRIVATE")
    assert answers["doctor"]["evaluation_accuracy"] == summary["accuracy"]
    assert (here / "m.safetensors").exists()


def test_a_dry_run_says_what_it_costs_and_touches_nothing(here: Path, capsys: pytest.CaptureFixture[str], home: Path) -> None:
    command = [
        "train",
        "smoke",
        *SMALL,
        "--dry-run",
        "--run-dir",
        "never",
        "--runtime.key",
        "hush",
        "--mechanism.delta",
        "0.05",
    ]
    code, out, _ = said([*command, "--json"], capsys)
    shown = json.loads(out)
    assert code == 0 and not (here / "never").exists() and not (home / "budgets").exists()
    assert "hush" not in out
    privacy = shown["privacy"]
    assert (privacy["steps"], privacy["num_units"], privacy["batch_size"]) == (3, 60, 16)
    assert privacy["by_others"]["pld, add-remove"] == pytest.approx(privacy["epsilon"])
    assert privacy["by_others"]["pld, replace-one"] > privacy["epsilon"]
    assert shown["model"]["parameters_trained"] == 26010
    assert shown["time"]["seconds_per_step"] > 0 and shown["memory_gb"] > 0
    assert shown["config"]["optim"]["lr"] == 1.0
    code, out, _ = said(command, capsys)
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert code == 0 and "hush" not in out and not (here / "never").exists() and len(lines) < 20
    assert lines["epsilon"].startswith(
        f"{privacy['epsilon']:.4g} at delta 0.05 (pld, add-remove); {privacy['by_others']['pld, replace-one']:.4g} "
    )
    assert lines["steps"] == "3 of an expected 16 (sampling rate 0.266667)" and lines["noise"] == "multiplier  1"
    assert lines["warning:"] == privacy["warnings"][0] and " rows at once" in lines["engine"] and "hours" in lines["time"]


def test_short_names_and_none_are_taken(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The criterion counts before the settings are checked together, and `none` is `None` where an option may be left out."""
    out = ["--out", "short.safetensors", "--json"]
    code, told, err = said(
        ["prune", "smoke", *SMALL, "--criterion", "dp-snip", "--rate=0.7", "--sparsity.snip-epsilon", "2", *out], capsys
    )
    assert (code, err) == (0, "") and json.loads(told)["criterion"] == "dp-snip" and json.loads(told)["rate"] == 0.7
    code, told, err = said(
        ["prune", "smoke", "--data.dir", "data", "--mechanism.batch-size", "16", "--criterion=snip-not-private", *out], capsys
    )
    assert (code, err) == (0, "") and json.loads(told)["private"] is False, "under a recipe with a target"
    dry = ["train", "smoke", *SMALL, "--dry-run", "--json", "--optim.average_decay=none", "--mechanism.epsilon", "none"]
    code, told, err = said(dry, capsys)
    assert (code, err) == (0, "") and json.loads(told)["config"]["optim"]["average_decay"] is None
    assert respelt("train", ["--sparsity.drop", "none", "--run-dir", "none"]) == [
        "--sparsity.drop",
        "none",
        "--run-dir",
        "none",
    ]


def test_whole_numbers_may_be_written_with_an_exponent(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["account", "--batch-size", "1e1", "--steps", "3", "--noise-multiplier", "2", "--json", "--num-examples"]
    code, out, _ = said([*command, "1e2"], capsys)
    assert code == 0 and (json.loads(out)["num_examples"], json.loads(out)["batch_size"]) == (100, 10)
    for word in ("1.5", "nan", "inf", "many"):
        code, _, err = said([*command, word], capsys)
        assert code == 2 and word in err and "Traceback" not in err


def test_without_an_average_there_is_none_to_evaluate(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(here / "done", tmp_path / "run")
    (tmp_path / "run" / "public" / "average.safetensors").unlink()
    code, _, err = said(["evaluate", str(tmp_path / "run"), "--average"], capsys)
    assert code == 2 and "kept no moving average of its weights" in err and "finish" not in err


def test_answers_and_results_are_words() -> None:
    row = {"image": "a.png", "label": ["cat", "d\nog"], "probability": [0.9, 0.6]}
    assert verbs.answer_text(row) == "a.png: cat (0.9), d\\nog (0.6)"
    assert verbs.answer_text({"image": "a.png", "label": [], "probability": []}) == "a.png: no label"
    summary = {"accuracy": 0.5, "accuracy_average": None, "epsilon": 0.0, "delta": 0.5, "accountant": "pld", "neighbouring": "add-remove",
               "stamp": "differentially private", "steps": 3, "seconds": 2.0, "throughput": 17.0, "warnings": ["delta 0.5 is large"]}  # fmt: skip
    told = verbs.result_text(summary, Path("run"))
    assert "warning   delta 0.5 is large" in told.splitlines() and "2 s of training for 3 steps" in told


def test_predict_is_the_model(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from sparsedp import finished
    from sparsedp.data import load
    from sparsedp.data.augment import Augmentation, evaluation_view

    pixels, _ = made_up(3, 28, 1, seed=9)
    for number, image in enumerate(pixels):
        (here / f"{number}.png").write_bytes(png(image))
    _, out, _ = said(["predict", "done", "0.png", "1.png", "2.png", "--json"], capsys)
    run, model, _, _ = finished.load_model(here / "done", average=False)
    with torch.no_grad():
        chances = model(evaluation_view(torch.from_numpy(pixels), Augmentation("none", load(run.data).normalisation))).softmax(
            1
        )
    assert [row["label"] for row in json.loads(out)] == [str(int(p.argmax())) for p in chances]
    assert np.allclose([row["probability"] for row in json.loads(out)], chances.max(1).values, atol=1e-3)


def test_doctor_writes_for_the_operator_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    public = {p: p.read_bytes() for p in (here / "done" / "public").iterdir()}
    code, out, _ = said(["doctor", "done", "--examples", "30"], capsys)
    assert code == 0 and out.startswith("NOT PRIVATE")
    written = here / "done" / "private" / "doctor.json"
    assert json.loads(written.read_text())["examples"] == 30
    assert written.stat().st_mode & 0o077 == 0
    assert {p: p.read_bytes() for p in (here / "done" / "public").iterdir()} == public


def test_training_by_name_and_by_function_is_the_same(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(["train", "smoke", *SMALL, "--run-dir", "by-name", "--runtime.key", "k"], capsys)
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == ["accuracy", "epsilon", "time", "written"]
    import dataclasses

    from sparsedp.config import Mechanism
    from sparsedp.recipes import recipe

    run = recipe("smoke")
    run = dataclasses.replace(
        run, data=dataclasses.replace(run.data, dir="data"),
        mechanism=Mechanism(noise_multiplier=1.0, steps=3, batch_size=16, delta=run.mechanism.delta),
        runtime=dataclasses.replace(run.runtime, engine="functional", key="k", device="cpu"),
    )  # fmt: skip
    whole_runs.go(run, here / "by-function")
    one, other = (whole_runs.published(here / name) for name in ("by-name", "by-function"))
    different = {name for name in one if one[name] != other[name]}
    assert different <= {"public/privacy.json", "public/privacy.md"}, "these tell how many runs there were"


def test_runs_get_a_folder_of_their_own(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert said(["train", "smoke", *SMALL], capsys)[0] == 0
    assert sorted(p.name for p in (here / "runs").iterdir()) == ["smoke-1", "smoke-2"]


def test_every_recipe_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in RECIPES:
        code, out, _ = said(["train", name, "--help"], capsys)
        assert code == 0 and "--mechanism.batch-size" in out


def python(*argv: str, **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=120, check=False, **how)


def test_help_does_not_wait_for_torch() -> None:
    program = (
        "import sys\nfrom sparsedp.cli import VERBS, TAKES_RECIPE, main\n"
        "def run(*argv):\n    try:\n        main(argv)\n    except SystemExit:\n        pass\n"
        "run('--help'); run('--version'); run('nonsense'); run('train', 'smoke', '--mechanism.clip', '-1')\n"
        "[run(v, *(['smoke'] if v in TAKES_RECIPE else []), '--help') for v in VERBS]\n"
        "heavy = {'torch', 'numpy', 'dp_accounting', 'scipy', 'matplotlib'} & set(sys.modules)\nsys.exit(str(heavy) if heavy else 0)"
    )
    done = python("-c", program)
    assert done.returncode == 0, done.stderr[-500:]


def test_the_module_and_the_command_are_one() -> None:
    command = Path(sys.executable).with_name("sparsedp")
    assert command.exists()
    for argv in (["--version"], ["train", "nope"]):
        one = python("-m", "sparsedp", *argv)
        other = subprocess.run([command, *argv], capture_output=True, text=True, timeout=120, check=False)
        assert (one.returncode, one.stdout, one.stderr) == (other.returncode, other.stdout, other.stderr)


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "ended"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_same_command_goes_on(
    sent: signal.Signals, ended: int, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, uncut = f"cut-{ended}", f"uncut-{ended}"
    command = ["train", "smoke", *SMALL, "--mechanism.steps", "150", "--runtime.key", "k", "--runtime.checkpoint-every", "1000"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(
        [sys.executable, "-m", "sparsedp", *command, "--run-dir", cut],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    ledger = here / cut / "public" / "ledger.json"
    waited = time.monotonic() + 100
    while time.monotonic() < waited and not (ledger.exists() and '"train"' in ledger.read_text()):
        time.sleep(0.01)
    running.send_signal(sent)
    out, err = running.communicate(timeout=100)
    assert (running.returncode, out) == (ended, "")
    assert re.search(r"stopped after \d+ of 150 steps; the same command takes the run up again\. Its folder is cut-", err)
    assert ("a second Ctrl-C ends at once" in err) == (sent == signal.SIGINT)
    assert (here / cut / "private" / "state").exists() and not (here / cut / "public" / "summary.json").exists()
    for name in (cut, uncut):
        monkeypatch.setenv("SPARSEDP_HOME", str(here / f"home-{name}"))
        code, _, err = said([*command, "--run-dir", name], capsys)
        assert (code, err) == (0, ""), "quiet where nobody watches"
    same_public(here / cut, here / uncut)


def test_a_second_interrupt_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(_options: Any, _name: str, stop: Any) -> int:
        assert not stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop(), "the first one asks"
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("unreachable")

    monkeypatch.setattr(verbs, "train", work)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        cli._stoppable("train", cli.Train(run=RECIPES["smoke"]()), "smoke")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_dispatch", interrupted)
    code, _, err = said(["train", "smoke"], capsys)
    assert code == 130 and "goes on from its last checkpoint" in err


def test_a_terminal_sees_progress_and_a_pipe_does_not(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from rich.console import Console

    from sparsedp.progress import TerminalReporter

    screen = io.StringIO()
    reporter = TerminalReporter(Console(file=screen, force_terminal=True, width=120))
    whole_runs.go(tiny(Path("data"), runtime={"evaluate_every": 2, "key": "other"}), here / "watched", reporter=reporter)
    shown = " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue()).split())
    for words in ("6 steps of 16 of 60", "step 6/6", "epsilon <= ", "/s", "step 2: accuracy last", "at delta 0.001"):
        assert words in shown, words
