"""What was done with the private data: events, and the ledger that keeps them in order.

Events are those of Google's `dp_accounting`; what they cost is worked out in `accounting.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dp_accounting as dp

from sparsedp.errors import UsageError, require, wrong


def training_event(rate: float, noise_multiplier: float, steps: int = 1) -> dp.DpEvent:
    """`steps` Gaussian releases, each of a Poisson sample that every unit joins with probability `rate`."""
    require(isinstance(steps, int) and steps >= 0, "steps", steps, "it counts releases", "give a whole number from 0")
    return dp.SelfComposedDpEvent(gaussian_event(rate, noise_multiplier), steps)


def snip_event(noise_multiplier: float, rate: float | None = None) -> dp.DpEvent:
    """DP-SNIP's one Gaussian release: over the whole data set, or over one Poisson sample of this rate."""
    return gaussian_event(1.0 if rate is None else rate, noise_multiplier)


def free_event(reason: str) -> dp.DpEvent:
    """The no-op event of a step that reads no private data. The reason is the ledger's words for it."""
    require(bool(reason.strip()), "reason", reason, "a step that claims to cost nothing says why", "name what it reads")
    return dp.NoOpDpEvent()


def gaussian_event(rate: float, noise_multiplier: float) -> dp.DpEvent:
    """One Gaussian release, of a Poisson sample of this rate, or of everything at rate 1."""
    sigma = noise_multiplier
    require(0.0 <= rate <= 1.0, "sampling rate", rate, "it is a probability", "use batch_size / num_examples")
    require(
        sigma >= 0 and math.isfinite(sigma),
        "noise_multiplier",
        sigma,
        "it must be finite and not negative",
        "1 to 20 are common",
    )
    event = dp.GaussianDpEvent(float(sigma))
    return event if rate == 1.0 else dp.PoissonSampledDpEvent(float(rate), event)


def search_event(trial: dp.DpEvent, mean: float, shape: float) -> dp.DpEvent:
    """The best of a random number of trials, each of which is the event `trial` (Papernot and Steinke 2022).

    The number of trials is Poisson (shape infinite), geometric (1), logarithmic (0) or truncated negative binomial (between).
    """
    require(
        math.isfinite(mean) and mean >= 1, "the mean number of trials", mean, "it must be finite and at least 1", "10 is usual"
    )
    require(shape >= 0, "the shape of the number of trials", shape, "it cannot be negative", "1 is the geometric law")
    return dp.dp_event.RepeatAndSelectDpEvent(_hashable(trial), float(mean), float(shape))


def _hashable(event: dp.DpEvent) -> dp.DpEvent:
    """The same event with tuples for lists, so that equal ones can be counted."""
    if isinstance(event, dp.ComposedDpEvent):
        return dp.ComposedDpEvent(tuple(_hashable(part) for part in event.events))
    if isinstance(event, dp.SelfComposedDpEvent):
        return dp.SelfComposedDpEvent(_hashable(event.event), event.count)
    return event


@dataclass(frozen=True)
class Entry:
    """`count` equal events in a row, and what they were."""

    what: str
    event: dp.DpEvent
    count: int = 1


@dataclass(frozen=True)
class Ledger:
    """Everything that was done with the private data, in order. It can grow and do nothing else.

    Guarantee: `append` keeps every entry that was there; only the count of an equal last entry grows.
    """

    entries: tuple[Entry, ...] = ()

    def append(self, what: str, event: dp.DpEvent, count: int = 1) -> Ledger:
        """A ledger with `count` more of this event at its end."""
        require(
            isinstance(count, int) and count >= 1,
            "count",
            count,
            "an event happened at least once",
            "give a whole number from 1",
        )
        _event_to_json(event)  # what cannot be written down must not be spent
        last = self.entries[-1] if self.entries else None
        if last is not None and (last.what, last.event) == (what, event):
            return Ledger((*self.entries[:-1], Entry(what, event, last.count + count)))
        return Ledger((*self.entries, Entry(what, event, count)))

    def event(self) -> dp.DpEvent:
        """All of it as one event."""
        return dp.ComposedDpEvent(tuple(dp.SelfComposedDpEvent(e.event, e.count) for e in self.entries))

    def to_json(self) -> list[dict[str, Any]]:
        """Plain lists and dicts. An event is its class's name in dp_accounting and its fields."""
        return [{"what": e.what, "event": _event_to_json(e.event), "count": e.count} for e in self.entries]

    @staticmethod
    def from_json(rows: object) -> Ledger:
        """The ledger that `to_json` wrote; anything else is refused."""
        if not isinstance(rows, list):
            raise wrong("ledger", type(rows).__name__, "it is a list of entries", "give what Ledger.to_json returned")
        return Ledger(tuple(_entry_from_json(row, place) for place, row in enumerate(rows)))


_FIELDS: Mapping[str, Mapping[str, type]] = {
    "NoOpDpEvent": {},
    "NonPrivateDpEvent": {},
    "GaussianDpEvent": {"noise_multiplier": float},
    "PoissonSampledDpEvent": {"sampling_probability": float, "event": dp.DpEvent},
    "SelfComposedDpEvent": {"event": dp.DpEvent, "count": int},
    "ComposedDpEvent": {"events": list},
    "RepeatAndSelectDpEvent": {"event": dp.DpEvent, "mean": float, "shape": float},
}
_INFINITE = "infinity"
"""The shape of a Poisson number of trials: JSON has no number for it."""


def _event_to_json(event: dp.DpEvent) -> dict[str, Any]:
    name = type(event).__name__
    if name not in _FIELDS:
        raise UsageError(f"An event of type {name} cannot be kept in a ledger; use one of {', '.join(_FIELDS)}.")
    row: dict[str, Any] = {"type": name}
    for field, kind in _FIELDS[name].items():
        value = getattr(event, field)
        row[field] = (
            [_event_to_json(e) for e in value] if kind is list else _event_to_json(value) if kind is dp.DpEvent else value
        )
        if (field, value) == ("shape", math.inf):
            row[field] = _INFINITE
    return row


def _entry_from_json(row: object, place: int) -> Entry:
    name = f"ledger entry {place}"
    if not isinstance(row, dict) or set(row) != {"what", "event", "count"} or not isinstance(row["what"], str):
        raise UsageError(
            f"{name} must have exactly a text 'what', an 'event' and a 'count'; give what Ledger.to_json returned."
        )
    count = row["count"]
    require(
        type(count) is int and 1 <= count < HIGHEST,
        f"the count of {name}",
        count,
        "an event happened at least once",
        "restore the file",
    )
    return Entry(row["what"], _event_from_json(row["event"], name, 0), count)


DEEPEST = 20  # events within each other; a ledger of this library has three
HIGHEST = 2**63  # a count or a number beyond it is no event of any run, and no number that can be worked with


def _event_from_json(row: object, name: str, depth: int = 0) -> dp.DpEvent:
    kind = row.get("type") if isinstance(row, dict) else None
    if not isinstance(row, dict) or not isinstance(kind, str) or kind not in _FIELDS or set(row) != {"type", *_FIELDS[kind]}:
        raise UsageError(f"The event of {name} is not one of {', '.join(_FIELDS)} with its fields; restore the file.")
    if row.get("shape") == _INFINITE and depth <= DEEPEST:
        mean = _field_from_json(row["mean"], float, f"mean in {name}")
        return search_event(_event_from_json(row["event"], name, depth + 1), mean, math.inf)  # type: ignore[arg-type]
    if depth > DEEPEST:
        raise UsageError(f"The event of {name} is more than {DEEPEST} events within each other; restore the file.")
    fields = {
        field: _field_from_json(row[field], wanted, f"{field} in {name}", depth + 1) for field, wanted in _FIELDS[kind].items()
    }
    rate = fields.get("sampling_probability", 0.0)
    require(
        isinstance(rate, float | int) and rate <= 1,
        f"sampling_probability in {name}",
        rate,
        "it is a probability",
        "restore the file",
    )
    if kind == "RepeatAndSelectDpEvent":
        return search_event(fields["event"], fields["mean"], fields["shape"])  # type: ignore[arg-type]
    return getattr(dp.dp_event, kind)(**fields)


def _field_from_json(value: object, wanted: type, name: str, depth: int = 0) -> object:
    if wanted is dp.DpEvent:
        return _event_from_json(value, name, depth)
    if wanted is list:
        if not isinstance(value, list):
            raise wrong(name, type(value).__name__, "it is a list of events", "restore the file")
        return [_event_from_json(row, name, depth) for row in value]
    whole = type(value) is int and 0 <= value < HIGHEST
    fits = whole if wanted is int else whole or (isinstance(value, float) and 0 <= value < math.inf)
    require(
        fits, name, value, f"it must be a finite {'count' if wanted is int else 'number'}, not below zero", "restore the file"
    )
    return value
