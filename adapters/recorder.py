"""An application recorder of the `eventsourcing` library over any event log (ADR 0002)."""

from collections.abc import Callable, Sequence
from itertools import islice
from operator import attrgetter
from threading import Lock
from typing import Any
from uuid import UUID

import msgspec
from eventsourcing.persistence import (
    Notification,
    OperationalError,
    ProgrammingError,
    StoredEvent,
)

from postroom.application.mailbox.codec import make_commit
from postroom.application.ports.event_log import EventLog, Head
from postroom.application.recorders import PollingRecorder, VersionRange, check_originator, conflict
from postroom.domain import record as domain
from postroom.domain.commit import GENESIS, Commit
from postroom.domain.errors import Unavailable, WrongPosition
from postroom.domain.names import message_stream
from postroom.domain.record import Record

EPOCH = 0
"""Epoch of the commits written here; epochs of mailbox owners begin at 1."""
_encode = msgspec.msgpack.Encoder().encode


class LogRecorder(PollingRecorder):
    """Recorder that stores the aggregates of an `Application` in a dedicated event log.

    A notification id is a log position, and commits are chained as in the log of a mailbox. Over the log of a
    mailbox it is read-only: for example, it returns the events of a message by its id. The topic of each is
    the name of the event, and its state is a MessagePack map of the event's fields.
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
                commit = self._commit(stored_events, head)
                try:
                    self._log.append([commit])
                except WrongPosition:  # another process appended meanwhile
                    continue
                except Unavailable as error:
                    raise OperationalError(str(error)) from error
                return list(range(commit.first, commit.last + 1))

    def _events(self, originator_id: UUID | str, versions: VersionRange) -> list[StoredEvent]:
        records = self._log.read_stream(self._stream(originator_id))
        return [*map(_to_stored_event, versions.select(records, attrgetter("version")))]

    def _notifications(self, after: int, stop: int, topics: Sequence[str], limit: int) -> list[Notification]:
        records = islice(self._log.read(after, None if topics else limit), max(0, stop - after))
        matching = (record for record in records if not topics or record.type in topics)
        return [_notification(record) for record in islice(matching, limit)]

    def max_notification_id(self) -> int | None:
        """Return the position of the last event, or None while the log is empty."""
        head = self._log.head()
        return None if head is None else head.position

    def _refuse_mailbox(self, head: Head | None) -> None:
        if head is not None and head.epoch > EPOCH:
            raise ProgrammingError(
                f"The log of mailbox {self._log.mailbox} can only be written by the mailbox's owner; "
                "use a dedicated log for the application."
            )

    def _refuse_conflicts(self, events: Sequence[StoredEvent]) -> None:
        streams = {check_originator(event.originator_id).bytes for event in events}
        versions = {(entry.stream, entry.version) for entry in self._log.index_of(streams)}
        for event in events:
            version = event.originator_version
            key = (check_originator(event.originator_id).bytes, version)
            if key in versions:
                raise conflict(event.originator_id, f"already has an event of version {version}")
            versions.add(key)

    def _commit(self, events: Sequence[StoredEvent], head: Head | None) -> Commit:
        end, at, chain = (0, 0, GENESIS) if head is None else head[:3]
        at = max(at, self._wall())
        stored = [
            domain.StoredEvent(
                check_originator(event.originator_id).bytes,
                event.originator_version,
                at,
                event.topic,
                event.state,
            )
            for event in events
        ]
        return make_commit(
            stored,
            [0] * len(stored),
            first=end + 1,
            epoch=EPOCH,
            previous=chain,
        )

    def _stream(self, originator_id: UUID | str) -> bytes:
        if isinstance(originator_id, UUID):
            return originator_id.bytes
        return message_stream(self._log.mailbox, originator_id)


def _to_stored_event(record: Record) -> StoredEvent:
    return StoredEvent(UUID(bytes=record.stream), record.version, record.type, _state(record))


def _notification(record: Record) -> Notification:
    return Notification(
        UUID(bytes=record.stream), record.version, record.type, _state(record), record.position
    )


def _state(record: Record) -> bytes:
    return record.event.state if isinstance(record.event, domain.StoredEvent) else _encode(record.event)
