"""Settings of the capture of a table."""

import re

import msgspec

from postroom.domain.arguments import check_type
from postroom.domain.errors import InvalidRequest

_NAME = re.compile(r"[a-z0-9_]{1,63}\Z")
_COLUMNS = ("id", "aggregate_id", "payload")
"""Fields that can't be constants."""
Names = str | tuple[str, ...]
_REQUIRED = (*_COLUMNS, "aggregate_type", "event_type")


class CaptureColumns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the fields of an event are: names of columns, or `=` and a constant.

    Several names are the names that a column has had: the write-ahead log has each row under the name at its
    time.

    Arguments:
        id: identifies the event; any other text becomes one.
        aggregate_type, aggregate_id, event_type: parts of the subject, and the key that keeps the order.
        payload: published as the text that PostgreSQL prints; the bytes of a `bytea`.
        event_version: a whole number; None is 1.
        occurred_at: a time, without a time zone in UTC; None takes the commit's.
        correlation_id, causation_id: ids of the request, and of the event's cause.
        traceparent, tracestate, baggage: context of the trace (W3C), published as headers.
        content_type: media type of the payload, published as `Content-Type`.
        headers: a JSON object of texts, published as headers.
    """

    id: Names = "id"
    aggregate_type: Names = "aggregate_type"
    aggregate_id: Names = "aggregate_id"
    event_type: Names = "event_type"
    payload: Names = "payload"
    event_version: Names | None = None
    occurred_at: Names | None = None
    correlation_id: Names | None = None
    causation_id: Names | None = None
    traceparent: Names | None = None
    tracestate: Names | None = None
    baggage: Names | None = None
    content_type: Names | None = None
    headers: Names | None = None

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            names = _as_tuple(value)
            if (value is not None or field in _REQUIRED) and not (
                names and all(check_type(field, name, str) for name in names)
            ):
                raise InvalidRequest(f"The column of {field} must be named.")
            has_constant = any(name.startswith("=") for name in names)
            if has_constant and (field in _COLUMNS or len(names) > 1):
                raise InvalidRequest(f"The column of {field} must be the name of a column, not a constant.")

    def names(self) -> dict[str, tuple[str, ...]]:
        """Return the names of columns by field, without constants."""
        return {field: names for field, names in self._all().items() if not names[0].startswith("=")}

    def constants(self) -> dict[str, str]:
        """Return the constants by field."""
        return {field: names[0][1:] for field, names in self._all().items() if names[0].startswith("=")}

    def _all(self) -> dict[str, tuple[str, ...]]:
        values = msgspec.structs.asdict(self).items()
        return {field: _as_tuple(value) for field, value in values if value is not None}


def _as_tuple(value: Names | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, tuple | list) else (value,)


class CaptureSettings(msgspec.Struct, frozen=True):
    """A table whose rows are published: `[capture]` of the settings file.

    Arguments:
        table: `name` in the schema `public`, or `schema.name`.
        database: URL for replication, if it differs from the URL of `[messaging]`.
        slot: name of the replication slot: lower-case letters, digits and `_`.
        publication: name of the publication, of the same characters.
        columns: where the fields of an event are.

    Raises: InvalidRequest for an invalid name.
    """

    table: str
    database: str | None = None
    slot: str = "postroom_outbox"
    publication: str = "postroom_outbox"
    columns: CaptureColumns = CaptureColumns()

    def __post_init__(self) -> None:
        check_type("columns", self.columns, CaptureColumns)
        if self.database is not None:
            check_type("database", self.database, str)
        check_type("table", self.table, str)
        if not all(self.schema_and_name):
            raise InvalidRequest(f"The table {self.table!r:.80} must be written as name or schema.name.")
        for what, name in (("slot", self.slot), ("publication", self.publication)):
            if not _NAME.match(check_type(what, name, str)):
                raise InvalidRequest(
                    f"The {what} {name!r:.80} must be named by 1 to 63 lower-case letters, digits and "
                    "underscores."
                )

    @property
    def schema_and_name(self) -> tuple[str, str]:
        """Return the schema and the name of the table."""
        schema, dot, name = self.table.partition(".")
        return (schema, name) if dot else ("public", schema)
