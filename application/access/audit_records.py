"""Audit entries as log records, and back."""

from collections.abc import Sequence

import msgspec

from postroom.application.access.audit import AuditEntry
from postroom.application.ports.event_log import Head
from postroom.domain.errors import BrokenLog
from postroom.domain.names import AUDIT_LOG, mailbox_stream
from postroom.domain.record import GENESIS, Record, link

ACCESS_AUDITED = "AccessAudited.1"
ENTRIES_REMOVED = "AuditEntriesRemoved.1"
EPOCH = 0
"""Epoch of the audit log's records; those of mailbox owners begin at 1."""
_ENTRIES = mailbox_stream(AUDIT_LOG)
REMOVALS = mailbox_stream(f"{AUDIT_LOG}/removals")
"""Stream of the removals by retention."""


class EntriesRemoved(msgspec.Struct, frozen=True):
    """The removal of the oldest records by retention.

    Arguments:
        through: position of the last one.
        link: its chain hash, from which the chain of the remaining records continues.
    """

    through: int
    link: bytes


AuditEvent = AuditEntry | EntriesRemoved
_UNREADABLE = (msgspec.MsgspecError, OverflowError, RecursionError, TypeError, ValueError)
_encode = msgspec.msgpack.Encoder().encode
_decode_entry = msgspec.msgpack.Decoder(AuditEntry).decode
_decode_removal = msgspec.msgpack.Decoder(EntriesRemoved).decode


def to_records(events: Sequence[AuditEvent], head: Head | None, now: int) -> list[Record]:
    """Return events as the records after `head`.

    Arguments:
        head: end of the log; None while it is empty.
        now: µs since 1970 UTC; log time never goes back.
    """
    end, at, chain = (0, 0, GENESIS) if head is None else head[:3]
    at = max(at, now)
    records = []
    for position, event in enumerate(events, end + 1):
        stream, type_ = (
            (_ENTRIES, ACCESS_AUDITED) if isinstance(event, AuditEntry) else (REMOVALS, ENTRIES_REMOVED)
        )
        # The position is the version, which must only be unique within the stream.
        columns = (position, stream, position, EPOCH, type_, at, None, None, None, None, None, _encode(event))
        chain = link(chain, columns, ())
        records.append(Record(*columns, chain))
    return records


def to_entry(record: Record) -> AuditEntry | None:
    """Return the entry of a record, with the record's time; None for a removal by retention.

    Raises: BrokenLog for a record that is not one of the audit log's.
    """
    if record.type == ENTRIES_REMOVED:
        return None
    try:
        if record.type != ACCESS_AUDITED:
            raise ValueError(f"its type is {record.type!r}")
        return msgspec.structs.replace(_decode_entry(record.state), at=record.at)
    except _UNREADABLE as error:
        raise _unreadable(record, error) from error


def to_removal(record: Record) -> EntriesRemoved:
    """Return the removal of a record; raise BrokenLog for one that was altered."""
    try:
        return _decode_removal(record.state)
    except _UNREADABLE as error:
        raise _unreadable(record, error) from error


def _unreadable(record: Record, error: Exception) -> BrokenLog:
    return BrokenLog(
        f"The audit log can't be read at position {record.position}: {error}. Verify it with postroom audit "
        "verify, and restore the store from a backup.",
        record.position,
    )
