"""What a run would do and cost, before any private record is read: settings, events, epsilon, time and memory."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from typing import Any

from sparsedp import keys
from sparsedp.assembly import Parts, assemble, load_data
from sparsedp.config import Run
from sparsedp.data import DataSet
from sparsedp.dp.accounting import epsilon
from sparsedp.dp.clipping import Rows
from sparsedp.dp.masks import maskable_layers, participating
from sparsedp.engines import Chosen, choose_engine
from sparsedp.engines.made_up import made_up_rows
from sparsedp.errors import UsageError
from sparsedp.outputs import number
from sparsedp.planning import Budget, budget
from sparsedp.prune_run import before_training
from sparsedp.rundir import describe
from sparsedp.training import left_whole


def forecast(run: Run, dataset: DataSet | None = None, plan: Budget | None = None) -> dict[str, Any]:
    """The whole plan of a run as plain values; of a trial of a search, on these data and with these numbers."""
    dataset = dataset or load_data(run)
    plan = plan or budget(run, dataset.train.num_units, before_training(run))
    parts = assemble(run, dataset, keys.fresh())
    engine, seconds = time_a_unit(parts, run.runtime.engine)
    trained = participating(parts.model)
    total = sum(p.numel() for p in trained.values())
    maskable = sum(layer.size for layer in maskable_layers(parts.model, run.sparsity.granularity, run.sparsity.maskable))
    return {
        "config": describe(run),
        "privacy": privacy(run, plan),
        "model": {"parameters_trained": total, "maskable": maskable, "notes": [*parts.notes, *left_whole(run, parts.model)]},
        "engine": {"name": engine.name, "plan": engine.plan.to_json(), "notes": list(engine.notes)},
        "time": {
            "seconds_per_unit": seconds,
            "seconds_per_step": seconds * plan.batch_size,
            "hours": seconds * plan.batch_size * plan.steps / 3600,
        },
        "memory_gb": round(peak_memory() / 2**30, 2),
    }


def text(told: Mapping[str, Any]) -> str:
    """A forecast, of a run or of a search, in some lines for a screen."""
    p, time, search, engine = told["privacy"], told["time"], told.get("search"), told["engine"]
    replaced = p["by_others"]["pld, replace-one"]
    spent = f"{number(p['epsilon'])} at delta {p['delta']:g} ({p['accountant']}, {p['neighbouring']})"
    if not told["config"]["mechanism"]["private"]:
        spent = "none: the run is not private"
    elif not isinstance(replaced, str) and p["neighbouring"] == "add-remove":
        spent += f"; {number(replaced)} under replace-one"
    rows = [
        ("examples", f"{p['num_units']:,}"),
        ("steps", f"{p['steps']:,} of an expected {p['batch_size']:,} (sampling rate {p['sampling_rate']:.6g})"),
        ("noise multiplier", f"{p['noise_multiplier']:.6g}"),
        ("DP-SNIP's noise", None if p["snip_noise_multiplier"] is None else f"{p['snip_noise_multiplier']:.6g}"),
        ("epsilon", spent if search is None else f"{number(search['epsilon'])} at delta {search['delta']:g} for the whole search; one run {spent}"),
        ("weights trained", f"{told['model']['parameters_trained']:,}, of which {told['model']['maskable']:,} may be masked"),
        ("engine", f"{engine['name']}, {engine['plan'].get('micro_batch') or 'any number of'} rows at once"),
        ("time", f"{time['seconds_per_step']:.3g} s a step, {time['hours']:.3g} hours"
                 + ("" if search is None else f" a run, {search['hours_on_average']:.3g} hours on average in all")),
        ("memory", f"{told['memory_gb']:g} GB"),
    ]  # fmt: skip
    lines = [f"{name:<18}{value}" for name, value in rows if value is not None]
    lines += [f"warning: {warning}" for warning in p["warnings"]]
    return "\n".join([*lines, *(f"note: {note}" for note in (*told["model"]["notes"], *engine["notes"])), "All of it: --json."])


def privacy(run: Run, plan: Budget) -> dict[str, Any]:
    """Events and what they cost, by the accountant asked for and by others."""
    others = {}
    for accountant, neighbouring in (("pld", "add-remove"), ("rdp", "add-remove"), ("pld", "replace-one")):
        try:
            others[f"{accountant}, {neighbouring}"] = epsilon(
                plan.at_end, run.mechanism.delta, accountant, neighbouring
            ).epsilon  # type: ignore[arg-type]
        except UsageError as error:
            others[f"{accountant}, {neighbouring}"] = str(error)
    return {
        "epsilon": plan.spent.epsilon, "delta": plan.spent.delta, "accountant": plan.spent.accountant,
        "neighbouring": plan.spent.neighbouring, "steps": plan.steps, "num_units": plan.num_units, "batch_size": plan.batch_size,
        "sampling_rate": plan.sampling_rate, "noise_multiplier": plan.noise_multiplier,
        "snip_noise_multiplier": plan.snip_noise_multiplier, "events": plan.at_end.to_json(), "by_others": others,
        "warnings": list(plan.spent.warnings),
    }  # fmt: skip


def time_a_unit(parts: Parts, name: str) -> tuple[Chosen, float]:
    """The engine that serves a run, and its seconds per unit on made-up rows (the better of two rounds)."""
    example = parts.source(keys.fresh()).example()
    engine = choose_engine(name, parts.model, parts.loss, example)
    per_unit = max(len(example.unit) // max(example.units, 1), 1)
    rows = made_up_rows(example, max((engine.plan.micro_batch or 64) // per_unit, 1))
    return engine, min(_seconds(engine, parts, rows) for _ in range(2)) / rows.units


def _seconds(engine: Chosen, parts: Parts, rows: Rows) -> float:
    began = time.perf_counter()
    engine(parts.model, parts.loss, rows, {}, parts.run.mechanism.clip)
    return time.perf_counter() - began


def peak_memory() -> int:
    """Bytes that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def explanation(run: Run) -> Any:
    """Which engine and rule serves which layer of a run's model."""
    from sparsedp.engines import explain

    parts = assemble(run, load_data(run), keys.fresh())
    return explain(parts.model, parts.loss, parts.source(keys.fresh()).example())
