"""What a run leaves in `public/`: weights, summary, metrics, model card, and whatever export was asked for."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from sparsedp import disk, statement
from sparsedp.dp.accounting import Spent, epsilon
from sparsedp.dp.ledger import Ledger
from sparsedp.environment import versions
from sparsedp.errors import shown
from sparsedp.evaluation import Metrics
from sparsedp.models.export import describe, export_onnx, export_torch, save_safetensors

if TYPE_CHECKING:
    from sparsedp.private import Private
    from sparsedp.pruning import Pruned
    from sparsedp.state import Learner
    from sparsedp.training import Setting


PRIVATE = statement.PRIVATE


def write(
    setting: Setting,
    learner: Learner,
    ledger: Ledger,
    results: Mapping[str, Metrics],
    seconds: float,
    pruned: Pruned | None,
    budget: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that a finished run publishes. The summary comes last: a run is finished when it is there."""
    m = setting.run.mechanism
    spent = epsilon(ledger, m.delta, m.accountant, m.neighbouring, setting.plan.num_units)
    facts = describe(
        setting.run.model.name, setting.dataset.classes, setting.dataset.train.shape, vars(setting.dataset.normalisation)
    )
    public = setting.folder.public
    save_safetensors(learner.model, public / "model.safetensors", facts)
    if learner.average is not None:
        save_safetensors(learner.average.module, public / "average.safetensors", facts)
    words = stamp(setting, pruned)
    summary = summarise(setting, spent, results, seconds, words)
    _export(setting, learner.model)
    stated = statement.facts(setting, ledger, spent, words, pruned, budget)
    statement.write(public, stated)
    disk.write_text(public / "model_card.md", model_card(setting, summary))
    disk.write_json(public / "summary.json", summary)
    return summary


def summarise(setting: Setting, spent: Spent, results: Mapping[str, Metrics], seconds: float, words: str) -> dict[str, Any]:
    """The contents of summary.json. `words` is the stamp."""
    plan, seconds = setting.plan, rounded_up(seconds)
    last, average = results.get("last"), results.get("average")
    return {
        "accuracy": None if last is None else last.accuracy,
        "accuracy_average": None if average is None else average.accuracy,
        "epsilon": spent.epsilon,
        "delta": spent.delta,
        "accountant": spent.accountant,
        "neighbouring": spent.neighbouring,
        "private": words == PRIVATE,
        "stamp": words,
        "warnings": list(spent.warnings),
        "steps": plan.steps,
        "batch_size": plan.batch_size,
        "num_units": plan.num_units,
        "noise_multiplier": plan.noise_multiplier,
        "seconds": seconds,
        "throughput": round(plan.steps * plan.batch_size / seconds, 2),
        "metrics": {name: result.to_json() for name, result in results.items()},
        "versions": versions(),
    }


def rounded_up(seconds: float) -> float:
    """To two digits, and at least a hundredth: a step's time grows with its realised batch, so the sum must not be told exactly."""
    unit = 10.0 ** (math.floor(math.log10(max(seconds, 0.01))) - 1)
    return float(f"{math.ceil(max(seconds, 0.01) / unit - 1e-9) * unit:.2g}")


def stamp(setting: Setting, pruned: Pruned | None) -> str:
    """In a few words, what the epsilon of this run is worth."""
    if not setting.run.mechanism.private:
        return "not private: no clipping and no noise"
    if setting.run.sparsity.prune == "snip-not-private":
        return "not private: pruned by SNIP without noise"
    if math.isinf(setting.plan.spent.epsilon):
        return "not private: something was released without noise"
    if setting.key.given:
        return "not private: the key was chosen by the user, so the noise can be computed again"
    if pruned is not None and pruned.noise_known:
        return "not private: the key of the mask was chosen by the user, so the mask's noise can be computed again"
    return PRIVATE


def add_metrics(setting: Setting, private: Private, results: Mapping[str, Metrics]) -> None:
    """One line of public/metrics.jsonl: evaluation data only, and what is spent by now."""
    m = setting.run.mechanism
    line = {
        "step": private.taken,
        "epsilon": epsilon(private.ledger_by_now, m.delta, m.accountant, m.neighbouring).epsilon,
        **{name: result.to_json() for name, result in results.items()},
    }
    disk.append_line(setting.folder.public / "metrics.jsonl", line)
    if setting.run.runtime.tensorboard:
        _tensorboard(setting, line)


def _tensorboard(setting: Setting, line: Mapping[str, Any]) -> None:
    """One file of events for each evaluation. The step stands where a time is usual, in the events and in the file's name."""
    from sparsedp.errors import missing_extra

    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise missing_extra("tensorboard", "tensorboard", "runtime.tensorboard") from error
    step, folder, content = line["step"], setting.folder.public / "tensorboard", io.BytesIO()
    entries = ("accuracy", "loss", "balanced_accuracy", "auroc", "calibration_error")
    told = {f"{name}/{entry}": line.get(name, {}).get(entry) for name in ("last", "average") for entry in entries}
    values = {"epsilon": line["epsilon"], **{tag: value for tag, value in told.items() if value is not None}}
    scalars = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
    writer = RecordWriter(content)
    for event in (Event(file_version="brain.Event:2"), Event(step=step, wall_time=step, summary=scalars)):
        writer.write(event.SerializeToString())
    folder.mkdir(exist_ok=True)
    disk.write_bytes(folder / f"events.out.tfevents.{step:010d}.sparsedp", content.getvalue())


def _export(setting: Setting, model: nn.Module) -> None:
    shape = setting.parts.shape
    for kind in setting.run.runtime.export:
        if kind == "onnx":
            export_onnx(model, shape, setting.folder.public / "model.onnx")
        else:
            export_torch(model, shape, setting.folder.public / "model.pt2")


def model_card(setting: Setting, summary: Mapping[str, Any]) -> str:
    """A page about the model for whoever receives it."""
    run, dataset = setting.run, setting.dataset
    lines = [
        f"# {run.model.name} trained on {dataset.name}",
        "",
        privacy_line(summary),
        f"- Input: {' x '.join(map(str, setting.parts.shape))}, normalised by mean "
        f"{list(dataset.normalisation.mean)} and standard deviation {list(dataset.normalisation.std)} on the scale from 0 to 1.",
        f"- Classes: {len(dataset.classes)} ({', '.join(map(_cell, dataset.classes[:20]))}{', ..' if len(dataset.classes) > 20 else ''}).",
        f"- Training: {summary['steps']} steps of an expected {summary['batch_size']} of {summary['num_units']} units, "
        f"{run.optim.name}, learning rate {run.optim.lr:g}, {run.data.views} views ({run.data.augment}).",
        f"- Sparsity: pre-pruning {run.sparsity.prune} at rate {run.sparsity.prune_rate:g}, dropping {run.sparsity.drop} at rate "
        f"{run.sparsity.drop_rate:g}, by {run.sparsity.granularity}.",
        f"- Started from: {Path(run.model.weights).name if run.model.weights else 'random weights'}; trained: {run.model.train}.",
        "",
        "Privacy costs small classes most. Recall by class on the evaluation data:",
        "",
    ]
    recall = (summary["metrics"].get("last") or {}).get("recall")
    if recall is None:
        return "\n".join([*lines[:-2], "No evaluation data were declared.", ""])
    rows = [f"| {_cell(name)} | {number(value)} |" for name, value in zip(dataset.classes, recall, strict=True)]
    return "\n".join([*lines, "| class | recall |", "|---|---|", *rows, ""])


def _cell(name: str) -> str:
    """The name of a class, which is a folder's or a file's, on one line of a table."""
    return shown(name).replace("|", "\\|")


def privacy_line(summary: Mapping[str, Any]) -> str:
    """What the model card says of privacy."""
    return (
        f"- Privacy: {summary['stamp']}; epsilon {number(summary['epsilon'])} at delta {summary['delta']:g} "
        f"({summary['accountant']}, {summary['neighbouring']}); see privacy.md."
    )


def number(value: float | None) -> str:
    """Four digits, or a word where there is no number."""
    if value is None:
        return "none"
    return "infinite" if value == float("inf") else f"{value:.4g}"
