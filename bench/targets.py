"""The targets that the engine was built for, beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from bench.ratios import Measured, full_step, memory_ratio, ratio

Found = Mapping[str, Measured]


def targets(found: Found) -> str:
    """A table: what was asked, what was measured, whether it is met."""
    lines = ["| | target | measured | |", "|---|---|---|---|"]
    for label, limit, value, unit in [*_times(found), *_memory(found), *_operations(found), *_flatness(found)]:
        said = "-" if value is None else f"{value:.2f}{unit}"
        verdict = "not measured" if value is None else "met" if value <= limit else "**missed**"
        lines.append(f"| {label} | <= {limit:.2f}{unit} | {said} | {verdict} |")
    return "\n".join(lines)


Line = tuple[str, float, float | None, str]


def _times(found: Found) -> list[Line]:
    def of(part: str, name: str) -> float | None:
        return ratio(found[part], name) if part in found else None

    def worst(part: str, names: list[str]) -> float | None:
        values = [of(part, n) for n in names]
        return None if None in values else max(v for v in values if v is not None)

    weights = ["fast, weight 0.5", "fast, weight 0.9"]
    return [
        (
            "K = 16, weight-granular, rates 0, 0.5, 0.9, per view (the worst)",
            1.03,
            worst("k16", ["fast, dense", *weights]),
            "x",
        ),
        ("K = 1, dense DP-SGD", 1.25, of("k1", "fast, dense"), "x"),
        ("K = 1, weight-granular DP-SSGD (the worse of 0.5, 0.9)", 1.4, worst("k1", weights), "x"),
        ("K = 1, filter-granular, drop 0.9", 0.85, of("k1", "fast, filter 0.9"), "x"),
    ]


def _memory(found: Found) -> list[Line]:
    made: list[Line] = []
    for part, label in (("k1", "WRN-16-4"), ("wrn_28_10", "WRN-28-10"), ("nf_resnet50", "NF-ResNet-50 at 224")):
        value = memory_ratio(found[part], "fast, dense") if part in found else None
        made.append((f"peak memory over plain SGD's, {label}, dense", 1.3, value, "x"))
    return made


def _operations(found: Found) -> list[Line]:
    full, worst = full_step(found), None
    if full and "operations" in found:
        each = [r["steps"] for r in found["operations"]["results"] if r["steps"]]
        worst = max(median(sum(s["phases"].values()) for s in steps) for steps in each) / full * 100 if each else None
    return [("O(parameters) work of a step of 1024, WRN-28-10 (the worst)", 5.0, worst, " %")]


def _flatness(found: Found) -> list[Line]:
    made: list[Line] = []
    for part in ("scaling_small_cnn", "scaling_wrn_16_4"):
        ran = [r for r in found[part]["results"] if r["steps"]] if part in found else []
        values = [max(s["memory"] for s in r["steps"]) for r in ran]
        made.append(
            (
                f"memory of the largest logical batch over the smallest, {part[8:]}",
                1.1,
                values[-1] / values[0] if values else None,
                "x",
            )
        )
    return made
