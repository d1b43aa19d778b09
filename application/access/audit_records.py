"""Audit entries as events of a log, and back."""

from collections.abc import Sequence

import msgspec

from postroom.application.access.audit import AuditEntry
from postroom.application.mailbox.codec import make_commit
from postroom.application.ports.event_log import Head
from postroom.domain.commit import GENESIS, Commit
from postroom.domain.errors import BrokenLog
from postroom.domain.names import AUDIT_LOG, mailbox_stream
from postroom.domain.record import Record, StoredEvent

ACCESS_AUDITED = "AccessAudited.1"
ENTRIES_REMOVED = "AuditEntriesRemoved.1"
EPOCH = 0
"""Epoch of the audit log's commits; those of mailbox owners begin at 1."""
_ENTRIES = mailbox_stream(AUDIT_LOG)
REMOVALS = mailbox_stream(f"{AUDIT_LOG}/removals")
"""Stream of the removals by retention."""


class EntriesRemoved(msgspec.Struct, frozen=True):
    """The removal of the oldest commits by retention.

    Arguments:
        through: position at which the last one ends.
        link: its chain hash, from which the chain of the remaining commits continues.
    """

    through: int
    link: bytes


AuditEvent = AuditEntry | EntriesRemoved
_UNREADABLE = (msgspec.MsgspecError, OverflowError, RecursionError, TypeError, ValueError)
_encode = msgspec.msgpack.Encoder().encode
_decode_entry = msgspec.msgpack.Decoder(AuditEntry).decode
_decode_removal = msgspec.msgpack.Decoder(EntriesRemoved).decode


def to_commit(events: Sequence[AuditEvent], head: Head | None, now: int) -> Commit:
    """Return events as the commit after `head`.

    Arguments:
        events: at least one.
        head: end of the log; None while it is empty.
        now: µs since 1970 UTC; log time never goes back.
    """
    end, at, chain = (0, 0, GENESIS) if head is None else head[:3]
    at = max(at, now)
    # The position is the version, which must only be unique within the stream.
    stored = [_to_event(event, position, at) for position, event in enumerate(events, end + 1)]
    return make_commit(
        stored,
        [0] * len(stored),
        first=end + 1,
        epoch=EPOCH,
        previous=chain,
    )


def _to_event(event: AuditEvent, position: int, at: int) -> StoredEvent:
    stream, type_ = (
        (_ENTRIES, ACCESS_AUDITED) if isinstance(event, AuditEntry) else (REMOVALS, ENTRIES_REMOVED)
    )
    return StoredEvent(stream, position, at, type_, _encode(event))


def to_entry(record: Record) -> AuditEntry | None:
    """Return the entry of a record, with the record's time; None for a removal by retention.

    Raises: BrokenLog for a record that is not one of the audit log's.
    """
    if record.type == ENTRIES_REMOVED:
        return None
    try:
        if record.type != ACCESS_AUDITED:
            raise ValueError(f"its type is {record.type!r}")
        return msgspec.structs.replace(_decode_entry(_state(record)), at=record.at)
    except _UNREADABLE as error:
        raise _unreadable(record, error) from error


def to_removal(record: Record) -> EntriesRemoved:
    """Return the removal of a record; raise BrokenLog for one that was altered."""
    try:
        return _decode_removal(_state(record))
    except _UNREADABLE as error:
        raise _unreadable(record, error) from error


def _state(record: Record) -> bytes:
    if not isinstance(record.event, StoredEvent):
        raise ValueError(f"it is an event of a mailbox, {record.type}")
    return record.event.state


def _unreadable(record: Record, error: Exception) -> BrokenLog:
    return BrokenLog(
        f"The audit log can't be read at position {record.position}: {error}. Verify it with postroom audit "
        "verify, and restore the store from a backup.",
        record.position,
    )
