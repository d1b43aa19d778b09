"""What every dead-letter queue promises: an adapter's tests inherit the suite and bring a `Letterbox`."""

from abc import ABC, abstractmethod

import pytest

from postroom.application.ports.dead_letters import DeadLetterQueue
from postroom.domain.errors import InvalidRequest


class Letterbox(ABC):
    """A stream of dead letters of the context `sea`, for as long as a test runs.

    Attributes:
        missing: a number that no message has.
    """

    missing: str

    @abstractmethod
    def queue(self) -> DeadLetterQueue:
        """Return the adapter."""

    @abstractmethod
    async def put(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        """Store a message."""


class DeadLetterQueueConformance:
    @pytest.fixture
    def queue(self, letterbox: Letterbox) -> DeadLetterQueue:
        return letterbox.queue()

    async def test_an_empty_queue_has_nothing(self, queue: DeadLetterQueue) -> None:
        assert await queue.read("sea.dlq.a", 10) == []

    async def test_messages_are_read_as_they_came(self, letterbox: Letterbox, queue: DeadLetterQueue) -> None:
        await letterbox.put("sea.dlq.a", b"\x00\xff", {"Nats-Msg-Id": "dlq:1"})
        await letterbox.put("sea.dlq.a", b"")
        first, second = await queue.read("sea.dlq.a", 10)
        assert (first.subject, first.data, dict(first.headers)) == (
            "sea.dlq.a",
            b"\x00\xff",
            {"Nats-Msg-Id": "dlq:1"},
        )
        assert (second.subject, second.data, dict(second.headers)) == ("sea.dlq.a", b"", {})

    async def test_to_read_is_not_to_take_away(self, letterbox: Letterbox, queue: DeadLetterQueue) -> None:
        await letterbox.put("sea.dlq.a", b"1")
        for _ in range(2):
            assert [each.data for each in await queue.read("sea.dlq.a", 10)] == [b"1"]

    async def test_only_what_was_asked_for_is_read(
        self, letterbox: Letterbox, queue: DeadLetterQueue
    ) -> None:
        for subject in ("sea.dlq.a", "sea.dlq.b"):
            await letterbox.put(subject, subject.encode())
        assert [each.data for each in await queue.read("sea.dlq.b", 10)] == [b"sea.dlq.b"]
        assert await queue.read("sea.dlq.c", 10) == []

    async def test_more_than_one_batch_is_read_and_no_more_than_the_limit(
        self, letterbox: Letterbox, queue: DeadLetterQueue
    ) -> None:
        for number in range(1_201):
            await letterbox.put("sea.dlq.a", b"%d" % number)
        assert [int(each.data) for each in await queue.read("sea.dlq.a", 5_000)] == list(range(1_201))
        assert [int(each.data) for each in await queue.read("sea.dlq.a", 700)] == list(range(700))

    async def test_what_is_removed_is_gone_and_to_remove_it_twice_is_fine(
        self, letterbox: Letterbox, queue: DeadLetterQueue
    ) -> None:
        for number in range(3):
            await letterbox.put("sea.dlq.a", b"%d" % number)
        first, second, _ = await queue.read("sea.dlq.a", 10)
        for message in (second, second, first, first, second):
            await queue.remove(message)
        assert [each.data for each in await queue.read("sea.dlq.a", 10)] == [b"2"]

    async def test_a_message_is_found_by_its_number(
        self, letterbox: Letterbox, queue: DeadLetterQueue
    ) -> None:
        for data in (b"1", b"2"):
            await letterbox.put("sea.dlq.a", data, {"Reason": "malformed"})
        first, second = await queue.read("sea.dlq.a", 10)
        assert await queue.find("sea.dlq.a", second.sequence) == second
        await queue.remove(first)
        assert await queue.find("sea.dlq.a", first.sequence) is None
        assert await queue.find("sea.dlq.a", letterbox.missing) is None
        for number in ("x", "0", "-1", "9" * 30, "", "1-", "1 -2"):
            with pytest.raises(InvalidRequest, match="not the number of a dead letter"):
                await queue.find("sea.dlq.a", number)
