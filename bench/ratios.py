"""The numbers that tables, targets and figures are made of, read off what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

LIMIT = "plain SGD"
FULL_STEP = 1024
Measured = Mapping[str, Any]


def named(measured: Measured, name: str) -> Measured | None:
    """A contender that has been measured."""
    return next((r for r in measured["results"] if r["name"] == name and not r["failure"] and r["steps"]), None)


def per_row(result: Measured) -> list[float]:
    """Seconds per row in every round."""
    return [s["seconds"] / max(s["rows"], 1) for s in result["steps"]]


def peak(result: Measured) -> float:
    """Bytes."""
    return float(max(s["memory"] for s in result["steps"]))


def ratio(measured: Measured, name: str) -> float | None:
    """Time per row over plain SGD's: the median over rounds of the ratio within a round."""
    own, limit = named(measured, name), named(measured, LIMIT)
    if own is None or limit is None:
        return None
    return median(a / b for a, b in zip(per_row(own), per_row(limit), strict=False))


def memory_ratio(measured: Measured, name: str) -> float | None:
    """Peak memory over plain SGD's."""
    own, limit = named(measured, name), named(measured, LIMIT)
    return None if own is None or limit is None else peak(own) / peak(limit)


def full_step(found: Mapping[str, Measured]) -> float | None:
    """Seconds of 1024 examples of WRN-28-10, extrapolated from the time per example."""
    dense = named(found["wrn_28_10"], "fast, dense") if "wrn_28_10" in found else None
    return median(per_row(dense)) * FULL_STEP if dense else None
