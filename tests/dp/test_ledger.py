"""The ledger only ever grows, and survives being written down."""

from __future__ import annotations

import json
import math

import dp_accounting as dp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsedp.dp.ledger import Entry, Ledger, free_event, snip_event, training_event
from sparsedp.errors import UsageError

EVENTS = [training_event(0.1, 2.0), training_event(0.1, 3.0, 7), snip_event(30.0), snip_event(4.0, 0.2), free_event("masks")]
lines = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(EVENTS), st.integers(1, 5)), max_size=12)


@given(lines)
def test_append_never_loses_an_entry(rows: list[tuple[str, dp.DpEvent, int]]) -> None:
    """Guarantee: `append` keeps every entry that was there; only the count of an equal last entry grows."""
    ledger, happened = Ledger(), []
    for what, event, count in rows:
        before = ledger
        ledger = before.append(what, event, count)
        happened += [(what, event)] * count
        assert ledger.entries[: len(before.entries) - 1] == before.entries[:-1]
        assert [(e.what, e.event) for e in ledger.entries for _ in range(e.count)] == happened


@given(lines)
def test_json_round_trip(rows: list[tuple[str, dp.DpEvent, int]]) -> None:
    ledger = Ledger()
    for row in rows:
        ledger = ledger.append(*row)
    assert Ledger.from_json(json.loads(json.dumps(ledger.to_json(), allow_nan=False))) == ledger


def test_runs_are_counted_and_ledgers_are_values() -> None:
    one = Ledger().append("step", EVENTS[0])
    many = one.append("step", EVENTS[0], 4).append("other", EVENTS[0])
    assert one.entries == (Entry("step", EVENTS[0], 1),)
    assert [e.count for e in many.entries] == [5, 1]
    with pytest.raises(AttributeError):
        many.entries = ()  # type: ignore[misc]


def test_nested_events_are_written_too() -> None:
    event = dp.ComposedDpEvent([dp.NonPrivateDpEvent(), dp.SelfComposedDpEvent(EVENTS[0], 3)])
    back = Ledger.from_json(Ledger().append("x", event).to_json())
    assert back.entries[0].event == event


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"count": 0}, "at least once"),
        ({"count": True}, "at least once"),
        ({"count": 1.0}, "at least once"),
        ({"count": 10**400}, "at least once"),
        ({"what": 3}, "text 'what'"),
        ({"more": 1}, "text 'what'"),
        ({"event": "step"}, "not one of"),
        ({"event": {"type": "Path"}}, "not one of"),
        ({"event": {"type": "GaussianDpEvent"}}, "not one of"),
        ({"event": {"type": ["GaussianDpEvent"]}}, "not one of"),
        ({"event": {"type": "GaussianDpEvent", "noise_multiplier": -1.0}}, "noise_multiplier in ledger entry 0"),
        ({"event": {"type": "GaussianDpEvent", "noise_multiplier": math.nan}}, "finite number"),
        ({"event": {"type": "GaussianDpEvent", "noise_multiplier": "2"}}, "finite number"),
        ({"event": {"type": "GaussianDpEvent", "noise_multiplier": 10**400}}, "noise_multiplier in ledger entry 0"),
        ({"event": {"type": "ComposedDpEvent", "events": {}}}, "list of events"),
        ({"event": {"type": "SelfComposedDpEvent", "event": {"type": "NoOpDpEvent"}, "count": 2.0}}, "finite count"),
        (
            {"event": {"type": "PoissonSampledDpEvent", "event": {"type": "NoOpDpEvent"}, "sampling_probability": 1.5}},
            "probability",
        ),
    ],
)
def test_a_damaged_ledger_is_refused(change: dict[str, object], words: str) -> None:
    row = {**Ledger().append("step", EVENTS[2]).to_json()[0], **change}
    with pytest.raises(UsageError, match=words):
        Ledger.from_json([row])


def test_events_within_each_other_without_end_are_refused_and_some_are_not() -> None:
    def within(depth: int) -> list[dict[str, object]]:
        event: dict[str, object] = {"type": "NoOpDpEvent"}
        for _ in range(depth):
            event = {"type": "ComposedDpEvent", "events": [event]}
        return [{"what": "step", "event": event, "count": 1}]

    assert Ledger.from_json(within(20)).to_json() == within(20)
    for depth in (21, 400, 900):
        with pytest.raises(UsageError, match=r"more than 20 events within each other; restore the file\.$"):
            Ledger.from_json(within(depth))


def test_what_is_no_ledger_or_no_known_event_is_refused() -> None:
    with pytest.raises(UsageError, match="list of entries"):
        Ledger.from_json({"entries": []})
    with pytest.raises(UsageError, match="LaplaceDpEvent cannot be kept"):
        Ledger().append("x", dp.LaplaceDpEvent(1.0))
    with pytest.raises(UsageError, match="at least once"):
        Ledger().append("x", EVENTS[0], 0)


@pytest.mark.parametrize(
    ("rate", "sigma"), [(-0.1, 1.0), (1.1, 1.0), (0.1, -1.0), (0.1, math.inf), (math.nan, 1.0), (0.1, math.nan)]
)
def test_events_check_their_numbers(rate: float, sigma: float) -> None:
    with pytest.raises(UsageError):
        training_event(rate, sigma)
    with pytest.raises(UsageError):
        snip_event(sigma, rate)


def test_free_steps_give_a_reason() -> None:
    with pytest.raises(UsageError, match="says why"):
        free_event(" ")
