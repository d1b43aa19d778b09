"""What every publisher promises: an adapter's test inherits the suite and provides three fixtures.

`publisher` waits long for an answer, also on a busy machine, `impatient` shortly; both publish to `stream`.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import pytest

from postroom.application.ports.publisher import Publisher
from postroom.domain.errors import InvalidRequest, Unavailable

ORDERS = "sea.event.order_placed.v1"
PATIENT_SECONDS = 240
SOON_SECONDS = 20
"""Far less than the timeout of `publisher`."""


class Stored(msgspec.Struct, frozen=True):
    subject: str
    payload: bytes
    headers: Mapping[str, str]


class Stream(Protocol):
    """The stream `SEA_EVENTS` at `sea.event.>`, seen from the other side."""

    async def messages(self) -> Sequence[Stored]: ...

    async def stall(self) -> None:
        """Let the server answer nobody from now on."""

    async def crash(self) -> None:
        """End the server without warning."""

    async def restart(self) -> None: ...


class PublisherConformance:
    async def test_a_published_message_is_on_the_stream_with_its_headers(
        self, publisher: Publisher, stream: Stream
    ) -> None:
        published = await publisher.publish(ORDERS, b'{"n": 1}', {"Nats-Msg-Id": "a", "Correlation-Id": "ü"})
        assert (published.stream, published.sequence, published.duplicate) == ("SEA_EVENTS", 1, False)
        (stored,) = await stream.messages()
        assert (stored.subject, stored.payload) == (ORDERS, b'{"n": 1}')
        assert stored.headers == {"Nats-Msg-Id": "a", "Correlation-Id": "ü"}

    async def test_a_message_of_the_same_id_is_stored_once_and_called_a_duplicate(
        self, publisher: Publisher, stream: Stream
    ) -> None:
        first = await publisher.publish(ORDERS, b"1", {"Nats-Msg-Id": "a"})
        again = await publisher.publish(ORDERS, b"1", {"Nats-Msg-Id": "a"})
        assert (again.sequence, first.duplicate, again.duplicate) == (first.sequence, False, True)
        assert len(await stream.messages()) == 1

    async def test_messages_in_flight_together_are_stored_in_the_order_they_were_published_in(
        self, publisher: Publisher, stream: Stream
    ) -> None:
        published = await asyncio.gather(
            *(publisher.publish(ORDERS, b"%d" % n, {"Nats-Msg-Id": str(n)}) for n in range(5_000))
        )
        assert [each.sequence for each in published] == list(range(1, 5_001))
        stored = await stream.messages()
        assert [each.payload for each in stored] == [b"%d" % n for n in range(5_000)]

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
    async def test_a_message_that_is_too_large_is_refused_and_disturbs_no_other(
        self, publisher: Publisher, stream: Stream, in_headers: int
    ) -> None:
        large = b"x" * (1_048_577 - in_headers)
        others = [
            asyncio.create_task(publisher.publish(ORDERS, b"%d" % n, {"Nats-Msg-Id": str(n)}))
            for n in range(100)
        ]
        with pytest.raises(InvalidRequest, match=r"has 1,0\d\d,\d\d\d bytes with its headers"):
            await publisher.publish(ORDERS, large, {"Reason": "y" * in_headers})
        await asyncio.gather(*others)
        assert len(await stream.messages()) == 100

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
        await _publish_when_back(publisher, b"last")
        assert [each.payload for each in await stream.messages()] == [b"first", b"last"]

    async def test_publishing_goes_on_when_the_server_is_back(
        self, publisher: Publisher, impatient: Publisher, stream: Stream
    ) -> None:
        await publisher.publish(ORDERS, b"1", {"Nats-Msg-Id": "1"})
        await stream.crash()
        with pytest.raises(Unavailable):
            await impatient.publish(ORDERS, b"2", {"Nats-Msg-Id": "2"})
        await stream.restart()
        await _publish_when_back(publisher, b"2")
        assert [each.payload for each in await stream.messages()] == [b"1", b"2"]

    async def test_closing_twice_is_fine_and_then_nothing_can_be_published(
        self, publisher: Publisher, stream: Stream
    ) -> None:
        await publisher.close()
        await publisher.close()
        with pytest.raises(Unavailable):
            await publisher.publish(ORDERS, b"1", {})


async def _publish_when_back(publisher: Publisher, payload: bytes) -> None:
    async with asyncio.timeout(PATIENT_SECONDS):
        while True:
            try:
                await publisher.publish(ORDERS, payload, {"Nats-Msg-Id": payload.decode()})
                return
            except Unavailable:
                await asyncio.sleep(0.01)
