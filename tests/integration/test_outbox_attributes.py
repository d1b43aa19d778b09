"""Attributes, payloads of bytes and delays of outbox events, from recording to a target."""

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from postroom.adapters.compose.outbox import open_outbox
from postroom.adapters.postgres.messaging.outbox import AsyncOutbox, Outbox
from postroom.adapters.postgres.messaging.settings import MessagingSettings
from postroom.adapters.system.clock import SystemClock
from postroom.domain.errors import InvalidOutboxEvent
from tests.support.memory_stream import MemoryStream
from tests.support.outboxes import column, history, names, order_placed, record, relaying

SOON = timedelta(hours=1)
NAIVE = datetime(2030, 1, 1, tzinfo=UTC).replace(tzinfo=None)
DATA = bytes(range(256))


class LaterClock(SystemClock):
    """A clock that is two hours ahead."""

    def wall(self) -> int:
        return super().wall() + 7_200_000_000


async def test_attributes_and_the_content_type_are_headers(messaging_database: str) -> None:
    attributes = {"Tenant": "Zoë", "x-delay": "5"}
    record(messaging_database, order_placed("o-1", 1, attributes=attributes, content_type="application/json"))
    stream = MemoryStream()
    async with relaying(messaging_database, stream) as relay:
        await relay.relay_once()
    ((_, payload, headers),) = stream.messages
    assert headers.items() >= (attributes | {"Content-Type": "application/json"}).items()
    assert (headers["Aggregate-Id"], payload) == ("o-1", b'{"n": 1, "order": "o-1"}')


async def test_ids_that_are_no_uuids_and_the_context_of_a_trace_are_headers(messaging_database: str) -> None:
    trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "shop=1", "baggage": "user=5"}
    record(
        messaging_database, order_placed("o-1", 1, correlation_id="request 1", causation_id="Zoë", **trace)
    )
    stream = MemoryStream()
    async with relaying(messaging_database, stream) as relay:
        await relay.relay_once()
    ((_, _, headers),) = stream.messages
    assert headers.items() >= ({"Correlation-Id": "request 1", "Causation-Id": "Zoë"} | trace).items()


async def test_a_payload_of_bytes_is_published_as_it_is(messaging_database: str) -> None:
    stream = MemoryStream()
    parts = [DATA, bytearray(DATA), memoryview(DATA), b""]
    record(
        messaging_database,
        *(order_placed("o-1", 1, payload=part, content_type="application/x-proto") for part in parts),
    )
    async with relaying(messaging_database, stream) as relay:
        await relay.relay_once()
    assert stream.payloads == [DATA, DATA, DATA, b""]
    assert {headers["Content-Type"] for _, _, headers in stream.messages} == {"application/x-proto"}


def test_the_limit_of_payloads_is_for_the_bytes_that_are_published(messaging_database: str) -> None:
    outbox = Outbox(max_payload_bytes=300)
    with psycopg.connect(messaging_database) as connection:
        outbox.record(connection, order_placed("o-1", 1, payload=bytes(300), content_type="image/png"))
        with pytest.raises(InvalidOutboxEvent, match="has 301 bytes as published, more than 300"):
            outbox.record(connection, order_placed("o-1", 1, payload=bytes(301), content_type="image/png"))


async def test_bytes_that_were_altered_are_parked_and_their_cause_is_told(messaging_database: str) -> None:
    record(messaging_database, order_placed("o-1", 1, payload=DATA, content_type="image/png"))
    with psycopg.connect(messaging_database) as connection:
        connection.execute("UPDATE outbox_events SET payload = '{}'")
    stream = MemoryStream()
    async with relaying(messaging_database, stream) as relay:
        await relay.relay_once()
    assert (stream.messages, relay.counts.parked) == ([], 1)
    (error,) = column(messaging_database, "publish_error")
    assert "its payload can't be read as base64" in error


async def test_a_delayed_event_is_published_when_it_is_due_and_later_ones_of_its_aggregate_after_it(
    messaging_database: str,
) -> None:
    at = datetime.now(UTC) + SOON
    async with await psycopg.AsyncConnection.connect(messaging_database) as connection:
        events = [order_placed("o-1", 1, publish_at=at), order_placed("o-1", 2), order_placed("o-2", 1)]
        first, *_ = await AsyncOutbox().record(connection, *events)
    stream = MemoryStream()
    async with (
        relaying(messaging_database, stream) as relay,
        open_outbox(MessagingSettings(messaging_database, "sea")) as desk,
    ):
        await relay.relay_once()
        assert [headers["Aggregate-Id"] for _, _, headers in stream.messages] == ["o-2"]
        assert await desk.list_failed_events(10, only_parked=False) == []
        assert (await desk.get_backlog()).count == 2
    async with relaying(messaging_database, stream, clock=LaterClock()) as later:
        await later.relay_once()
    assert [payload[:7] for payload in stream.payloads[1:]] == [b'{"n": 1', b'{"n": 2']
    assert names(history(messaging_database, first)) == ["OutboxEventRecorded", "OutboxEventPublished"]


async def test_a_time_in_the_past_delays_nothing(messaging_database: str) -> None:
    record(messaging_database, order_placed("o-1", 1, publish_at=datetime(2020, 1, 1, tzinfo=UTC)))
    stream = MemoryStream()
    async with relaying(messaging_database, stream) as relay:
        await relay.relay_once()
    assert len(stream.messages) == 1


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"attributes": {"a b": "c"}}, "must have 1 to 255 letters"),
        ({"attributes": {"": "c"}}, "must have 1 to 255 letters"),
        ({"attributes": {"ü": "c"}}, "must have 1 to 255 letters"),
        ({"attributes": {1: "c"}}, "must have 1 to 255 letters"),
        ({"attributes": {"a": b"c"}}, "the value of attribute a must be text"),
        ({"attributes": {"a": "b\r\nNats-Msg-Id: c"}}, "must be text without control characters"),
        ({"attributes": {"Nats-Rollup": "all"}}, "is reserved for the outbox or a target"),
        ({"attributes": {"event-id": "1"}}, "is reserved for the outbox or a target"),
        ({"attributes": {"content-type": "a"}}, "is reserved for the outbox or a target"),
        ({"attributes": {"a": "b" * 16_384}}, "its attributes have 16,385 bytes, more than 16,384"),
        ({"attributes": [("a", "b")]}, "attributes must map names to text"),
        ({"content_type": 5}, "the value of content_type must be text"),
        ({"content_type": "a\nb"}, "the value of content_type must be text without control characters"),
        ({"publish_at": "soon"}, "publish_at must be a datetime with a time zone"),
        ({"publish_at": NAIVE}, "publish_at 2030-01-01 00:00:00 has no time zone"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_target_would_refuse_is_refused_when_it_is_recorded(
    fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidOutboxEvent, match=problem):
        Outbox().record(None, order_placed("o-1", 1, **fields))  # type: ignore[arg-type]  # never used
