"""From what was measured to docs/performance.md: the tables, and the prose of bench/performance.md around them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

from bench import measuring, plots
from bench.parts import DEFAULT, GPU
from bench.ratios import FULL_STEP, LIMIT, Measured, full_step, memory_ratio, named, peak, per_row, ratio
from bench.targets import targets

PROSE = Path(__file__).parent / "performance.md"


def write(results: Path, docs: Path) -> None:
    """Tables into the prose, figures beside it."""
    names = [*(p.name for p in (*DEFAULT, *GPU)), "custom"]
    found = {name: measured for name in names if (measured := measuring.load(results / f"{name}.json")) is not None}
    makers: dict[str, Callable[[str], str]] = {
        "table": lambda name: table(found[name]) if name in found else _missing(name),
        "operations": lambda name: operations(found) if name in found else _missing(name),
        "targets": lambda name: targets(found),
        "machine": lambda name: machine({n: m for n, m in found.items() if (m["part"]["device"] != "cpu") == (name == "gpu")}),
    }

    def filled(match: re.Match[str]) -> str:
        kind, _, name = match[1].partition(" ")
        return makers[kind](name)

    docs.mkdir(parents=True, exist_ok=True)
    plots.draw(found, docs / "figures")
    text = re.sub(r"<!-- fill: (.+?) -->", filled, PROSE.read_text())
    (docs / "performance.md").write_text(
        re.sub(r"!\[[^]]*\]\(([^)]+)\)\n\n", lambda m: m[0] if (docs / m[1]).exists() else "", text)
    )


def table(measured: Measured) -> str:
    """One part as Markdown: seconds per row against plain SGD in the same rounds, and memory."""
    rows = [_row(result, measured) for result in measured["results"]]
    compared = named(measured, LIMIT) is not None
    head = ["", "ms per row", "rounds, lowest to highest", *(["time", "memory"] if compared else []), "peak, MB"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", _caption(measured)])


def _row(result: Measured, measured: Measured) -> list[str]:
    if result["failure"] or not result["steps"]:
        return [result["name"], f"not measured: {result['failure'] or 'no round'}".replace("|", "/")]
    own = per_row(result)
    cells = [result["name"], f"{median(own) * 1e3:.3g}", f"{min(own) * 1e3:.3g} to {max(own) * 1e3:.3g}"]
    if named(measured, LIMIT):
        cells += [_times(ratio(measured, result["name"])), _times(memory_ratio(measured, result["name"]))]
    return [*cells, f"{peak(result) / 1e6:.0f}"]


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def operations(found: Mapping[str, Measured]) -> str:
    """The O(parameters) work of a logical step, by phase, against a step of 1024 examples."""
    measured = found["operations"]
    full = full_step(found)
    names = ["selection", "noise", "update", "average"]
    head = ["WRN-28-10", *(f"{n}, s" for n in names), "together, s", f"of a step of {FULL_STEP}"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for result in measured["results"]:
        if result["failure"]:
            lines.append(f"| {result['name']} | not measured: {result['failure']} |")
            continue
        phases = [median(s["phases"][n] for s in result["steps"]) for n in names]
        share = f"{sum(phases) / full:.2%}" if full else "-"
        lines.append("| " + " | ".join([result["name"], *(f"{p:.2f}" for p in phases), f"{sum(phases):.2f}", share]) + " |")
    said = f"A step of {FULL_STEP} examples is {full:.0f} s" if full else "The time of a step is not measured yet"
    return "\n".join(
        [*lines, "", f"{said}: {FULL_STEP} times the dense fast engine's time per example above, not a step that was run."]
    )


def machine(found: Mapping[str, Measured]) -> str:
    """On what, with which versions, under which load."""
    if not found:
        return "Nothing is measured yet."
    first = next(iter(found.values()))
    m = first["machine"]
    versions: dict[str, set[str]] = {}
    for measured in found.values():
        for result in measured["results"]:
            for name, version in result["versions"].items():
                versions.setdefault(name, set()).add(version)
    said = ", ".join(f"{name} {' and '.join(sorted(each))}" for name, each in versions.items())
    return (
        f"Machine: {m['processor']}, {m['cores']} cores, {m['memory_gib']} GiB, {m['system']}, {m['libc']}. "
        f"Threads: {first['threads']}. Versions: {said}."
    )


def _missing(name: str) -> str:
    return f"*Not measured yet: `python -m bench {name}`.*"


def _caption(measured: Measured) -> str:
    part = measured["part"]
    views = f" of {part['views']} views" if part["views"] > 1 else ""
    tried = ", ".join(
        f"{r['name'].removeprefix('plain SGD, ')} {median(per_row(r)) * 1e3:.3g}" for r in measured["layouts"] if r["steps"]
    )
    layouts = f" Plain SGD was tried as (ms per row): {tried}." if tried else ""
    gpu = measured["machine"].get("gpu")
    device = gpu if part["device"] != "cpu" and gpu else part["device"]
    load = " and ".join(f"{x:.1f}" for x in measured["load"])
    return (
        f"{part['model']}, {part['shape'][1]} x {part['shape'][2]}, {part['batch']} examples{views} at once, {device}, "
        f"{part['rounds']} rounds in {measured['seconds']:.0f} s, load average {load} before and after.{layouts}"
    )
