"""Log records: events as rows of the event log, linked by a hash chain."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
from blake3 import blake3

from postroom.domain.errors import BrokenLog

GENESIS = bytes(32)
"""Chain hash before the first record of a log."""
POSITIONS_PER_MAILBOX = 1 << 40
"""Stores use `mailbox id * POSITIONS_PER_MAILBOX + position` as the key of a record."""


class Record(NamedTuple):
    """Row of the event log; the fields are its columns, in order.

    Arguments:
        position: number in the mailbox's log: 1, 2, 3, ... without gaps.
        stream, version: the aggregate's id (16 bytes) and the event's number in its history.
        epoch: fencing number of the owner that wrote it.
        type: stable name and schema version of the event, such as `MessageSent.1`.
        at: log time in µs, UTC.
        topic to reason: fields that projections need, stored as columns.
        state: the event's remaining fields, encoded.
        chain: 32-byte BLAKE3 of the previous record's chain hash and all other columns of this one.
        timestamp to custom_headers: RFC-037's headers, for `MessageSent` only.
        envelope: the `PrismEnvelope` bytes, for `MessageSent` only.
    """

    position: int
    stream: bytes
    version: int
    epoch: int
    type: str
    at: int
    topic: str | None
    shard: int | None
    attempt: int | None
    due: int | None
    reason: str | None
    state: bytes
    chain: bytes
    timestamp: int | None = None
    message_id: str | None = None
    content_type: str | None = None
    schema_url: str | None = None
    schema_version: str | None = None
    encryption: str | None = None
    correlation_id: str | None = None
    principal: str | None = None
    namespace: str | None = None
    trace_id: str | None = None
    span_id: str | None = None
    custom_headers: str | None = None
    envelope: bytes | None = None


CHAIN = Record._fields.index("chain")
HEADERS = CHAIN + 1
"""Index of the first header column; None from there on unless the event is a `MessageSent`."""

NO_HEADERS = (None,) * (len(Record._fields) - HEADERS)
_encode = msgspec.msgpack.Encoder().encode


def link(previous: bytes, before_chain: Sequence[object], after_chain: Sequence[object]) -> bytes:
    """Return the chain hash of a record, which makes changes to the log evident.

    Arguments:
        previous: chain hash of the previous record, or `GENESIS`.
        before_chain, after_chain: the record's columns before and after `chain`; empty if all are None.
    """
    return link_encoded(previous, encode_columns(before_chain, after_chain))


def encode_columns(before_chain: Sequence[object], after_chain: Sequence[object]) -> bytes:
    """Return the columns of a record as `link` hashes them: a MessagePack array of two arrays."""
    return _encode((before_chain, after_chain))


def link_encoded(previous: bytes, columns: bytes) -> bytes:
    """Return the chain hash of a record from its encoded columns; see `link`."""
    return blake3(previous + columns).digest()


def chained(records: Iterable[Record], previous: bytes, expected: int) -> Iterator[Record]:
    """Yield records after verifying that positions have no gaps and that every chain hash matches.

    Arguments:
        previous: chain hash of the record before the first.
        expected: position of the first record.

    Raises: BrokenLog naming the first position that fails verification.
    """
    for record in records:
        if record.position != expected:
            raise BrokenLog(
                f"The log jumps from position {expected - 1} to {record.position}: records were removed or "
                "moved. Restore the store from a backup.",
                expected,
            )
        if link(previous, record[:CHAIN], _headers(record)) != record.chain:
            raise BrokenLog(
                f"The log record at position {record.position} does not match its hash: it or the one "
                "before was altered. Restore the store from a backup.",
                record.position,
            )
        yield record
        previous = record.chain
        expected += 1


def verify_chain(records: Iterable[Record], previous: bytes, expected: int) -> tuple[int, bytes]:
    """Check records as `chained` does, and return the last position and its chain hash."""
    last, chain = expected - 1, previous
    for record in chained(records, previous, expected):
        last, chain = record.position, record.chain
    return last, chain


def _headers(record: Record) -> tuple[object, ...]:
    headers = record[HEADERS:]
    return headers if headers != NO_HEADERS else ()
