"""Batches of events from the messages of a replication stream."""

import struct

from postroom.adapters.postgres.capture.event_rows import EventRows, Row
from postroom.adapters.postgres.capture.pgoutput import Begin, Commit, Insert, Relation, decode
from postroom.adapters.postgres.capture.settings import CaptureSettings
from postroom.application.ports.outbox import CapturedBatch, OutboxRow
from postroom.domain.errors import Unavailable

DATA_HEADER = struct.Struct(">cqqq")
KEEPALIVE = struct.Struct(">cqqb")


class ChangeReader:
    """Reader of one stream; `batch` returns what was read since the last call.

    Arguments:
        oid: of the table, which it keeps when it is renamed.
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
