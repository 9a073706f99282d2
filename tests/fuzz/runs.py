"""What a run's folder and the budget file hold: JSON, of which a finished run is made, and from which a stopped one goes on."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import math
import shutil
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from sparsedp import config, disk, rundir
from sparsedp import finished as finished_runs
from sparsedp.audit.report import Report, add_to_statement
from sparsedp.budget_file import BudgetFile
from sparsedp.config import Data, Run
from sparsedp.dp.ledger import Ledger, gaussian_event, search_event, training_event
from sparsedp.engines import Plan
from sparsedp.planning import budget
from sparsedp.recipes import RECIPES
from sparsedp.rundir import RunDir, run_of
from tests import whole_runs
from tests.fuzz.containers import block
from tests.fuzz.harness import Target
from tests.fuzz.mutation import damaged
from tests.fuzz.tensors import EVENTS
from tests.fuzz.trees import changed, json_bytes, written

CONFIGS = [json.dumps(rundir.describe(make())) for make in RECIPES.values()]
CONFIG_WORDS = (
    "random",
    "dp-snip",
    "pld",
    "exact",
    "weight",
    "filter",
    "wrn_10_1",
    "small_cnn",
    "0.5;0.5",
    ["onnx"],
    ["*.weight"],
    28,
    1,
    10,
    None,
)


def make_config(rng: Random) -> bytes:
    return json_bytes(rng, CONFIGS, CONFIG_WORDS)


def read_config(content: bytes, place: Path) -> None:
    path = place / "config.json"
    path.write_bytes(content)
    run = run_of(disk.read_json(path, "the run's configuration"))
    kinds_fit(run)
    again, key = run_of(rundir.describe(run)), run.runtime.key
    assert (again.runtime.key is None) == (key is None)
    assert dataclasses.replace(again, runtime=dataclasses.replace(again.runtime, key=key)) == run
    assert rundir.different(rundir.describe(run), rundir.describe(run)) == []


NAMED = {"Criterion": "str", "PruneCriterion": "str", "Granularity": "str", "Accountant": "str", "Neighbouring": "str"}


def kinds_fit(run: Run) -> None:
    """Every setting is of the kind that its declaration says, as a plain reading of its words has it."""
    for part in (run.data, run.model, run.sparsity, run.mechanism, run.optim, run.runtime):
        for field in dataclasses.fields(part):
            value, declared = getattr(part, field.name), str(field.type)
            words = {NAMED.get(word, "str" if word.startswith("Literal") else word) for word in declared.split(" | ")}
            kind = "None" if value is None else type(value).__name__
            fits = (
                kind in words
                or (kind == "int" and "float" in words)
                or (kind == "tuple" and any(w.startswith("tuple") for w in words))
            )
            assert fits, f"{field.name}: {value!r:.100} is no {declared}"
            assert not isinstance(value, float) or math.isfinite(value), f"{field.name} is {value}"


LEDGERS = [
    json.dumps(ledger.to_json())
    for ledger in (
        Ledger().append("DP-SNIP", gaussian_event(1.0, 3.0)).append("train", training_event(0.1, 1.0), 7),
        Ledger().append("train", gaussian_event(0.01, 1.5), 100).append("more", training_event(0.5, 2.0, 3)),
        Ledger().append("search", search_event(training_event(0.1, 1.0, 7), 5.0, math.inf)),
        Ledger(),
    )
]  # fmt: skip
DEEP: Any = functools.reduce(
    lambda event, _: {"type": "ComposedDpEvent", "events": [event]}, range(470), {"type": "NoOpDpEvent"}
)
LEDGER_WORDS = (*EVENTS, DEEP, "GaussianDpEvent", "DpEvent", "__class__", "LaplaceDpEvent", 10**30, 0.5, "train")


def make_ledger(rng: Random) -> bytes:
    return json_bytes(rng, LEDGERS, LEDGER_WORDS)


def read_ledger(content: bytes, place: Path) -> None:
    path = place / "ledger.json"
    path.write_bytes(content)
    said = disk.read_json(path, "the ledger")
    found = Ledger.from_json(said)
    assert found.to_json() == said
    assert Ledger.from_json(found.append("more", gaussian_event(1.0, 1.0)).to_json()).entries[:-1] in (
        found.entries,
        found.entries[:-1],
    )


BUDGETS = [
    json.dumps({"data": "mnist", "runs": {f"/x/{n} 00ff": {"finished": n > 0, "ledger": json.loads(LEDGERS[n])} for n in range(count)}})
    for count in (0, 1, 4)
]  # fmt: skip
SMALL = Ledger().append("train", gaussian_event(1.0, 4.0))


PLAN = budget(Run(mechanism=config.Mechanism(noise_multiplier=4.0, steps=1, batch_size=10)), 10)


class Heard:
    """Notes to the operator, kept by nobody."""

    def note(self, text: str) -> None:
        assert text


def make_budget(rng: Random) -> bytes:
    return json_bytes(rng, BUDGETS, (*LEDGER_WORDS[:-3], {"ledger": []}, {"finished": True, "ledger": json.loads(LEDGERS[0])}))


def _budget(content: bytes, place: Path) -> BudgetFile:
    (place / "mnist.json").write_bytes(content)
    return BudgetFile(place / "mnist.json", "mnist", "/x/9 ffff", PLAN, 1e-5, Heard())


def read_budget(content: bytes, place: Path) -> None:
    """A run is entered; what was there stays there."""
    file = _budget(content, place)
    file.spent(SMALL)
    runs = file.runs()
    assert runs["/x/9 ffff"]["ledger"] == SMALL.to_json()
    assert set(runs) == {*json.loads(content)["runs"], "/x/9 ffff"}


def read_total(content: bytes, place: Path) -> None:
    total = _budget(content, place).total()
    assert total >= 0


def warm_total(place: Path) -> None:
    read_total(BUDGETS[2].encode(), place)


RUN = Run(data=Data(name="mnist"), mechanism=config.Mechanism(noise_multiplier=1.0, steps=10))
PARTS = {
    "public/config.json": json.dumps(rundir.describe(RUN)),
    "public/ledger.json": LEDGERS[0],
    "private/plans.json": json.dumps({"0": Plan(engine="fast", methods={"a": "b"}, micro_batch=4).to_json(), "5": Plan(engine="functional").to_json()}),
    "public/metrics.jsonl": '{"step": 1, "loss": 1.0}\n{"step": 2}\n{"step": 30}\n',
    "private/key": "k" * 32,
    "private/id": "00ff",
}  # fmt: skip
FOLDER_WORDS = (
    *CONFIG_WORDS,
    *LEDGER_WORDS,
    "fast",
    {"engine": "x"},
    {"engine": "fast", "methods": []},
    "-1",
    "5",
    {"step": 1e400},
    [1],
)


def make_folder(rng: Random) -> dict[str, bytes]:
    """The files of a stopped run, one of them odd."""
    files = {name: text.encode() for name, text in PARTS.items()}
    odd = rng.choice(list(PARTS))
    lines = PARTS[odd].splitlines(keepends=True)
    files[odd] = (
        json_bytes(rng, [PARTS[odd]], FOLDER_WORDS)
        if odd.endswith(".json")
        else damaged(rng, [line.encode() for line in (PARTS[odd], *lines)])
    )
    return files


def read_folder(given: dict[str, bytes], place: Path) -> None:
    """Opened as a run that goes on opens it."""
    root = place / "run"
    shutil.rmtree(root, ignore_errors=True)
    for name, content in given.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    folder = RunDir.open(root, RUN)
    try:
        assert not folder.is_new and folder.name and len(folder.key(None).secret) == 32
        folder.read_ledger().append("train", training_event(0.1, 1.0))
        for step, plan in folder.read_plans().items():
            assert step >= 0 and isinstance(plan.engine, str)
            plan.with_methods({"a": "b"}).to_json()
        folder.keep_metrics(5, 10)
        folder.finish()
    finally:
        folder.close()


def warm_folder(place: Path) -> None:
    read_folder({name: text.encode() for name, text in PARTS.items()}, place)


@functools.cache
def finished() -> dict[str, bytes]:
    """The public files of a real run, trained in a process of its own so that this one keeps one thread."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place).resolve()
        run = whole_runs.tiny(
            whole_runs.images(root / "data"), sparsity={"prune": "random", "prune_rate": 0.4}, mechanism={"steps": 2}
        )
        assert whole_runs.in_a_child(lambda: whole_runs.go(run, root / "run")) == 0
        return {path.name: path.read_bytes() for path in (root / "run" / "public").iterdir() if path.is_file()}


def split(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the body of a safetensors file."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


FINISHED_WORDS = (
    *CONFIG_WORDS,
    "os:abort",
    "fuzz_payload:run",
    "torch.nn:Linear",
    "timm:resnet18",
    [1, 28, 28],
    [0, 1, 1],
    [2**40, 1, 1],
    [1, 2**31, 2**31],
)
MODELS = (
    "os:abort",
    "os:system",
    "fuzz_payload:run",
    "http.server:test",
    "wrn_10_1",
    "wrn_4_99999",
    "wrn_9999994_1",
    "norm_cnn",
    "timm:x",
    "",
    ":",
    "a:b:c",
    "sys:exit",
)


def make_finished(rng: Random) -> dict[str, bytes]:
    """The public files of a finished run, one of them odd: its configuration, or what the weights say of themselves."""
    files = {name: finished()[name] for name in ("config.json", "model.safetensors", "mask.safetensors")}
    kind = rng.random()
    if kind < 0.3:
        described = json.loads(files["config.json"])
        described["model"]["name"] = rng.choice(MODELS)
        files["config.json"] = json.dumps(described).encode()
    elif kind < 0.6:
        files["config.json"] = json_bytes(rng, [files["config.json"].decode()], FINISHED_WORDS)
    else:
        header, body = split(files["model.safetensors"])
        name = rng.choice(sorted(header["__metadata__"]))
        header["__metadata__"][name] = written(rng, changed(rng, header["__metadata__"][name], FINISHED_WORDS)).decode(
            "utf-8", "surrogatepass"
        )
        files["model.safetensors"] = block(json.dumps(header).encode(), body)
    if rng.random() < 0.2:
        del files["mask.safetensors"]
    return files


def read_finished(given: dict[str, bytes], place: Path) -> None:
    """As `sparsedp evaluate` and `predict` read it."""
    public = place / "run" / "public"
    shutil.rmtree(public, ignore_errors=True)
    public.mkdir(parents=True)
    for name, content in given.items():
        (public / name).write_bytes(content)
    finished_runs.refuse_code(place / "run", None)
    run, model, classes, shape = finished_runs.load_model(place / "run", average=False)
    kinds_fit(run)
    assert classes >= 1 and len(shape) == 3 and not model.training


def make_statement(rng: Random) -> bytes:
    return json_bytes(rng, [finished()["privacy.json"].decode()], (*EVENTS, *CONFIG_WORDS))


def read_statement(content: bytes, place: Path) -> None:
    """An audit of the same configuration is put into a run's statement."""
    public = place / "stated" / "public"
    public.mkdir(parents=True, exist_ok=True)
    for name, held in finished().items():
        (public / name).write_bytes(content if name == "privacy.json" else held)
    sound = json.loads(finished()["privacy.json"])["config"]
    report = Report(recipe={part: sound[part] for part in ("sparsity", "mechanism")}, findings=(), checks=())
    add_to_statement(report, place / "stated")
    assert disk.read_json(public / "privacy.json", "it")["audit"]["ok"] is True


def warm_statement(place: Path) -> None:
    read_statement(finished()["privacy.json"], place)


SUMMARIES = ['{"accuracy": 0.5, "accuracy_average": null, "epsilon": 1.0, "steps": 10}', '{"score": 12.5}']


def make_summary(rng: Random) -> tuple[bytes, str]:
    return json_bytes(rng, SUMMARIES, (*CONFIG_WORDS, 0.25)), rng.choice(("accuracy", "accuracy_average", "score"))


def read_summary(given: tuple[bytes, str], place: Path) -> None:
    """As `sparsedp doctor` and `tune` read what a run came to."""
    content, name = given
    (place / "summary.json").write_bytes(content)
    found = disk.read_number(place / "summary.json", "the run's summary", name, or_null=True)
    assert found is None or math.isfinite(found)


def warm(place: Path) -> None:
    importlib.import_module("torch._dynamo")  # torch imports it for some of the models
    read_finished({name: finished()[name] for name in ("config.json", "model.safetensors", "mask.safetensors")}, place)


TARGETS = (
    Target("config", "config.json", make_config, read_config, warm=lambda place: read_config(CONFIGS[0].encode(), place)),
    Target("ledger", "ledger.json", make_ledger, read_ledger, warm=lambda place: read_ledger(LEDGERS[0].encode(), place)),
    Target(
        "budget", "the data set's budget file", make_budget, read_budget,
        warm=lambda place: read_budget(BUDGETS[2].encode(), place),
    ),
    Target(
        "budget-total",
        "the same, its epsilon worked out",
        make_budget,
        read_total,
        share=0.02,
        seconds=60,
        megabytes=1000,
        warm=warm_total,
    ),
    Target("run-folder", "the folder of a stopped run", make_folder, read_folder, warm=warm_folder),
    Target("finished-run", "the public part of a finished run", make_finished, read_finished, share=0.2, warm=warm),
    Target(
        "summary", "summary.json and a trial's score", make_summary, read_summary,
        warm=lambda place: read_summary((SUMMARIES[0].encode(), "accuracy"), place),
    ),
    Target("statement", "privacy.json", make_statement, read_statement, share=0.2, warm=warm_statement),
)  # fmt: skip
