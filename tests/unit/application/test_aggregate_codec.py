from uuid import UUID

import pytest

from postroom.application.messaging import AggregateCodec
from postroom.domain.errors import BrokenLog
from postroom.domain.outbox_events import (
    OutboxChange,
    OutboxEventPublished,
    OutboxEventRecorded,
    OutboxEventRetried,
)
from postroom.domain.record import Event

STREAM = bytes(range(16))
EVENTS: list[OutboxChange] = [
    OutboxEventRecorded(STREAM, 1, 5, "order", "o-1", "order_placed", 2, 4, str(UUID(int=1)), None, None),
    OutboxEventRetried(STREAM, 2, 6),
    OutboxEventPublished(STREAM, 3, 7, "order_placed", "sea.event.order_placed.v2"),
]
CODEC = AggregateCodec([type(event) for event in EVENTS])


class OutboxEventSeen(Event, frozen=True):
    by: str
    times: int


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_round_trip(event: Event) -> None:
    type_, state = CODEC.to_row(event)
    assert type_ == f"{type(event).__name__}.1"
    assert CODEC.to_event(STREAM, event.version, type_, event.at, state) == event


def test_an_event_of_an_older_schema_is_upcast_version_by_version() -> None:
    _, first = AggregateCodec([OutboxEventRetried]).to_row(OutboxEventRetried(STREAM, 1, 5))
    now = AggregateCodec(
        [OutboxEventSeen],
        {
            "OutboxEventSeen.1": lambda state: ["nobody", *state],
            "OutboxEventSeen.2": lambda state: [*state, 7],
        },
    )
    event = OutboxEventSeen(STREAM, 1, 5, "nobody", 7)
    assert now.to_row(event)[0] == "OutboxEventSeen.3"
    assert now.to_event(STREAM, 1, "OutboxEventSeen.1", 5, first) == event
    assert now.to_event(STREAM, 1, *_at(now.to_row(event), 5)) == event


def test_an_event_of_a_newer_postroom_is_named_in_the_error() -> None:
    with pytest.raises(BrokenLog, match=r"unknown type OutboxEventPublished\.2 at version 3"):
        CODEC.to_event(STREAM, 3, "OutboxEventPublished.2", 7, b"\x90")


def _at(row: tuple[str, bytes], at: int) -> tuple[str, int, bytes]:
    return row[0], at, row[1]
