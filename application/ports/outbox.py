"""Ports: the outbox of a bounded context, its publisher, and captured tables (SDS-047 PORT-047-001)."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol
from uuid import UUID

import msgspec

from postroom.domain.errors import Unavailable
from postroom.domain.outbox import OutboxEvent
from postroom.domain.outbox_events import OutboxChange

PARTITIONS = 16
"""Groups of aggregates, by a hash of type and id. All relays must agree on it, so it never changes."""


class Backlog(msgspec.Struct, frozen=True):
    """Number of unpublished events or unsettled messages, and the oldest one's time (SDS-047 QRY-050, 051).

    Arguments:
        oldest_at: µs UTC; None without events, or if none has a representable time.
    """

    count: int
    oldest_at: int | None


class OutboxRow(NamedTuple):
    """A row of the outbox table.

    Arguments:
        payload: as it is published, JSON or bytes; None if it can't be read.
        has_history: False for an event inserted by plain SQL, until its first change.
        unreadable: why the event can't be published; None if it can.
    """

    event: OutboxEvent
    payload: bytes | None
    has_history: bool = True
    unreadable: str | None = None


class Decision(NamedTuple):
    """The new state of an outbox event, and the new events of its history."""

    event: OutboxEvent
    changes: Sequence[OutboxChange]


class Kind(NamedTuple):
    """Fields of an event from which its name at the target is made; events of one kind have one name."""

    aggregate_type: str
    event_type: str
    event_version: int


class OutboxClaim(Protocol):
    """Exclusive access to some partitions of the outbox, in one transaction."""

    @property
    def partitions(self) -> Sequence[int]:
        """Return the claimed partitions."""

    async def find_unpublished(self, now: int, limit: int) -> Sequence[OutboxRow]:
        """Return events to publish, oldest first: events of one aggregate in the order of recording.

        Events that are parked, or due after `now` (µs UTC), are omitted with all later events of their
        aggregates. An event that can't be read is returned as an unreadable row, and the others as usual.
        """

    async def find_besides(self, now: int, limit: int, kinds: Collection[Kind]) -> Sequence[OutboxRow]:
        """Return events to publish as `find_unpublished` does, except events of some kinds.

        An event of these kinds holds back the later events of its aggregate.
        """

    async def find(self, ids: Sequence[UUID]) -> Sequence[OutboxRow]:
        """Return the events with these ids that are in the outbox."""

    async def mark_published(self, decisions: Sequence[Decision]) -> None:
        """Record that the stream stored events (SDS-047 CMD-050)."""

    async def increment_attempts(self, decisions: Sequence[Decision]) -> None:
        """Record failed attempts, with the times of the next ones, and parked events."""

    async def retry(self, decisions: Sequence[Decision]) -> None:
        """Make events due at once."""

    async def replace(self, decisions: Sequence[tuple[Decision, bytes]]) -> None:
        """Make held rows due at once, as the events and JSON payloads that were read from them."""

    async def discard(self, decisions: Sequence[Decision]) -> None:
        """Remove events without publishing them; their histories remain."""


class OutboxRepository(Protocol):
    """Access to outbox events; every adapter passes `tests/conformance/outbox_repository.py`.

    Raises: Unavailable when the database can't be used.
    """

    def claim(
        self, partitions: Sequence[int], *, wait: bool = False
    ) -> AbstractAsyncContextManager[OutboxClaim]:
        """Get exclusive access to partitions while the context manager lasts.

        The claim ends with the connection at the latest, and after the idle time that the adapter is
        configured with. Changes are committed when the context ends without an error.

        Arguments:
            wait: wait for partitions that others have claimed instead of omitting them.
        """

    async def find_failed(self, limit: int, *, only_parked: bool) -> Sequence[OutboxEvent]:
        """Return events whose publishing failed, oldest first: those to be retried, and those parked."""

    async def next_retry(self) -> int | None:
        """Return the time (µs UTC) when the next failed or delayed event is due; None without one."""

    async def backlog(self) -> Backlog:
        """Count unpublished events (SDS-047 QRY-050)."""

    async def delete_published(self, before: int, limit: int) -> int | None:
        """Delete up to `limit` events published before a time (µs UTC); None if another process does so."""

    async def close(self) -> None:
        """Release the connection; closing twice is fine."""


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
        mailbox: name for which they were recorded; it need not be a mailbox.
        waiting: messages that were neither sent nor refused.
        refused: messages that the mailbox refused.
        oldest_at: when the first waiting one was recorded, µs since 1970 UTC, if its row says so.
    """

    mailbox: str
    waiting: int
    refused: int
    oldest_at: int | None


class RefusedMessage(NamedTuple):
    """A recorded message that its mailbox refused, and why."""

    id: str
    topic: str
    error: str


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

    async def find_refused(self, limit: int) -> Sequence[RefusedMessage]:
        """Return messages that were refused, in the order of recording; of the first `MAX_COUNTED` rows."""

    async def retry(self, ids: Collection[str] | None) -> int:
        """Have refused messages found again, and return their number.

        Arguments:
            ids: of messages that `find_refused` returns; None for all of them.
        """

    async def wait(self) -> None:
        """Return when messages may have been recorded since the last `find`; may return without any."""

    async def close(self) -> None:
        """Release the connection; closing twice is fine."""


class PublishAck(msgspec.Struct, frozen=True):
    """Acknowledgement of a stream: the message's position, and whether its `Nats-Msg-Id` was a duplicate."""

    stream: str
    sequence: int
    duplicate: bool


class NotStored(Unavailable):
    """The target answered that it can't store a message now, such as a full stream; other names may work."""


class Publisher(Protocol):
    """Publisher to persistent streams; every adapter passes `tests/conformance/publisher.py`."""

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> PublishAck:
        """Publish one message and return once the stream has stored it.

        Raises:
            InvalidRequest: the stream refuses this message (no stream at the subject, too large).
            NotStored: the stream can't store this message now (it is full, or has no leader).
            Unavailable: it is unknown whether the message was stored; publish it again.
        """

    async def close(self) -> None:
        """Release the connection; closing twice is fine."""


Aggregate = tuple[str, str]
"""Type and id of an aggregate."""


class SlotInUse(Unavailable):
    """Another process reads the replication slot; this one may take over when it ends."""


class CapturedBatch(NamedTuple):
    """Rows in the order of commit.

    Arguments:
        position: end of the last transaction that is complete, to be confirmed once all rows are published or
            held; None if the batch has none.
    """

    rows: Sequence[OutboxRow]
    position: int | None


class SlotState(msgspec.Struct, frozen=True):
    """State of a replication slot.

    Arguments:
        active: whether a process reads it.
        lag_bytes: size of the write-ahead log since the last confirmed position.
        retained_bytes: size of the write-ahead log that the server keeps for the slot.
        safe_bytes: size of the write-ahead log that may still be written before the slot loses rows; None
            if the server keeps it until the disk is full (`max_slot_wal_keep_size = -1`).
    """

    slot: str
    active: bool
    lag_bytes: int
    retained_bytes: int
    safe_bytes: int | None


class CaptureSource(Protocol):
    """Reader of the rows that are inserted into a table; one process at a time reads it.

    After an error the next read begins again after the last confirmed position.

    Raises: Unavailable when the database can't be used, SlotInUse while another process reads,
        InvalidRequest when only a change of settings or of the database helps.
    """

    async def read(self, limit: int, wait_ms: int) -> CapturedBatch:
        """Return up to `limit` rows, at once if there are any; else after `wait_ms` at the latest."""

    async def confirm(self, position: int) -> None:
        """Record that rows up to a position need not be read again."""

    async def check_reader(self) -> None:
        """Raise an error unless this process is the reader of the slot, and reads all rows of the table.

        Raises:
            Unavailable: the slot has another reader or none.
            InvalidRequest, NotFound: the slot, the publication or the table was changed.
        """

    async def end(self) -> int:
        """Return the position of the latest commit."""

    async def state(self) -> SlotState:
        """Return the state of the slot, over a connection of its own."""

    async def close(self) -> None:
        """Let other processes read; closing twice is fine."""


ReadRow = Callable[[bytes], OutboxRow]
"""Reader of the payload of a held row with the current settings.

Raises: InvalidRequest if the settings are of another table, or the row lacks one of their columns.
"""


class HeldEvents(Protocol):
    """Captured events that wait in the outbox table, where the relay publishes them in order.

    Raises: Unavailable when the database can't be used.
    """

    async def find_waiting(self, aggregates: Collection[Aggregate]) -> set[Aggregate]:
        """Return which of the aggregates have unpublished events in the outbox."""

    async def hold(self, events: Sequence[tuple[Decision, bytes]]) -> None:
        """Add events with their JSON payloads to the outbox, all or none; those that it has are skipped."""

    async def close(self) -> None:
        """Release the connection; closing twice is fine."""
