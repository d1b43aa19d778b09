"""Decoder of `pgoutput`, protocol version 1: the messages of PostgreSQL's logical replication."""

import struct
from typing import NamedTuple

from postroom.adapters.postgres.capture.event_rows import EventRows, Row
from postroom.adapters.postgres.capture.settings import CaptureSettings
from postroom.application.ports.outbox import CapturedBatch, OutboxRow
from postroom.domain.errors import Unavailable

EPOCH_US = 946_684_800_000_000
"""2000-01-01, from which PostgreSQL counts, in µs since 1970 UTC."""
_BEGIN = struct.Struct(">qqi")
_COMMIT = struct.Struct(">bqqq")
_COLUMN = struct.Struct(">ii")
_SHORT = struct.Struct(">h")
_INT = struct.Struct(">i")
_UINT = struct.Struct(">I")


class Begin(NamedTuple):
    """Start of a transaction, and its commit time, µs since 1970 UTC."""

    committed_at: int


class Commit(NamedTuple):
    """End of a transaction, and the position after it."""

    end: int


class Relation(NamedTuple):
    """Name and columns of a table, sent before its first row and after every change of the table.

    Arguments:
        columns: names and the OIDs of the types; all texts are in the client's encoding.
    """

    oid: int
    schema: bytes
    name: bytes
    columns: tuple[tuple[bytes, int], ...]


class Insert(NamedTuple):
    """An inserted row: the text of its columns, None for NULL."""

    relation: int
    values: tuple[bytes | None, ...]


class Other(NamedTuple):
    """A message about anything but inserts, such as an update; `kind` is its first byte."""

    kind: bytes


Message = Begin | Commit | Relation | Insert | Other


def decode(data: bytes) -> Message:
    """Return a message.

    Raises: ValueError for a message that is incomplete or has a form of another protocol version.
    """
    try:
        match data[:1]:
            case b"B":
                return Begin(_BEGIN.unpack_from(data, 1)[1] + EPOCH_US)
            case b"C":
                return Commit(_COMMIT.unpack_from(data, 1)[2])
            case b"R":
                return _relation(data)
            case b"I":
                return _insert(data)
            case kind if kind in b"UDTYOM" and kind:
                return Other(kind)
    except (struct.error, IndexError) as error:
        raise ValueError(f"incomplete message of pgoutput: {data[:40]!r}") from error
    raise ValueError(f"unknown message of pgoutput: {data[:40]!r}")


def _relation(data: bytes) -> Relation:
    (oid,) = _UINT.unpack_from(data, 1)
    schema, at = _text(data, 5)
    name, at = _text(data, at)
    (count,) = _SHORT.unpack_from(data, at + 1)  # after the replica identity
    at += 3
    columns = []
    for _ in range(count):
        column, at = _text(data, at + 1)  # after the flags
        type_, _ = _COLUMN.unpack_from(data, at)
        columns.append((column, type_ & 0xFFFFFFFF))
        at += _COLUMN.size
    return Relation(oid, schema or b"pg_catalog", name, tuple(columns))


def _insert(data: bytes) -> Insert:
    (oid,) = _UINT.unpack_from(data, 1)
    if data[5:6] != b"N":
        raise ValueError(f"unknown message of pgoutput: {data[:40]!r}")
    (count,) = _SHORT.unpack_from(data, 6)
    at = 8
    values: list[bytes | None] = []
    for _ in range(count):
        kind = data[at]
        at += 1
        if kind == ord("n"):
            values.append(None)
            continue
        if kind != ord("t"):
            raise ValueError(f"unexpected form of a column: {kind!r}")
        (length,) = _INT.unpack_from(data, at)
        at += 4 + length
        if length < 0 or at > len(data):
            raise ValueError(f"incomplete message of pgoutput: {data[:40]!r}")
        values.append(data[at - length : at])
    return Insert(oid, tuple(values))


def _text(data: bytes, at: int) -> tuple[bytes, int]:
    """Return a text that ends with a zero byte, and the offset after it."""
    end = data.find(b"\x00", at)
    if end < 0:
        raise ValueError(f"incomplete message of pgoutput: {data[:40]!r}")
    return data[at:end], end + 1


DATA_HEADER = struct.Struct(">cqqq")
KEEPALIVE = struct.Struct(">cqqb")


class ChangeReader:
    """Reader of one stream; `batch` returns the rows read since the last call.

    Arguments:
        oid: OID of the table, which a renamed table keeps.
        encoding: Python's name of the encoding of the texts.
    """

    def __init__(self, settings: CaptureSettings, oid: int, encoding: str) -> None:
        self._oid = oid
        self._encoding = encoding
        self._events = EventRows(settings.columns, encoding)
        self._table = settings.schema_and_name
        self._relations: dict[int, Relation] = {}
        self._committed_at: int | None = None
        self._position: int | None = None
        self.rows: list[OutboxRow] = []
        self.size = 0
        """Size of the messages of the batch in bytes."""

    def add(self, message: bytes) -> None:
        """Read a message of the stream: data, or a keepalive.

        Raises: Unavailable for a message that can't be decoded.
        """
        try:
            if message[:1] == b"k":
                self._add_keepalive(KEEPALIVE.unpack(message)[1])
            else:
                self._add_data(message[DATA_HEADER.size :])
        except (ValueError, KeyError, struct.error) as error:
            raise Unavailable(
                f"The replication stream of {'.'.join(self._table)} can't be read: {error}."
            ) from error

    def batch(self) -> CapturedBatch:
        """Return the rows, and the end of the last transaction that is complete."""
        batch = CapturedBatch(self.rows, self._position)
        self.rows, self._position, self.size = [], None, 0
        return batch

    def _add_keepalive(self, end: int) -> None:
        """Take the position of a keepalive: all transactions that were committed before it have been read."""
        if self._committed_at is None:
            self._position = end

    def _add_data(self, data: bytes) -> None:
        self.size += len(data)
        match decode(data):
            case Begin(committed_at):
                self._committed_at = committed_at
            case Commit(end):
                self._committed_at, self._position = None, end
            case Relation() as relation:
                self._relations[relation.oid] = relation
            case Insert(oid, values):
                self._add_row(self._relations[oid], values)

    def _add_row(self, relation: Relation, values: tuple[bytes | None, ...]) -> None:
        schema, name = (part.decode(self._encoding) for part in (relation.schema, relation.name))
        if relation.oid != self._oid and (schema, name) != self._table:
            return
        assert self._committed_at is not None, "rows are within transactions"
        columns = [column.decode(self._encoding) for column, _ in relation.columns]
        types = dict(zip(columns, (type_ for _, type_ in relation.columns), strict=True))
        row = Row(".".join(self._table), dict(zip(columns, values, strict=True)), types, self._committed_at)
        self.rows.append(self._events.read(row))
