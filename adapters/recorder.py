"""An application recorder of the `eventsourcing` library over any event log (ADR 0002)."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from threading import Lock
from typing import Any
from uuid import UUID

from eventsourcing.persistence import (
    ApplicationRecorder,
    IntegrityError,
    Notification,
    OperationalError,
    ProgrammingError,
    StoredEvent,
)

from postroom.application.originators import check_originator
from postroom.application.polling_subscription import PollingSubscription
from postroom.application.ports.event_log import EventLog, Head
from postroom.domain.errors import Unavailable, WrongPosition
from postroom.domain.names import message_stream
from postroom.domain.record import GENESIS, Record, link

EPOCH = 0
"""Epoch of the records written here; epochs of mailbox owners begin at 1."""


class LogRecorder(ApplicationRecorder):
    """Recorder that stores the aggregates of an `Application` in a dedicated event log.

    A notification id is a log position, and records are chained as in the log of a mailbox. Over the log of
    a mailbox it is read-only: for example, it returns the events of a message by its id.
    """

    def __init__(self, log: EventLog, wall: Callable[[], int]) -> None:
        """Take the log and the wall clock in µs since 1970 UTC."""
        self._log = log
        self._wall = wall
        self._lock = Lock()

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int]:
        """Append events, all or none, and return their notification ids.

        Raises:
            IntegrityError: an aggregate already has an event of the same version.
            ProgrammingError: the log belongs to a mailbox, or an originator id is not a UUID.
            OperationalError: the store failed.
        """
        if not stored_events:
            return []
        with self._lock:
            while True:
                head = self._log.head()
                self._refuse_mailbox(head)
                self._refuse_conflicts(stored_events)
                records = self._records(stored_events, head)
                try:
                    self._log.append(records)
                except WrongPosition:  # another process appended meanwhile
                    continue
                except Unavailable as error:
                    raise OperationalError(str(error)) from error
                return [record.position for record in records]

    def select_events(
        self,
        originator_id: UUID | str,
        *,
        gt: int | None = None,
        lte: int | None = None,
        desc: bool = False,
        limit: int | None = None,
    ) -> list[StoredEvent]:
        """Return events of one aggregate in the order of their versions.

        Arguments:
            originator_id: a UUID, or the id that the sender chose for a message.
            gt, lte: bounds of the versions.
        """
        records = self._log.read_stream(self._stream(originator_id))
        events = [r for r in records if (gt is None or r.version > gt) and (lte is None or r.version <= lte)]
        return [_stored(record) for record in (events[::-1] if desc else events)[:limit]]

    def select_notifications(
        self,
        start: int | None,
        limit: int,
        stop: int | None = None,
        topics: Sequence[str] = (),
        *,
        inclusive_of_start: bool = True,
    ) -> list[Notification]:
        """Return up to `limit` events from position `start` to `stop`, of every type or those in `topics`."""
        after = 0 if start is None else start - 1 if inclusive_of_start else start
        records: Iterator[Record] = self._log.read(after, None if topics else limit)
        if stop is not None:
            records = islice(records, max(0, stop - after))
        matching = (record for record in records if not topics or record.type in topics)
        return [_notification(record) for record in islice(matching, limit)]

    def max_notification_id(self) -> int | None:
        """Return the position of the last record, or None while the log is empty."""
        head = self._log.head()
        return None if head is None else head.position

    def subscribe(self, gt: int | None = None, topics: Sequence[str] = ()) -> PollingSubscription:
        """Return an iterator over the events after position `gt`, including those appended later."""
        return PollingSubscription(self, gt, topics)

    def _refuse_mailbox(self, head: Head | None) -> None:
        if head is not None and head.epoch > EPOCH:
            raise ProgrammingError(
                f"The log of mailbox {self._log.mailbox} can only be written by the mailbox's owner; "
                "use a dedicated log for the application."
            )

    def _refuse_conflicts(self, events: Sequence[StoredEvent]) -> None:
        versions: set[tuple[bytes, int]] = set()
        for stream in {check_originator(event.originator_id).bytes for event in events}:
            versions.update((stream, record.version) for record in self._log.read_stream(stream))
        for event in events:
            version = event.originator_version
            key = (check_originator(event.originator_id).bytes, version)
            if key in versions:
                raise IntegrityError(
                    f"Aggregate {event.originator_id} already has an event of version {version}; "
                    "load it again and repeat the command."
                )
            versions.add(key)

    def _records(self, events: Sequence[StoredEvent], head: Head | None) -> list[Record]:
        position, at, chain = (0, 0, GENESIS) if head is None else head[:3]
        at = max(at, self._wall())
        records: list[Record] = []
        for event in events:
            position += 1
            message_columns = (None, None, None, None, None)
            stream, version = check_originator(event.originator_id).bytes, event.originator_version
            columns = (position, stream, version, EPOCH, event.topic, at, *message_columns, event.state)
            chain = link(chain, columns, ())
            records.append(Record(*columns, chain))
        return records

    def _stream(self, originator_id: UUID | str) -> bytes:
        if isinstance(originator_id, UUID):
            return originator_id.bytes
        return message_stream(self._log.mailbox, originator_id)


def _stored(record: Record) -> StoredEvent:
    return StoredEvent(UUID(bytes=record.stream), record.version, record.type, record.state)


def _notification(record: Record) -> Notification:
    return Notification(UUID(bytes=record.stream), record.version, record.type, record.state, record.position)
