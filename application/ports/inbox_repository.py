"""Port: the inbox table of a bounded context, as the worker uses it (SDS-047 PORT-047-002)."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol
from uuid import UUID

import msgspec

from postroom.application.ports.outbox_repository import Backlog
from postroom.domain.inbox import InboxMessage


class PartitionBacklog(msgspec.Struct, frozen=True):
    """Messages of ordered workers that are not settled, in one partition of a consumer's queue.

    Arguments:
        consumer: `STREAM/DURABLE`.
        first_sequence: position in the stream of the first one.
        oldest_at: when the first one was added to the queue, µs UTC.
    """

    consumer: str
    partition: int
    count: int
    first_sequence: int
    oldest_at: int


class InboxRepository(Protocol):
    """The messages that an inbox received, and their states; see `tests/conformance/inbox_repository.py`.

    Changes return the message's new state. All times are in µs UTC.

    Raises: Unavailable when the database can't be used, or another transaction has locked the message.
    """

    async def insert(
        self, message_id: UUID, subject: str, at: int, *, redrive: bool = False, busy_ms: int = 0
    ) -> InboxMessage:
        """Record that a delivery of a message starts (SDS-047 CMD-051).

        Arguments:
            redrive: start it although the message is a dead letter.
            busy_ms: refuse while another delivery that started less than this ago is in progress.

        Raises:
            DuplicateInboxMessage: the message is settled (SDS-047 POL-047-003).
            Unavailable: another delivery of the message is in progress.
        """

    async def mark_processed(self, message_id: UUID, at: int) -> InboxMessage:
        """Record that the handler processed the message; the second time changes nothing.

        Raises: InvalidTimestamp if `at` is before the message was received (SDS-047 POL-047-004).
        """

    async def record_error(self, message_id: UUID, error: str, at: int) -> InboxMessage:
        """Record that a delivery failed and the message will be delivered again."""

    async def mark_dead_lettered(self, message_id: UUID, reason: str, at: int) -> InboxMessage:
        """Record that the message was published to the dead-letter subject."""

    async def mark_discarded(self, message_id: UUID, reason: str, letter: bytes, at: int) -> InboxMessage:
        """Record that an operator discarded a dead letter, whose JSON the history keeps.

        Raises: NotFound if the inbox has no such message.
        """

    async def backlog(self) -> Backlog:
        """Count messages that are neither processed nor dead-lettered (SDS-047 QRY-051)."""

    async def queue_backlog(self, consumer: str | None = None) -> Sequence[PartitionBacklog]:
        """Count the messages in the queues of ordered workers, by partition; those without any are omitted.

        Arguments:
            consumer: only its queue, `STREAM/DURABLE`.
        """

    async def delete_processed(self, before: int, limit: int) -> int | None:
        """Delete up to `limit` messages processed before a time; None if another process does so."""

    def exclusive(self, task: str) -> AbstractAsyncContextManager[bool]:
        """Try to lock a task on this inbox while the context manager lasts; yield whether that succeeded."""

    async def close(self) -> None:
        """Release the connection; closing twice is fine."""
