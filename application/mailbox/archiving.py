"""Archiving: stores records in consecutive segments before retention removes them."""

import asyncio
from typing import NamedTuple

from postroom.application.mailbox.archived_log import continues
from postroom.application.ports.event_log import EventLogReader
from postroom.application.ports.log_archive import LogArchive
from postroom.application.telemetry import logger
from postroom.domain.errors import Unavailable
from postroom.domain.record import GENESIS, Record, verify_chain

SEGMENT_RECORDS = 50_000
SEGMENT_BYTES = 64 << 20
"""Maximum size of a segment, in bytes of envelopes; bounds memory usage."""


class _End(NamedTuple):
    """End of the archive; `chain` is None if the record was removed without being archived."""

    position: int
    chain: bytes | None


async def archive_records(log: EventLogReader, archive: LogArchive, through: int) -> int:
    """Store the records up to a position that the archive lacks, off the event loop; return their number.

    The next run continues an interrupted one.

    Raises: BrokenLog when the log was altered; Unavailable when the archive can't be used or belongs to
        another log.
    """
    end = await asyncio.to_thread(_end, log, archive, through)
    began = end.position
    while end.position < through:
        end = await asyncio.to_thread(_store_next, log, archive, end, through)
    return max(0, end.position - began)


def _end(log: EventLogReader, archive: LogArchive, through: int) -> _End:
    """Return the end of the archive, after checking that it belongs to this log."""
    first = log.first_position() or 1
    last = archive.last_segment(log.mailbox)
    if last is None:
        return _End(first - 1, GENESIS if first == 1 else None)
    if last.last < first - 1:
        if first <= through:
            logger().warning("archive.gap", mailbox=log.mailbox, after=last.last, before=first)
        return _End(first - 1, None)
    if not _continues(log, last.last, last.chain, first):
        raise Unavailable(
            f"The archive of mailbox {log.mailbox} ends at position {last.last} with another history than "
            "the log holds; name another archive folder for this store."
        )
    return _End(last.last, last.chain)


def _continues(log: EventLogReader, position: int, chain: bytes, first: int) -> bool:
    """Return whether the log holds the record with this chain hash, or the one that follows it."""
    at = max(position, first)
    record = log.at_positions([at]).get(at)
    return record is not None and continues(position, chain, record)


def _store_next(log: EventLogReader, archive: LogArchive, end: _End, through: int) -> _End:
    records = _next_records(log, end.position, through)
    if not records:
        raise Unavailable(
            f"The log of mailbox {log.mailbox} ends before position {through}, which should be archived; "
            "open the mailbox again."
        )
    # Records whose chain does not verify are neither archived nor removed.
    if end.chain is None:
        verify_chain(records[1:], records[0].chain, records[0].position + 1)
    else:
        verify_chain(records, end.chain, end.position + 1)
    segment = archive.store(log.mailbox, records, end.chain)
    return _End(segment.last, segment.chain)


def _next_records(log: EventLogReader, after: int, through: int) -> list[Record]:
    records: list[Record] = []
    size = 0
    for record in log.read(after, min(SEGMENT_RECORDS, through - after)):
        records.append(record)
        size += len(record.envelope or b"")
        if size >= SEGMENT_BYTES:
            break
    return records
