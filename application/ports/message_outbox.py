"""Port: messages that transactions recorded for a mailbox, until its owner has sent them."""

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol


class RecordedMessage(NamedTuple):
    """A row of the outbox.

    Arguments:
        position: order of recording; may be reused after the row is deleted.
        id: the message's id, with which it is sent.
        topic: the message's topic.
        message: the message as JSON; bytes in it are base64.
    """

    position: int
    id: str
    topic: str
    message: str


MAX_COUNTED = 10_000
"""Rows of an outbox, the oldest ones, that a count reads."""
MAX_MAILBOXES = 20
"""Mailboxes that a count of an outbox names; the messages for all others are counted together."""


class MessageCount(NamedTuple):
    """Number of rows of an outbox for one mailbox, of the first `MAX_COUNTED` in the order of recording.

    Arguments:
        mailbox: name for which they were recorded, which need not be that of a mailbox.
        waiting: messages that were neither sent nor refused.
        refused: messages that the mailbox refused.
        oldest_at: when the first waiting one was recorded, µs since 1970 UTC, if its row says so.
    """

    mailbox: str
    waiting: int
    refused: int
    oldest_at: int | None


class MessageOutbox(Protocol):
    """Outbox of one mailbox in a database; every adapter passes `tests/conformance/message_outbox.py`.

    Raises: Unavailable when the database can't be used.
    """

    async def find(self, limit: int, except_topics: Collection[str] = ()) -> Sequence[RecordedMessage]:
        """Return messages that are committed and were not refused, in the order of recording.

        Arguments:
            limit: maximum number of messages; fewer are returned if they are large.
            except_topics: topics to omit.

        Returns: the messages; empty if no transaction has recorded one.
        """

    async def settle(
        self, sent: Sequence[RecordedMessage], refused: Sequence[tuple[RecordedMessage, str]]
    ) -> None:
        """Delete the messages that were sent, and keep the refused ones with their errors."""

    async def wait(self) -> None:
        """Return when messages may have been recorded since the last `find`; may return without any."""

    async def close(self) -> None:
        """Release the connection; closing twice is fine."""
