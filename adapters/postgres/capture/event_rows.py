"""Events from rows of a captured table."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import NamedTuple
from uuid import UUID, uuid5

import msgspec

from postroom.adapters.postgres.capture.settings import CaptureColumns, CaptureSettings
from postroom.application.outbox.formats import check_attributes
from postroom.application.ports.outbox import OutboxRow
from postroom.application.text import from_rfc3339
from postroom.domain.errors import InvalidOutboxEvent, InvalidRequest
from postroom.domain.outbox import OutboxEvent, RecordOutboxEvent, decide, evolve
from postroom.domain.outbox_events import OutboxEventRecorded
from postroom.domain.subject import CorrelationContext

BYTEA = 17
_JSON_TYPES = (114, 3802)
MAX_PAYLOAD_BYTES = 64 << 20
"""Larger payloads are not published: NATS can't be configured to accept them."""
MAX_ROW_BYTES = 16 << 20
"""Size up to which the columns of an unreadable row are kept."""
FUTURE_US = 60_000_000
"""How far after its commit an event may have occurred, as in `outbox_events`."""
UNREADABLE = "unreadable"
"""Type of an aggregate or event, and id of an aggregate, that can't be read."""
_IDS = UUID("6f0c4d3a-5c1e-4f6e-9a53-6f2f1d0f8c11")
"""Namespace of the UUIDs that stand for other ids; it never changes."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Row(NamedTuple):
    """An inserted row.

    Arguments:
        table: `schema.name`.
        values: texts of the columns by name, None for NULL.
        types: OIDs of the types of the columns.
        committed_at: µs since 1970 UTC.
    """

    table: str
    values: Mapping[str, bytes | None]
    types: Mapping[str, int]
    committed_at: int


class HeldRow(msgspec.Struct, frozen=True):
    """A row that can't be read, as JSON in the outbox table, with all that another mapping needs.

    Arguments:
        table, types, committed_at: see `Row`.
        encoding: Python's name of the encoding of the texts.
        columns: texts of the columns by name, None for NULL.
        exact: bytes of the columns that are not text in the encoding.
        omitted: names of the columns that are not held, as the row is too large.
    """

    table: str
    committed_at: int
    encoding: str
    columns: dict[str, str | None]
    types: dict[str, int]
    exact: dict[str, bytes] = {}
    omitted: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.columns.keys() != self.types.keys():
            raise ValueError("its columns and types have different names")

    @classmethod
    def of(cls, row: Row, encoding: str) -> "HeldRow":
        """Return the form in which a row is held."""
        columns: dict[str, str | None] = {}
        exact: dict[str, bytes] = {}
        omitted: list[str] = []
        size = 0
        for name, value in row.values.items():
            size += len(value or b"")
            if value is None or size > MAX_ROW_BYTES:
                columns[name] = None
                omitted += () if value is None else (name,)
                continue
            try:
                columns[name] = value.decode(encoding)
            except UnicodeDecodeError:
                columns[name], exact[name] = value.decode(encoding, "backslashreplace"), value
        return cls(row.table, row.committed_at, encoding, columns, dict(row.types), exact, tuple(omitted))

    def row(self) -> Row:
        """Return the row that is held."""
        values = {
            name: None if text is None else self.exact.get(name, text.encode(self.encoding))
            for name, text in self.columns.items()
        }
        return Row(self.table, values, self.types, self.committed_at)


def read_held_row(settings: CaptureSettings, payload: bytes) -> OutboxRow:
    """Return the event of a row that is held, by the current settings; see `ReadRow`."""
    try:
        held = msgspec.json.decode(payload, type=HeldRow)
        row = held.row()
    except (msgspec.MsgspecError, ValueError, LookupError) as error:
        raise InvalidRequest(f"Its payload is not a row of a captured table: {error}.") from None
    table = ".".join(settings.schema_and_name)
    if held.table != table:
        raise InvalidRequest(
            f"It is a row of the table {held.table}, and [capture] has the table {table}; use the settings "
            "of its capture."
        )
    columns = settings.columns
    for names in columns.names().values():
        name = next((name for name in names if name in held.columns), None)
        if name in held.omitted:
            raise InvalidRequest(
                f"Its column {name} was not held, as the row has more than {MAX_ROW_BYTES:,} bytes; insert "
                "the row into the captured table again, and discard this event."
            )
    return EventRows(columns, held.encoding).read(row)


class EventRows:
    """Reader of events from rows.

    Arguments:
        encoding: Python's name of the encoding of the texts.
    """

    def __init__(self, columns: CaptureColumns, encoding: str) -> None:
        self._names = columns.names()
        self._constants = columns.constants()
        self._encoding = encoding

    def read(self, row: Row) -> OutboxRow:
        """Return the event of a row, or an unreadable event with what could be read and the row as JSON.

        Raises: InvalidRequest if the row lacks a column of the settings.
        """
        try:
            return self._read(row)
        except (InvalidOutboxEvent, _InvalidColumn) as error:
            return self._unreadable(row, str(error))

    def _read(self, row: Row) -> OutboxRow:
        id_ = self._id(row)
        payload = self._payload(row)
        version = self._text(row, "event_version")
        command = RecordOutboxEvent(
            id_,
            self._required(row, "aggregate_type"),
            self._required(row, "aggregate_id"),
            self._required(row, "event_type"),
            1 if version is None else _integer(version),
            self._occurred_at(row),
            CorrelationContext(self._text(row, "correlation_id"), self._text(row, "causation_id")),
            self._text(row, "traceparent"),
            self._headers(row, id_),
            row.types[self._name(row, "payload")] not in _JSON_TYPES,
            tracestate=self._text(row, "tracestate"),
            baggage=self._text(row, "baggage"),
        )
        # `now` is not checked here: the row is committed, and its time was compared with the commit's.
        (recorded,) = decide(command, None, max(row.committed_at, command.occurred_at))
        return OutboxRow(evolve(None, recorded), payload, has_history=False)

    def _unreadable(self, row: Row, reason: str) -> OutboxRow:
        held = HeldRow.of(row, self._encoding)
        payload = msgspec.json.encode(held)
        try:
            id_ = self._id(row)
        except _InvalidColumn:
            texts = msgspec.json.encode(held.columns).decode()
            id_ = uuid5(_IDS, f"{row.table}/{row.committed_at}/{texts}")
        recorded = OutboxEventRecorded(
            id_.bytes,
            1,
            row.committed_at,
            self._readable(row, "aggregate_type"),
            self._readable(row, "aggregate_id"),
            self._readable(row, "event_type"),
            1,
            None,
            None,
            None,
            None,
        )
        event: OutboxEvent = evolve(None, recorded)
        return OutboxRow(event, payload, has_history=False, unreadable=reason)

    def _value(self, row: Row, field: str) -> bytes | None:
        return row.values[self._name(row, field)] if field in self._names else None

    def _name(self, row: Row, field: str) -> str:
        """Return the name of a field's column: the first of its names that the row has.

        Raises: InvalidRequest if the row has none of them, because then the settings are wrong, not the row.
        """
        names = self._names[field]
        name = next((name for name in names if name in row.values), None)
        if name is None:
            raise InvalidRequest(
                f"Rows of the table {row.table} have no column {' or '.join(names)} for {field}: it was "
                f"renamed. Set {field} under [capture.columns] to a list of all its names; no row is lost."
            )
        return name

    def _shown(self, field: str) -> str:
        return " or ".join(self._names.get(field, (field,)))

    def _text(self, row: Row, field: str) -> str | None:
        if field in self._constants:
            return self._constants[field]
        value = self._value(row, field)
        try:
            return None if value is None else value.decode(self._encoding)
        except UnicodeDecodeError:
            raise _InvalidColumn(f"its {self._shown(field)} is not text in {self._encoding}") from None

    def _required(self, row: Row, field: str) -> str:
        text = self._text(row, field)
        if text is None:
            raise _InvalidColumn(f"its {self._shown(field)} is NULL")
        return text

    def _readable(self, row: Row, field: str) -> str:
        try:
            text = self._required(row, field)
        except _InvalidColumn:
            return UNREADABLE
        return text[:512].replace("\x00", "") or UNREADABLE

    def _id(self, row: Row) -> UUID:
        text = self._required(row, "id")
        try:
            return UUID(text)
        except ValueError:
            return uuid5(_IDS, f"{row.table}/{text}")

    def _payload(self, row: Row) -> bytes:
        value = self._value(row, "payload")
        name = self._name(row, "payload")
        if value is None:
            raise _InvalidColumn(f"its {name} is NULL")
        if row.types[name] == BYTEA:
            payload = bytes.fromhex(value[2:].decode())  # \x and hexadecimal digits
        elif self._encoding == "utf-8":
            payload = value
        else:
            payload = self._required(row, "payload").encode()
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise _InvalidColumn(f"its {name} has {len(payload):,} bytes, more than {MAX_PAYLOAD_BYTES:,}")
        return payload

    def _occurred_at(self, row: Row) -> int:
        text = self._text(row, "occurred_at")
        if text is None:
            return row.committed_at
        name = self._shown("occurred_at")
        try:
            micros = (from_rfc3339(text) - _EPOCH) // timedelta(microseconds=1)
        except (ValueError, OverflowError):
            raise _InvalidColumn(f"its {name} is not a time of the years 1 to 9999: {text[:80]}") from None
        if micros > row.committed_at + FUTURE_US:
            raise _InvalidColumn(f"its {name} is more than a minute after its commit: {text[:80]}")
        return micros

    def _headers(self, row: Row, id_: UUID) -> dict[str, str]:
        text = self._text(row, "headers")
        try:
            headers = {} if text is None else msgspec.json.decode(text, type=dict[str, str])
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            raise _InvalidColumn(f"its {self._shown('headers')} is not a JSON object of texts") from None
        return check_attributes(id_, headers, self._text(row, "content_type"))


class _InvalidColumn(Exception):
    """A column has no value that an event can have."""


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise _InvalidColumn(f"its version is not an integer: {text[:80]}") from None
