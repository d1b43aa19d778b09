"""Port: events that are captured from the write-ahead log of a database, and those that are held."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

import msgspec

from postroom.application.ports.outbox_repository import Decision, OutboxRow
from postroom.domain.errors import Unavailable

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
"""Reader of the payload of a held row with the settings of now.

Raises: InvalidRequest if the settings are of another table, or the row lacks one of their columns.
"""


class HeldEvents(Protocol):
    """Captured events that wait in the outbox table, where the relay publishes them in order.

    Raises: Unavailable when the database can't be used.
    """

    async def find_waiting(self, aggregates: Collection[Aggregate]) -> set[Aggregate]:
        """Return those of the aggregates that have unpublished events in the outbox."""

    async def hold(self, events: Sequence[tuple[Decision, bytes]]) -> None:
        """Add events with their JSON payloads to the outbox, all or none; those that it has are skipped."""

    async def close(self) -> None:
        """Release the connection; closing twice is fine."""
