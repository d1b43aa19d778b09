"""What every source promises: an adapter's test class inherits the suite and brings a `place`."""

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

import pytest

from postroom.application.ports.source import Source, SourceMessage
from postroom.domain.errors import Unavailable

PATIENT_MS = 20_000
"""As long as it takes."""
NOTHING_MS = 150
"""Long enough to see that nothing comes."""
SHORT_MS = 1_000
"""Settled at once it doesn't come again, and forgotten it does before a test gets tired."""


class Place(Protocol):
    """A stream, and a durable consumer of it that can be left and come back to."""

    async def publish(self, *data: bytes) -> None:
        """Let the stream store messages."""

    async def open(self, *, ack_wait_ms: int = PATIENT_MS) -> Source:
        """Read the stream from its beginning or from where the consumer got to; the test's end closes it."""


async def fetch(source: Source, count: int) -> list[SourceMessage]:
    """Return the next `count` messages, however many calls they come in.

    Of a message that comes twice, as its ack wait is over on a busy machine, the latest is returned.
    """
    found: dict[str, SourceMessage] = {}
    while len(found) < count:
        came = await source.fetch(count - len(found), PATIENT_MS)
        assert came, f"only {len(found)} of {count} messages came"
        found |= {message.sequence: message for message in came}
    return list(found.values())


def bodies(messages: Sequence[SourceMessage]) -> list[bytes]:
    return [message.data for message in messages]


class SourceConformance:
    async def test_messages_come_in_their_order_with_places_that_tell_them_apart(self, place: Place) -> None:
        source = await place.open()
        await place.publish(b"1", b"2", b"3")
        messages = await fetch(source, 3)
        assert bodies(messages) == [b"1", b"2", b"3"]
        assert [message.delivered for message in messages] == [1, 1, 1]
        assert len({message.sequence for message in messages}) == 3
        assert len({message.subject for message in messages}) == 1

    async def test_any_bytes_come_as_they_were_sent(self, place: Place) -> None:
        source = await place.open()
        sent = [b"", b"\r\n", bytes(range(256)), b"PING\r\n", b"x" * 200_000, b"MSG a 1 3\r\nabc\r\n", b"end"]
        await place.publish(*sent)
        assert bodies(await fetch(source, len(sent))) == sent

    async def test_a_fetch_takes_no_more_than_it_was_told_and_leaves_the_rest(self, place: Place) -> None:
        source = await place.open()
        await place.publish(*[b"%d" % number for number in range(10)])
        assert len(await source.fetch(4, PATIENT_MS)) <= 4
        seen = 4
        while seen < 10:
            came = await source.fetch(1, PATIENT_MS)
            assert len(came) <= 1
            seen += len(came)

    async def test_a_stream_without_news_gives_nothing(self, place: Place) -> None:
        source = await place.open()
        assert list(await source.fetch(10, 0)) == []
        assert list(await source.fetch(10, NOTHING_MS)) == []

    async def test_what_is_there_is_fetched_without_waiting(self, place: Place) -> None:
        await place.publish(b"1")
        source = await place.open()
        assert bodies(await source.fetch(10, 0)) == [b"1"]

    async def test_what_comes_later_is_waited_for(self, place: Place) -> None:
        source = await place.open()
        fetching = asyncio.create_task(fetch(source, 1))
        await asyncio.sleep(NOTHING_MS / 1_000)
        assert not fetching.done()
        await place.publish(b"late")
        assert bodies(await fetching) == [b"late"]

    async def test_what_was_acked_never_comes_again(self, place: Place) -> None:
        source = await place.open(ack_wait_ms=SHORT_MS)
        await place.publish(b"1", b"2", b"3")
        await source.ack(await fetch(source, 3))
        await source.close()
        again = await place.open(ack_wait_ms=SHORT_MS)
        await place.publish(b"4")
        messages = await fetch(again, 1)
        assert bodies(messages) == [b"4"]
        await again.ack(messages)
        assert list(await again.fetch(10, SHORT_MS + NOTHING_MS)) == []

    async def test_what_was_not_acked_comes_again_and_says_so(self, place: Place) -> None:
        source = await place.open(ack_wait_ms=SHORT_MS)
        await place.publish(b"1", b"2", b"3")
        first = await fetch(source, 3)
        await source.ack([first[1]])
        again = await fetch(source, 2)
        assert sorted(bodies(again)) == [b"1", b"3"]
        assert min(message.delivered for message in again) >= 2
        assert {message.sequence for message in again} == {first[0].sequence, first[2].sequence}

    async def test_what_nobody_acked_before_leaving_comes_to_whoever_is_next(self, place: Place) -> None:
        source = await place.open(ack_wait_ms=SHORT_MS)
        await place.publish(*[b"%d" % number for number in range(5)])
        await source.ack(await fetch(source, 2))
        await fetch(source, 1)
        await source.close()
        again = await place.open(ack_wait_ms=SHORT_MS)
        assert sorted(bodies(await fetch(again, 3))) == [b"2", b"3", b"4"]

    async def test_what_was_handed_back_comes_again_at_once(self, place: Place) -> None:
        source = await place.open()
        await place.publish(b"1", b"2")
        first = await fetch(source, 2)
        await source.nack([first[0]], 0)
        (again,) = await fetch(source, 1)
        assert (again.data, again.delivered) == (b"1", 2)

    async def test_what_was_handed_back_for_a_while_comes_after_it(self, place: Place) -> None:
        source = await place.open()
        await place.publish(b"soon", b"much later")
        soon, later = await fetch(source, 2)
        await source.nack([later], PATIENT_MS * 3)
        await source.nack([soon], NOTHING_MS)
        (again,) = await fetch(source, 1)
        assert (again.data, again.delivered) == (b"soon", 2)
        assert list(await source.fetch(10, NOTHING_MS)) == []

    async def test_what_is_worked_on_does_not_come_again(self, place: Place) -> None:
        source = await place.open(ack_wait_ms=SHORT_MS)
        came: list[SourceMessage] = []
        is_in_time = False
        while not is_in_time:  # a busy machine may take longer than the ack wait between two extensions
            await place.publish(b"kept", b"forgotten")
            start = time.monotonic()
            kept, forgotten = await fetch(source, 2)
            came.clear()
            is_in_time = True
            while not came:
                await source.extend([kept])
                came += await source.fetch(10, NOTHING_MS)
                is_in_time &= time.monotonic() - start < SHORT_MS / 1_000
                start = time.monotonic()
            await source.ack([kept, forgotten, *came])
        assert bodies(came) == [b"forgotten"]

    async def test_two_readers_share_the_messages(self, place: Place) -> None:
        one, other = await place.open(), await place.open()
        await place.publish(*[b"%d" % number for number in range(20)])
        found: list[bytes] = []
        while len(found) < 20:
            for source in (one, other):
                messages = await source.fetch(5, NOTHING_MS)
                await source.ack(messages)
                found += bodies(messages)
        assert sorted(found) == sorted(b"%d" % number for number in range(20))

    async def test_settling_nothing_is_fine(self, place: Place) -> None:
        source = await place.open()
        await source.ack([])
        await source.nack([], 10)
        await source.extend([])

    async def test_acking_twice_is_fine(self, place: Place) -> None:
        source = await place.open()
        await place.publish(b"1")
        messages = await fetch(source, 1)
        await source.ack(messages)
        await source.ack(messages)

    async def test_a_closed_source_says_so(self, place: Place) -> None:
        source = await place.open()
        await source.close()
        await source.close()
        with pytest.raises(Unavailable, match="closed"):
            await source.fetch(1, 0)
