"""The figures of docs/performance.md."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from bench.ratios import LIMIT, Measured, memory_ratio, named, peak, per_row, ratio

BLUE, RED, GREEN, GREY = "#4477aa", "#cc6677", "#228833", "#777777"
SCALINGS = (("scaling_small_cnn", "small_cnn", BLUE), ("scaling_wrn_16_4", "WRN-16-4", RED))


def draw(found: Mapping[str, Measured], folder: Path) -> None:
    """Every figure for which there are numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("k1", "k16", "custom"):
        if name in found:
            bars(found[name], folder / f"speed_{name}.png")
    if "curve" in found:
        curve(found, folder / "speed_curve.png")
    if any(name in found for name, _, _ in SCALINGS):
        scaling(found, folder / "speed_scaling.png")


def bars(measured: Measured, path: Path) -> None:
    """Time against plain SGD, every contender a bar, with the rounds' spread."""
    limit = named(measured, LIMIT)
    if limit is None:
        return
    ran = [r for r in measured["results"] if r["steps"] and not r["failure"]]
    figure, axes = _blank(0.9 + 0.24 * len(ran))
    for place, result in enumerate(reversed(ran)):
        ratios = [a / b for a, b in zip(per_row(result), per_row(limit), strict=False)]
        middle = median(ratios)
        spread = [[middle - min(ratios)], [max(ratios) - middle]]
        axes.barh(place, middle, color=_colour(result["name"]), xerr=spread, error_kw={"linewidth": 0.8})
        axes.text(max(ratios), place, f" {middle:.2f}", va="center", fontsize=7)
    axes.set_yticks(range(len(ran)), [r["name"] for r in reversed(ran)], fontsize=7)
    axes.axvline(1, color=GREY, linestyle=":")
    axes.set_xlabel("time per row / plain SGD's (median; lines: lowest and highest round)", fontsize=8)
    _save(figure, path)


def curve(found: Mapping[str, Measured], path: Path) -> None:
    """Time and memory against the drop rate, both granularities; the peers, who have one speed, as lines."""
    measured = found["curve"]
    figure, (left, right) = _blank(3.4, columns=2)
    for axes, value in ((left, ratio), (right, memory_ratio)):
        for kind, colour in (("weight", BLUE), ("filter", GREEN)):
            points = [(0.0, value(measured, "fast, dense"))]
            points += [(rate, value(measured, f"fast, {kind} {rate}")) for rate in measured["part"][f"{kind}_rates"]]
            known = [(rate, y) for rate, y in points if y is not None]
            axes.plot(
                [p[0] for p in known], [p[1] for p in known], color=colour, marker="o", markersize=3, label=f"fast, {kind}"
            )
        for name, style in (("Opacus, hooks", "-"), ("Opacus, ghost", "--"), ("JAX-Privacy, clipped_grad", "-.")):
            peer = value(found["k1"], name) if "k1" in found else None
            if peer is not None:
                axes.axhline(peer, color=RED, linestyle=style, linewidth=0.9, label=f"{name}, dense")
        axes.axhline(1, color=GREY, linestyle=":", label="plain SGD")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("drop rate", fontsize=8)
    left.set_ylabel("time per example / plain SGD's", fontsize=8)
    right.set_ylabel("peak memory / plain SGD's", fontsize=8)
    left.legend(fontsize=6)
    _save(figure, path)


def scaling(found: Mapping[str, Measured], path: Path) -> None:
    """Time per example and peak memory against the logical batch, whole private steps."""
    figure, (left, right) = _blank(3.2, columns=2)
    for name, label, colour in SCALINGS:
        ran = [r for r in found[name]["results"] if r["steps"]] if name in found else []
        sizes = [r["spec"]["batch"] for r in ran]
        left.plot(sizes, [median(per_row(r)) * 1e3 for r in ran], color=colour, marker="o", markersize=3, label=label)
        right.plot(sizes, [peak(r) / 1e6 for r in ran], color=colour, marker="o", markersize=3, label=label)
    for axes, up in ((left, "ms per example"), (right, "peak memory, MB")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("expected logical batch", fontsize=8)
        axes.set_ylabel(up, fontsize=8)
    left.set_yscale("log")
    right.set_ylim(bottom=0)
    left.legend(fontsize=7)
    _save(figure, path)


def _colour(name: str) -> str:
    if name.startswith("plain"):
        return GREY
    return RED if name.startswith(("Opacus", "JAX")) else BLUE


def _blank(height: float, columns: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, height), layout="constrained")
    axes = figure.subplots(1, columns)
    for one in [axes] if columns == 1 else axes:
        one.grid(alpha=0.3)
        one.tick_params(labelsize=7)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=100)
