"""What every inbox repository promises: an adapter's test class inherits the suite and brings `inboxes`."""

import asyncio
from collections.abc import Callable
from uuid import UUID, uuid4

import pytest

from postroom.application.ports.inbox import InboxRepository
from postroom.domain.errors import DuplicateInboxMessage, InvalidTimestamp, NotFound, Unavailable

SUBJECT = "vibespro.event.vibe_created.v1"
SECOND = 1_000_000
NOW = 1_766_959_200 * SECOND

Inboxes = Callable[[], InboxRepository]
"""Open the same inbox once more, as another worker does."""


class InboxRepositoryConformance:
    @pytest.fixture
    def inbox(self, inboxes: Inboxes) -> InboxRepository:
        return inboxes()

    async def test_a_message_is_received_once_and_then_again(self, inbox: InboxRepository) -> None:
        id_ = uuid4()
        first = await inbox.insert(id_, SUBJECT, NOW)
        assert (first.message_id, first.subject, first.received_at) == (id_, SUBJECT, NOW)
        assert (first.attempts, first.version, first.is_settled) == (1, 1, False)
        second = await inbox.insert(id_, SUBJECT, NOW + SECOND)
        assert (second.attempts, second.received_at, second.version) == (2, NOW, 2)

    async def test_a_message_in_flight_is_busy_for_as_long_as_the_caller_says(self, inboxes: Inboxes) -> None:
        one, other = inboxes(), inboxes()
        id_ = uuid4()
        await one.insert(id_, SUBJECT, NOW, busy_ms=1_000)
        for now in (NOW, NOW + SECOND - 1, NOW - SECOND + 1):  # clocks of two workers differ
            with pytest.raises(Unavailable, match="is being handled"):
                await other.insert(id_, SUBJECT, now, busy_ms=1_000)
        assert (await other.insert(id_, SUBJECT, NOW + SECOND, busy_ms=1_000)).attempts == 2
        with pytest.raises(Unavailable, match="is being handled"):
            await one.insert(id_, SUBJECT, NOW + SECOND, busy_ms=1_000)
        assert (await one.insert(id_, SUBJECT, NOW + SECOND)).attempts == 3

    async def test_a_message_that_failed_is_not_in_flight(self, inbox: InboxRepository) -> None:
        id_ = uuid4()
        await inbox.insert(id_, SUBJECT, NOW, busy_ms=1_000)
        await inbox.record_error(id_, "HTTP 503", NOW)
        assert (await inbox.insert(id_, SUBJECT, NOW, busy_ms=1_000)).attempts == 2
        await inbox.mark_dead_lettered(id_, "poison", NOW)
        assert (await inbox.insert(id_, SUBJECT, NOW, redrive=True, busy_ms=1_000)).attempts == 3

    async def test_a_processed_message_is_a_duplicate(self, inbox: InboxRepository) -> None:
        id_ = uuid4()
        await inbox.insert(id_, SUBJECT, NOW)
        message = await inbox.mark_processed(id_, NOW + 5)
        assert message.processed_at == NOW + 5
        with pytest.raises(DuplicateInboxMessage):
            await inbox.insert(id_, SUBJECT, NOW + SECOND)
        assert await inbox.mark_processed(id_, NOW + SECOND) == message

    async def test_a_message_is_not_processed_before_it_is_received(self, inbox: InboxRepository) -> None:
        id_ = uuid4()
        await inbox.insert(id_, SUBJECT, NOW)
        with pytest.raises(InvalidTimestamp):
            await inbox.mark_processed(id_, NOW - 1)
        assert (await inbox.mark_processed(id_, NOW)).processed_at == NOW

    async def test_errors_are_stored(self, inbox: InboxRepository) -> None:
        id_ = uuid4()
        await inbox.insert(id_, SUBJECT, NOW)
        await inbox.record_error(id_, "HTTP 503: 'ü\x00;", NOW)
        message = await inbox.insert(id_, SUBJECT, NOW)
        assert message.last_error == "HTTP 503: 'ü;"
        assert message.attempts == 2

    async def test_a_dead_letter_is_a_duplicate_until_it_is_redriven(self, inbox: InboxRepository) -> None:
        id_ = uuid4()
        await inbox.insert(id_, SUBJECT, NOW)
        assert (await inbox.mark_dead_lettered(id_, "poison: no total", NOW)).dead_lettered_at == NOW
        with pytest.raises(DuplicateInboxMessage):
            await inbox.insert(id_, SUBJECT, NOW)
        message = await inbox.insert(id_, SUBJECT, NOW, redrive=True)
        assert (message.attempts, message.last_error) == (2, "poison: no total")
        assert (await inbox.mark_processed(id_, NOW)).is_settled

    async def test_a_discarded_dead_letter_is_a_duplicate(self, inbox: InboxRepository) -> None:
        id_ = uuid4()
        with pytest.raises(NotFound):
            await inbox.mark_discarded(id_, "a test order", b"{}", NOW)
        await inbox.insert(id_, SUBJECT, NOW)
        await inbox.mark_dead_lettered(id_, "poison", NOW)
        message = await inbox.mark_discarded(id_, "a test order\x00", b"{}", NOW)
        assert (message.version, message.dead_lettered_at) == (3, NOW)
        with pytest.raises(DuplicateInboxMessage):
            await inbox.insert(id_, SUBJECT, NOW)

    async def test_the_backlog_counts_messages_that_are_neither_processed_nor_dead_lettered(
        self, inbox: InboxRepository
    ) -> None:
        assert (await inbox.backlog()).count == 0
        assert (await inbox.backlog()).oldest_at is None
        ids = [uuid4() for _ in range(4)]
        for age, id_ in enumerate(ids):
            await inbox.insert(id_, SUBJECT, NOW + age)
        await inbox.mark_processed(ids[0], NOW + 9)
        await inbox.mark_dead_lettered(ids[1], "poison", NOW + 9)
        backlog = await inbox.backlog()
        assert (backlog.count, backlog.oldest_at) == (2, NOW + 2)

    async def test_a_message_that_was_not_received_cannot_be_marked(self, inbox: InboxRepository) -> None:
        with pytest.raises(NotFound):
            await inbox.mark_processed(uuid4(), NOW)
        with pytest.raises(NotFound):
            await inbox.record_error(uuid4(), "HTTP 503", NOW)

    async def test_many_are_changed_at_once_and_one_in_turn(self, inbox: InboxRepository) -> None:
        ids = [uuid4() for _ in range(200)]
        received = await asyncio.gather(*(inbox.insert(id_, SUBJECT, NOW) for id_ in ids + ids + ids))
        assert [message.attempts for message in received] == [1] * 200 + [2] * 200 + [3] * 200
        settled = await asyncio.gather(*(inbox.mark_processed(id_, NOW) for id_ in ids))
        assert {message.version for message in settled} == {4}

    async def test_one_refusal_spoils_nothing_else(self, inbox: InboxRepository) -> None:
        old, new = uuid4(), uuid4()
        await inbox.insert(old, SUBJECT, NOW)
        await inbox.mark_processed(old, NOW)
        outcomes = await asyncio.gather(
            inbox.insert(old, SUBJECT, NOW),
            inbox.insert(new, SUBJECT, NOW),
            inbox.record_error(uuid4(), "unknown", NOW),
            return_exceptions=True,
        )
        assert isinstance(outcomes[0], DuplicateInboxMessage)
        assert not isinstance(outcomes[1], BaseException)
        assert isinstance(outcomes[2], NotFound)

    async def test_workers_share_the_inbox(self, inboxes: Inboxes) -> None:
        one, other = inboxes(), inboxes()
        id_ = uuid4()
        assert (await one.insert(id_, SUBJECT, NOW)).attempts == 1
        assert (await other.insert(id_, SUBJECT, NOW)).attempts == 2
        await other.mark_processed(id_, NOW)
        with pytest.raises(DuplicateInboxMessage):
            await one.insert(id_, SUBJECT, NOW)

    async def test_processed_messages_are_deleted_oldest_first(self, inbox: InboxRepository) -> None:
        ids = [UUID(int=n) for n in range(5)]
        for age, id_ in enumerate(ids):
            await inbox.insert(id_, SUBJECT, NOW)
            if age < 4:
                await inbox.mark_processed(id_, NOW + age)
        assert await inbox.delete_processed(NOW + 3, 2) == 2
        assert await inbox.delete_processed(NOW + 3, 2) == 1
        assert await inbox.delete_processed(NOW + 3, 2) == 0
        assert (await inbox.insert(ids[0], SUBJECT, NOW)).version == 1
        with pytest.raises(DuplicateInboxMessage):
            await inbox.insert(ids[3], SUBJECT, NOW)
        assert (await inbox.insert(ids[4], SUBJECT, NOW)).attempts == 2

    async def test_only_one_does_a_task_at_a_time(self, inboxes: Inboxes) -> None:
        one, other = inboxes(), inboxes()
        async with one.exclusive("cleanup") as first, other.exclusive("cleanup") as second:
            assert (first, second) == (True, False)
            async with other.exclusive("redrive") as another:
                assert another
        async with other.exclusive("cleanup") as third:
            assert third

    async def test_closing_twice_is_fine(self, inbox: InboxRepository) -> None:
        await inbox.insert(uuid4(), SUBJECT, NOW)
        await inbox.close()
        await inbox.close()
