"""A ledger, or an event, taken apart: the primitive events that accountants know, and how often each happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import dp_accounting as dp

from sparsedp.dp.ledger import Ledger

Parts = Mapping[dp.DpEvent, int]
"""Primitive events and how often each happened."""

_NO_NOISE = 1e-50
"""A noise multiplier below this counts as none: squares of what it costs would leave the range of floating point."""


def parts_of(spent: dp.DpEvent | Ledger) -> Parts:
    """The primitive events with their counts; all plain Gaussians become the one that equals them, exactly."""
    counts: Counter[dp.DpEvent] = Counter()
    _collect(spent.event() if isinstance(spent, Ledger) else spent, 1, counts)
    gaussians = [event for event in counts if isinstance(event, dp.GaussianDpEvent)]
    if len(gaussians) > 1 or any(counts[event] > 1 for event in gaussians):
        precision = sum(counts.pop(event) / event.noise_multiplier**2 for event in gaussians)
        counts[dp.GaussianDpEvent(precision**-0.5)] = 1
    return counts


def named_parts(spent: dp.DpEvent | Ledger) -> Parts:
    """What `paper` sums: what a ledger calls by one name is one part, such as DP-SNIP; of a bare event, all equal primitive ones."""
    groups: list[Parts] = []
    if isinstance(spent, Ledger):
        names = dict.fromkeys(entry.what for entry in spent.entries)
        groups = [parts_of(Ledger(tuple(entry for entry in spent.entries if entry.what == name))) for name in names]
    else:
        counts: Counter[dp.DpEvent] = Counter()
        _collect(spent, 1, counts)
        groups = [{event: count} for event, count in counts.items()]
    return Counter(dp.SelfComposedDpEvent(event, count) for group in groups for event, count in group.items())


def _collect(event: dp.DpEvent, count: int, counts: Counter[dp.DpEvent]) -> None:
    if isinstance(event, dp.ComposedDpEvent):
        for part in event.events:
            _collect(part, count, counts)
    elif isinstance(event, dp.SelfComposedDpEvent):
        _collect(event.event, count * event.count, counts)
    elif isinstance(event, dp.PoissonSampledDpEvent) and event.sampling_probability == 1:
        _collect(event.event, count, counts)
    elif count > 0 and not _is_free(event):
        counts[dp.NonPrivateDpEvent() if _is_bare(event) else event] += count


def is_search(event: dp.DpEvent) -> bool:
    """Whether the event is the best of several trials."""
    return isinstance(event, dp.dp_event.RepeatAndSelectDpEvent)


def has_search(parts: Parts) -> bool:
    """Whether the best of several trials is among the parts: only Renyi differential privacy knows what that costs."""
    return any(is_search(event) for event in parts)


def _is_free(event: dp.DpEvent) -> bool:
    if is_search(event):
        return not parts_of(event.event)
    return isinstance(event, dp.NoOpDpEvent) or (
        isinstance(event, dp.PoissonSampledDpEvent) and event.sampling_probability == 0
    )


def _is_bare(event: dp.DpEvent) -> bool:
    if is_search(event):
        return dp.NonPrivateDpEvent() in parts_of(event.event)
    inner = event.event if isinstance(event, dp.PoissonSampledDpEvent) else event
    return isinstance(inner, dp.GaussianDpEvent) and inner.noise_multiplier < _NO_NOISE
