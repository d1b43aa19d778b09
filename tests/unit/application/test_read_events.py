"""The events of a log are shown with the topic and id of their message, and found by either."""

import json

import pytest

from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.queries import read_events
from postroom.application.queries.read_events import EventFilter, LoggedEvent, ReadEvents
from postroom.domain.commit import Commit
from postroom.domain.message import MessageAcked
from postroom.domain.names import message_id
from tests.conformance.records import append, append_each, life, mixed, received, sent, stream

MAILBOX = "acme@one"


@pytest.fixture
def log() -> MemoryEventLog:
    """A log whose last commits are about messages that were sent long before."""
    log = MemoryEventLog(MAILBOX)
    append(log, mixed(40, MAILBOX))
    append_each(log, [sent(77, at=2_000), *life(78, at=2_001), received(77, at=2_002)])
    append(log, [MessageAcked(stream(77), 3, 2_003, 1)])
    return log


def positions(events: list[LoggedEvent]) -> list[int]:
    return [each.record.position for each in events]


def test_events_of_a_message_have_its_topic_and_id_wherever_they_are_read_from(log: MemoryEventLog) -> None:
    (event,) = ReadEvents(log)(after=47)
    assert (event.record.type, event.topic, event.message_id) == (
        "MessageAcked",
        "orders",
        message_id(stream(77)),
    )
    assert {each.topic for each in ReadEvents(log)() if each.record.type.startswith("Message")} == {"orders"}
    own = next(ReadEvents(log)())
    assert (own.record.type, own.topic, own.message_id) == ("MailboxCreated", None, None)


@pytest.mark.parametrize(("after", "through"), [(0, None), (0, 40), (12, 13), (39, 44), (48, None), (5, 4)])
def test_the_range_is_exact_to_the_event(log: MemoryEventLog, after: int, through: int | None) -> None:
    last = 48 if through is None else through
    assert positions(list(ReadEvents(log)(after=after, through=through))) == list(range(after + 1, last + 1))


def test_topic_type_and_message_select_events(log: MemoryEventLog) -> None:
    found = ReadEvents(log)
    every = list(log.read())
    assert positions(list(found(EventFilter(events=frozenset({"MessageAcked"}))))) == [
        each.position for each in every if each.type == "MessageAcked"
    ]
    assert positions(list(found(EventFilter(message_id=message_id(stream(77)))))) == [41, 47, 48]
    assert positions(list(found(EventFilter(topic="ord*")))) == [
        each.position for each in every if each.type.startswith(("Message", "Topic"))
    ]
    assert list(found(EventFilter(topic="other"))) == []


@pytest.mark.parametrize("limit", [0, 1, 3, 48, 100])
def test_the_last_events_are_found_backwards_from_the_end(
    log: MemoryEventLog, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(read_events, "POSITIONS_PER_STEP", 2)
    assert positions(ReadEvents(log).last(limit)) == list(range(1, 49))[max(0, 48 - limit) :]
    sends = EventFilter(events=frozenset({"MessageSent"}))
    assert (
        positions(ReadEvents(log).last(limit, sends))
        == positions(list(ReadEvents(log)(sends)))[-limit or 99 :]
    )


def test_an_empty_log_has_no_events() -> None:
    assert ReadEvents(MemoryEventLog(MAILBOX)).last(10) == list(ReadEvents(MemoryEventLog(MAILBOX))()) == []


def test_following_yields_events_as_they_are_written(log: MemoryEventLog) -> None:
    waits = 0

    def wait() -> None:
        nonlocal waits
        waits += 1
        append(log, [sent(100 + waits, at=3_000 + waits), received(100 + waits, at=3_000 + waits)])

    events = ReadEvents(log).follow(
        47, wait, EventFilter(events=frozenset({"MessageAcked", "MessageReceived"}))
    )
    assert positions([next(events) for _ in range(4)]) == [48, 50, 52, 54]
    assert waits == 3


def test_the_fields_of_every_event_are_json_without_its_envelope(
    log: MemoryEventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = log.commits
    asked: list[bool] = []

    def commits(after: int = 0, *, envelopes: bool = True) -> "list[Commit]":
        asked.append(envelopes)
        return list(read(after, envelopes=envelopes))

    monkeypatch.setattr(log, "commits", commits)
    for each in ReadEvents(log)():
        facts = json.loads(json.dumps(each.fields()))
        assert "envelope" not in facts
        assert facts["position"] == each.record.position
        assert facts["at"].endswith("Z")
    assert asked == [False]
    (full,) = ReadEvents(log)(after=41, through=42)
    facts = full.fields()
    assert facts["message_id"] == "ü-1"
    assert facts["headers"]["custom_headers"] == {"k": "v", "ü": ""}
    assert facts["due"] == "1970-01-01T00:00:00.002001Z"
    assert facts["payload_hash"] == bytes(32).hex()
