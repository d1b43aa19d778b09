"""What every publisher promises: an adapter's test inherits the suite and provides three fixtures.

`publisher` waits long for an answer, also on a busy machine, `impatient` shortly; both publish to `stream`.
`PublisherConformance` is for all targets, `StreamConformance` adds what streams of events promise.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol
from uuid import UUID

import msgspec
import pytest

from postroom.application.cloudevents import NATS
from postroom.application.outbox.formats import FormatName, new_format
from postroom.application.ports.outbox import Publisher
from postroom.domain.errors import InvalidRequest, Unavailable
from postroom.domain.outbox import OutboxEvent
from postroom.domain.subject import CorrelationContext
from tests.support.cloud_events import attributes_of, read_by_sdk

ORDERS = "sea.event.order_placed.v1"
PATIENT_SECONDS = 240
SOON_SECONDS = 20
"""Far less than the timeout of `publisher`."""


EVENT = OutboxEvent(
    UUID(int=1),
    1,
    "order",
    'o 1/"ü" 100%',
    "order_placed",
    2,
    1_768_464_000_000_000,
    CorrelationContext(str(UUID(int=2)), str(UUID(int=3))),
    f"00-{'a' * 32}-{'b' * 16}-01",
    attributes={
        "Content-Type": "application/x.order+json",
        "dataschema": "https://shop.example/order.json",
        "tenant": "Zoë",
        "X-Tenant": "Zoë",
    },
)
ATTRIBUTES = {
    "specversion": "1.0",
    "id": str(UUID(int=1)),
    "source": "/Zo%C3%AB",
    "type": "order_placed",
    "subject": 'order/o 1/"ü" 100%',
    "time": "2026-01-15T08:00:00.000000Z",
    "datacontenttype": "application/x.order+json",
    "dataschema": "https://shop.example/order.json",
    "partitionkey": 'o 1/"ü" 100%',
    "eventversion": "2",
    "correlationid": str(UUID(int=2)),
    "causationid": str(UUID(int=3)),
    "traceparent": f"00-{'a' * 32}-{'b' * 16}-01",
    "tenant": "Zoë",
}
"""Attributes of `EVENT` as a CloudEvent."""


class Stored(msgspec.Struct, frozen=True):
    subject: str
    payload: bytes
    headers: Mapping[str, str]


class Target(Protocol):
    """Where `SUBJECT` leads, seen from the other side."""

    async def messages(self) -> Sequence[Stored]: ...

    async def pause(self) -> None:
        """Let the server answer nobody until `resume`."""

    async def resume(self) -> None: ...


class Stream(Target, Protocol):
    """The stream `SEA_EVENTS` at `sea.event.>`."""

    async def stall(self) -> None:
        """Let the server answer nobody from now on."""

    async def crash(self) -> None:
        """End the server without warning."""

    async def restart(self) -> None: ...


class PublisherConformance:
    """The promises of all publishers.

    Arguments:
        subject: leads to the target.
        refused: a name that the target refuses, and `refusal` a part of the reason.
        id_header: the header with the id of an event.
        binding: the headers of CloudEvents.
        in_flight: the number of messages that are published together.
        too_large: the size of a payload that is refused; None if the target's limit is too high for a test.
        stores_once: whether a message that is published again is stored once.
    """

    subject = ORDERS
    refused = "other.event.made.v1"
    refusal = "no stream|No stream"
    id_header = "Nats-Msg-Id"
    binding = NATS
    in_flight = 5_000
    too_large: int | None = 1_048_577
    stores_once = True

    async def test_a_published_message_is_stored_with_its_headers(
        self, publisher: Publisher, stream: Target
    ) -> None:
        headers = {self.id_header: "a", "Aggregate-Id": "o 1", "Correlation-Id": "ü"}
        published = await publisher.publish(self.subject, b"\x00\xff", headers)
        assert not published.duplicate
        assert await stream.messages() == [Stored(self.subject, b"\x00\xff", headers)]

    @pytest.mark.parametrize("name", ["cloudevents-binary", "cloudevents-structured"])
    async def test_the_official_sdk_reads_a_cloud_event(
        self, publisher: Publisher, stream: Target, name: FormatName
    ) -> None:
        form = new_format(name, "Zoë", self.binding, id_header=self.id_header)
        message = form.write(EVENT, b'{"total": 1.50}')
        await publisher.publish(self.subject, message.payload, message.headers)
        (stored,) = await stream.messages()
        read = read_by_sdk(self.binding, stored.payload, stored.headers)
        assert (attributes_of(read), read.get_data()) == (ATTRIBUTES, {"total": 1.5})
        assert stored.headers["X-Tenant"] == "Zoë"

    async def test_messages_in_flight_together_are_stored_in_the_order_they_were_published_in(
        self, publisher: Publisher, stream: Target
    ) -> None:
        published = await asyncio.gather(
            *(
                publisher.publish(self.subject, b"%d" % n, {self.id_header: str(n), "Aggregate-Id": "o-1"})
                for n in range(self.in_flight)
            )
        )
        assert [each.duplicate for each in published] == [False] * self.in_flight
        stored = await stream.messages()
        assert [each.payload for each in stored] == [b"%d" % n for n in range(self.in_flight)]

    async def test_a_name_that_the_target_refuses_is_refused_and_others_go_on(
        self, publisher: Publisher, stream: Target
    ) -> None:
        with pytest.raises(InvalidRequest, match=self.refusal):
            await publisher.publish(self.refused, b"1", {})
        await publisher.publish(self.subject, b"1", {})
        assert len(await stream.messages()) == 1

    async def test_a_message_that_is_too_large_is_refused_and_disturbs_no_other(
        self, publisher: Publisher, stream: Target
    ) -> None:
        if self.too_large is None:
            return
        others = [
            asyncio.create_task(publisher.publish(self.subject, b"%d" % n, {self.id_header: str(n)}))
            for n in range(100)
        ]
        with pytest.raises(InvalidRequest):
            await publisher.publish(self.subject, bytes(self.too_large), {})
        await asyncio.gather(*others)
        assert len(await stream.messages()) == 100

    async def test_what_a_paused_server_did_not_confirm_is_published_again_under_the_same_id(
        self, publisher: Publisher, impatient: Publisher, stream: Target
    ) -> None:
        await publisher.publish(self.subject, b"1", {self.id_header: "1"})
        await stream.pause()
        try:
            with pytest.raises(Unavailable):
                await impatient.publish(self.subject, b"2", {self.id_header: "2"})
        finally:
            await stream.resume()
        await _publish_when_back(publisher, self.subject, b"2", {self.id_header: "2"})
        await _publish_when_back(impatient, self.subject, b"3", {self.id_header: "3"})
        stored = [(each.payload, each.headers.get(self.id_header)) for each in await stream.messages()]
        assert set(stored) == {(b"1", "1"), (b"2", "2"), (b"3", "3")}
        assert stored.count((b"1", "1")) == 1
        if self.stores_once:
            assert len(stored) == 3

    async def test_closing_twice_is_fine_and_then_nothing_can_be_published(
        self, publisher: Publisher, stream: Target
    ) -> None:
        await publisher.close()
        await publisher.close()
        with pytest.raises(Unavailable):
            await publisher.publish(self.subject, b"1", {})


class StreamConformance(PublisherConformance):
    """The promises of publishers to streams of NATS."""

    async def test_the_position_in_the_stream_is_returned(self, publisher: Publisher, stream: Stream) -> None:
        for n in (1, 2):
            published = await publisher.publish(ORDERS, b"", {})
            assert (published.stream, published.sequence) == ("SEA_EVENTS", n)

    async def test_a_message_of_the_same_id_is_stored_once_and_called_a_duplicate(
        self, publisher: Publisher, stream: Stream
    ) -> None:
        first = await publisher.publish(ORDERS, b"1", {"Nats-Msg-Id": "a"})
        again = await publisher.publish(ORDERS, b"1", {"Nats-Msg-Id": "a"})
        assert (again.sequence, first.duplicate, again.duplicate) == (first.sequence, False, True)
        assert len(await stream.messages()) == 1

    async def test_a_subject_that_no_stream_listens_at_is_refused_with_the_remedy(
        self, publisher: Publisher, stream: Stream
    ) -> None:
        with pytest.raises(
            InvalidRequest, match=r"No stream has the subject other\.event.*postroom streams apply"
        ):
            await publisher.publish("other.event.made.v1", b"1", {})
        assert (await publisher.publish(ORDERS, b"1", {})).sequence == 1

    @pytest.mark.parametrize(
        "subject", ["", "sea.event.*", "sea.event.>", "sea..event", "sea.event.a b", ".sea"]
    )
    async def test_what_is_no_subject_is_refused(self, publisher: Publisher, subject: str) -> None:
        with pytest.raises(InvalidRequest, match="is not a subject to publish to"):
            await publisher.publish(subject, b"1", {})

    @pytest.mark.parametrize("in_headers", [0, 20_000])
    async def test_the_size_of_a_message_is_that_of_its_payload_and_headers(
        self, publisher: Publisher, stream: Stream, in_headers: int
    ) -> None:
        large = b"x" * (1_048_577 - in_headers)
        with pytest.raises(InvalidRequest, match=r"has 1,0\d\d,\d\d\d bytes with its headers"):
            await publisher.publish(ORDERS, large, {"Reason": "y" * in_headers})
        assert await stream.messages() == []

    @pytest.mark.parametrize(
        "headers",
        [{"Reason": "a\r\nNats-Msg-Id: b"}, {"a b": "c"}, {"a\nb": "c"}],
        ids=["value", "space", "name"],
    )
    async def test_a_header_that_would_break_the_protocol_is_refused(
        self, publisher: Publisher, stream: Stream, headers: dict[str, str]
    ) -> None:
        with pytest.raises(InvalidRequest, match=r"header|Header"):
            await publisher.publish(ORDERS, b"1", headers)
        assert await stream.messages() == []

    @pytest.mark.parametrize("size", [10, 500_000], ids=["small", "more than is buffered"])
    async def test_what_is_in_flight_when_the_server_dies_fails_before_its_timeout_and_is_not_sent_later(
        self, publisher: Publisher, stream: Stream, size: int
    ) -> None:
        await publisher.publish(ORDERS, b"first", {})
        await stream.stall()
        in_flight = asyncio.gather(
            *(publisher.publish(ORDERS, bytes(size), {"Nats-Msg-Id": str(n)}) for n in range(100)),
            return_exceptions=True,
        )
        await asyncio.sleep(0.01)
        await stream.crash()
        async with asyncio.timeout(SOON_SECONDS):
            outcomes = await in_flight
        assert {type(outcome) for outcome in outcomes} == {Unavailable}, outcomes
        await stream.restart()
        await _publish_when_back(publisher, ORDERS, b"last")
        assert [each.payload for each in await stream.messages()] == [b"first", b"last"]

    async def test_publishing_goes_on_when_the_server_is_back(
        self, publisher: Publisher, impatient: Publisher, stream: Stream
    ) -> None:
        await publisher.publish(ORDERS, b"1", {"Nats-Msg-Id": "1"})
        await stream.crash()
        with pytest.raises(Unavailable):
            await impatient.publish(ORDERS, b"2", {"Nats-Msg-Id": "2"})
        await stream.restart()
        await _publish_when_back(publisher, ORDERS, b"2")
        assert [each.payload for each in await stream.messages()] == [b"1", b"2"]


async def _publish_when_back(
    publisher: Publisher, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
) -> None:
    async with asyncio.timeout(PATIENT_SECONDS):
        while True:
            try:
                await publisher.publish(subject, payload, headers or {"Nats-Msg-Id": payload.decode()})
                return
            except Unavailable:
                await asyncio.sleep(0.01)
