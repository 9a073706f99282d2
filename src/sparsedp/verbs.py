"""What the commands do. Each takes its options and returns an exit code; what they print is chosen here."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from sparsedp import account as accounts
from sparsedp import cli, training
from sparsedp.data.augment import evaluation_view
from sparsedp.data.decoding import Undecodable, decode_file
from sparsedp.environment import pick_device
from sparsedp.errors import UsageError, require, shown
from sparsedp.evaluation import evaluate as measure
from sparsedp.finished import augmentation_of, facts_of, finished_run, load_model, refuse_code
from sparsedp.images import plain_batches
from sparsedp.outputs import number
from sparsedp.progress import TerminalReporter


def train(options: cli.Train, name: str, stop: Callable[[], bool]) -> int:
    """`sparsedp train`: progress on a terminal, the result at the end."""
    return _carry_out(options, name, lambda folder, reporter: training.train(options.run, folder, reporter=reporter, stop=stop))


def tune(options: cli.Tune, name: str, stop: Callable[[], bool]) -> int:
    """`sparsedp tune`: as train, for the best of several; 1 if the number of trials came out as zero."""
    from sparsedp import tune as searches

    search = _search(options)
    return _carry_out(
        options, name, lambda folder, reporter: searches.tune(options.run, search, folder, reporter=reporter, stop=stop)
    )


def _search(options: cli.Tune) -> Any:
    from sparsedp.search import Search

    return Search(**{f.name: getattr(options, f.name) for f in dataclasses.fields(Search)})


def _carry_out(options: Any, name: str, work: Callable[[Path, training.Reporter], Any]) -> int:
    """Train or tune into a folder, and say what came out."""
    console = Console(stderr=True)
    reporter = TerminalReporter(console) if console.is_terminal and not options.json else training.Silence()
    folder = options.run_dir or _free_folder(name)
    try:
        summary = work(folder, reporter).summary
    except training.Stopped as stopped:
        _close(reporter)
        console.print(
            f"sparsedp: {stopped} Its folder is {folder}: give it as --run-dir.", highlight=False, markup=False, soft_wrap=True
        )
        return cli.STOPPED
    finally:
        _close(reporter)
    if options.json:
        cli.print_json({"run_dir": str(folder), **json.loads((folder / "public" / "summary.json").read_text())})
    else:
        say(result_text(summary, folder))
    return 0 if "steps" in summary else 1


def say(text: str) -> None:
    """A result, as it is: not cut to the width of a screen, since programs read it too."""
    sys.stdout.write(f"{text}\n")


def result_text(summary: Mapping[str, Any], folder: Path) -> str:
    """The end of a run in a few lines."""
    accuracy = [
        f"{100 * summary[key]:.2f} % ({word})"
        for key, word in (("accuracy", "last iterate"), ("accuracy_average", "moving average"))
        if summary[key] is not None
    ]
    tuning = summary.get("tuning")
    time = []
    if "steps" in summary:
        took = f"{summary['seconds']:.0f} s of training for {summary['steps']} steps, {summary['throughput']:.0f} examples/s"
        time = [f"time      {took}"]
    return "\n".join([
        f"accuracy  {', '.join(accuracy) or 'not evaluated'}",
        f"epsilon   {number(summary['epsilon'])} at delta {summary['delta']:g} ({summary['accountant']}, {summary['neighbouring']}); {summary['stamp']}",
        *([f"search    {tuning['words']}"] if tuning else []),
        *time,
        *(f"warning   {text}" for text in summary.get("warnings", ())),
        f"written   {folder}/public (may be released), {folder}/private (never)",
    ])  # fmt: skip


def dry_run(options: cli.Train | cli.Tune) -> int:
    """`sparsedp train --dry-run`: the whole configuration, what it costs, how long a step takes on made-up data; or `tune`."""
    from sparsedp import dryrun
    from sparsedp import tune as searches

    if isinstance(options, cli.Tune):
        described = searches.forecast(options.run, _search(options))
    else:
        described = dryrun.forecast(options.run)
    if options.json:
        cli.print_json(described)
    else:
        say(dryrun.text(described))
    return 0


def account(options: cli.Account) -> int:
    """`sparsedp account`."""
    values = {f.name: getattr(options, f.name) for f in dataclasses.fields(options) if f.name not in ("json", "plot")}
    answer = accounts.solve(**values)
    if options.plot is not None:
        accounts.plot(answer, options.plot)
    if options.json:
        cli.print_json(answer.to_json())
    else:
        say(answer.text())
    return 0


def evaluate(options: cli.Evaluate) -> int:
    """`sparsedp evaluate`: the finished run's weights on its evaluation data."""
    refuse_code(options.run, options.model)
    run, dataset, spec, model = finished_run(options.run, options.dir, options.average)
    if dataset.evaluation is None:
        raise UsageError("The run declared no evaluation data; evaluate it with a data set that has a test split.")
    device = pick_device("auto")
    result = measure(
        model.to(device), plain_batches(dataset.evaluation, spec, device), len(dataset.classes), dataset.multilabel
    )
    if options.json:
        cli.print_json(result.to_json())
        return 0
    names = ("count", "accuracy", "balanced_accuracy", "auroc", "calibration_error", "loss")
    for name in names:
        found = getattr(result, name)
        say(f"{name.replace('_', ' '):<18} {found if name == 'count' else number(found)}")
    for name, value in zip(dataset.classes, result.recall, strict=True):
        say(f"recall {shown(name):<11} {number(value)}")
    return 0


def predict(options: cli.Predict) -> int:
    """`sparsedp predict`: the class of each image and how sure the model is."""
    if not options.images:
        raise UsageError("predict needs at least one image file after the run; give their paths.")
    refuse_code(options.run, options.model)
    run, model, _, shape = load_model(options.run, options.average)
    facts = facts_of(options.run / "public" / ("average.safetensors" if options.average else "model.safetensors"))
    spec = augmentation_of(run, facts)
    rows = []
    with torch.no_grad():
        for path in options.images:
            output = model(evaluation_view(_pixels(path, shape), spec))[0]
            chances = output.sigmoid() if run.data.multilabel else output.softmax(0)
            classes = len(facts["classes"])
            require(tuple(output.shape) == (classes,), "the shape of the model's output", tuple(output.shape), f"it must be ({classes},)",
                    "train a model with one output for each class")  # fmt: skip
            rows.append({"image": str(path), **_answer(chances, facts["classes"], run.data.multilabel)})
    if options.json:
        cli.print_json(rows)
    else:
        for row in rows:
            say(answer_text(row))
    return 0


def _pixels(path: Path, shape: tuple[int, int, int]) -> torch.Tensor:
    try:
        found = decode_file(str(path), shape[0], shape[1])
    except Undecodable as error:
        raise UsageError(f"{path} cannot be classified: {error}; give an image file.") from error
    return torch.from_numpy(found.copy())[None]


def answer_text(row: Mapping[str, Any]) -> str:
    """What an image shows, on one line."""
    several = isinstance(row["label"], list)
    found = zip(row["label"], row["probability"], strict=True) if several else [(row["label"], row["probability"])]
    return f"{row['image']}: {', '.join(f'{shown(label)} ({chance})' for label, chance in found) or 'no label'}"


def _answer(chances: torch.Tensor, classes: list[str], several: bool) -> dict[str, Any]:
    if several:
        chosen = [i for i, p in enumerate(chances.tolist()) if p > 0.5]
        return {"label": [classes[i] for i in chosen], "probability": [round(float(chances[i]), 4) for i in chosen]}
    best = int(chances.argmax())
    return {"label": classes[best], "probability": round(float(chances[best]), 4)}


def prune(options: cli.Prune) -> int:
    """`sparsedp prune`: a table by layer, the mask in a file, the densities in a plot."""
    from sparsedp.prune_run import prune_alone

    criterion = options.run.sparsity.prune
    require(criterion != "none", "criterion", "none", "there is nothing to do", "name one, such as --criterion synflow")
    pruned = prune_alone(options.run, options.out)
    if options.plot is not None:
        pruned.report.plot(options.plot)
    if options.json:
        cli.print_json({"mask": str(options.out), **pruned.report.to_json()})
    else:
        say(pruned.report.text())
        say(f"written to {options.out}")
    return 0


def explain(options: cli.Explain) -> int:
    """`sparsedp explain`: which engine serves which layer."""
    from sparsedp.dryrun import explanation

    found = explanation(options.run)
    if options.json:
        cli.print_json(found.to_json())
    else:
        say(found.text())
    return 0


def doctor(options: cli.Doctor) -> int:
    """`sparsedp doctor`: private answers, for the operator only."""
    from sparsedp.doctor import examine

    found = examine(options.run, options.dir, options.examples, options.model)
    if options.json:
        cli.print_json(found.to_json())
    else:
        say(found.text())
    return 0


def audit(options: cli.Audit) -> int:
    """`sparsedp audit`: 1 if a claim is contradicted."""
    from sparsedp.audit import add_to_statement, attack

    console = Console(stderr=True)
    with console.status("audit") as status:
        report = attack(
            options.run, runs=options.runs, every=options.every, real_job=options.real_job, steps=options.steps,
            canaries=options.canaries, tick=lambda what: status.update(f"audit: {what}"),
        )  # fmt: skip
    if options.statement is not None:
        add_to_statement(report, options.statement)
    if options.json:
        cli.print_json(report.to_json())
    else:
        Console().print(report.text(), highlight=False, markup=False, soft_wrap=True)
    return 0 if report.ok else 1


def _free_folder(name: str) -> Path:
    number = 1
    while Path("runs", f"{name}-{number}").exists():
        number += 1
    return Path("runs", f"{name}-{number}")


def _close(reporter: training.Reporter) -> None:
    if isinstance(reporter, TerminalReporter):
        reporter.close()
