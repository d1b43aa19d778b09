"""The query for the backlog of an inbox."""

from datetime import UTC, datetime

import msgspec

from postroom.application.ports.inbox_repository import InboxRepository


class InboxBacklog(msgspec.Struct, frozen=True):
    """Backlog of an inbox (SDS-047 QRY-051): unsettled messages, and when the oldest was received."""

    context: str
    count: int
    oldest_at: datetime | None


class GetInboxBacklog:
    """The query for the messages that are neither processed nor dead-lettered (SDS-047 QRY-051)."""

    def __init__(self, inbox: InboxRepository, context: str) -> None:
        self._inbox = inbox
        self._context = context

    async def __call__(self) -> InboxBacklog:
        """Return the backlog of the context."""
        backlog = await self._inbox.backlog()
        oldest_at = (
            None if backlog.oldest_at is None else datetime.fromtimestamp(backlog.oldest_at / 1e6, UTC)
        )
        return InboxBacklog(self._context, backlog.count, oldest_at)
