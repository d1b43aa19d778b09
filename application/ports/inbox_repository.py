"""Port: the inbox table of a bounded context, as the worker sees it (SDS-047 PORT-047-002)."""

from contextlib import AbstractAsyncContextManager
from typing import Protocol
from uuid import UUID

from postroom.application.ports.outbox_repository import Backlog
from postroom.domain.inbox import InboxMessage


class InboxRepository(Protocol):
    """Remember which messages came and what became of them; see `tests/conformance/inbox_repository.py`.

    What changes a message returns it as it is now. All times are in µs UTC.

    Raises: Unavailable when the database can't be used, or somebody else is just changing the same message.
    """

    async def insert(self, message_id: UUID, subject: str, at: int, *, redrive: bool = False) -> InboxMessage:
        """Note that a delivery of a message begins (SDS-047 CMD-051).

        Arguments:
            redrive: begin it although the message is a dead letter.

        Raises: DuplicateInboxMessage when it was dealt with before (SDS-047 POL-047-003).
        """

    async def mark_processed(self, message_id: UUID, at: int) -> InboxMessage:
        """Note that the handler has dealt with the message; to do so twice changes nothing.

        Raises: InvalidTimestamp when that was before it was received (SDS-047 POL-047-004).
        """

    async def record_error(self, message_id: UUID, error: str, at: int) -> InboxMessage:
        """Note that a delivery failed and will be repeated."""

    async def mark_dead_lettered(self, message_id: UUID, reason: str, at: int) -> InboxMessage:
        """Note that the message went to the dead-letter subject and won't come again by itself."""

    async def backlog(self) -> Backlog:
        """Count what is neither processed nor a dead letter (SDS-047 QRY-051)."""

    async def remove_processed(self, before: int, limit: int) -> int:
        """Forget up to `limit` messages that were processed before a time, with their histories.

        Returns: how many there were; fewer than `limit` when none is left.
        """

    def alone(self, task: str) -> AbstractAsyncContextManager[bool]:
        """Try to be the only one to do a task on this inbox while the context lasts; yield whether one is."""

    async def close(self) -> None:
        """Release the connection; closing twice is fine."""
