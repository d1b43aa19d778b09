"""Port: failures of an outbox, an inbox or an ingestion, and their retry by operators."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

FailedKind = Literal["outbox", "inbox", "ingest", "recorded"]


class FailedItem(NamedTuple):
    """An event that was not published, or a message that was not processed or stored.

    Arguments:
        id: by which it is retried.
        name: type of the event, or original subject.
        origin: aggregate, or consumer.
        attempts: None if they are not counted.
        at: when it occurred or failed, RFC 3339; empty if that is unknown.
        error: of its last attempt.
        retry_at: when it is retried by itself, RFC 3339; None if it is parked.
    """

    id: str
    name: str
    origin: str
    attempts: int | None
    at: str
    error: str
    retry_at: str | None = None


class Failures(msgspec.Struct, frozen=True):
    """Failures, oldest first, with the backlog that they are in.

    Arguments:
        is_whole: whether there are no more items.
        count: number of events or messages that are not done; None if it is not known.
        oldest_at: when the oldest of them occurred or was received, RFC 3339; empty if that is unknown.
        details: names and texts of facts, such as the state of a replication slot.
    """

    items: Sequence[FailedItem]
    is_whole: bool
    count: int | None = None
    oldest_at: str = ""
    details: Sequence[tuple[str, str]] = ()


class Retried(msgspec.Struct, frozen=True):
    """Outcome of a retry: the number of failures, and a sentence that says what was done."""

    count: int
    text: str


class FailedWork(Protocol):
    """The failures of one outbox, inbox or ingestion."""

    kind: FailedKind
    name: str
    """Its context, its namespace, or the database in which messages are recorded."""

    async def read(self, limit: int) -> Failures:
        """Return the oldest failures.

        Raises: Unavailable when the database or the broker can't be used, InvalidRequest for unusable
            settings.
        """

    async def retry(self, ids: Sequence[str] | None) -> Retried:
        """Retry failures by their ids, or all that are parked.

        Raises: as `read`; NotFound for an unknown id, and InvalidRequest for what can't be retried.
        """
