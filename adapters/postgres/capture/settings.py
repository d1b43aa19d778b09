"""Settings of the capture of a table."""

import re

import msgspec

from postroom.domain.arguments import check_type
from postroom.domain.errors import InvalidRequest

_NAME = re.compile(r"[a-z0-9_]{1,63}\Z")
_COLUMNS = ("id", "aggregate_id", "payload")
"""Fields that can't be constants."""
_REQUIRED = (*_COLUMNS, "aggregate_type", "event_type")


class CaptureColumns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the fields of an event are: names of columns, or `=` and a constant.

    Arguments:
        id: identifies the event; what is no UUID becomes one.
        payload: published as the text that PostgreSQL prints; the bytes of a `bytea`.
        occurred_at: a time, without a time zone in UTC; None takes that of the commit.
        headers: a JSON object of texts, published as headers.
    """

    id: str = "id"
    aggregate_type: str = "aggregate_type"
    aggregate_id: str = "aggregate_id"
    event_type: str = "event_type"
    payload: str = "payload"
    event_version: str | None = None
    occurred_at: str | None = None
    correlation_id: str | None = None
    causation_id: str | None = None
    traceparent: str | None = None
    content_type: str | None = None
    headers: str | None = None

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            name = getattr(self, field)
            if (name is not None or field in _REQUIRED) and not check_type(field, name, str):
                raise InvalidRequest(f"The column of {field} must be named.")
            if field in _COLUMNS and name.startswith("="):
                raise InvalidRequest(f"The column of {field} must be the name of a column, not a constant.")

    def names(self) -> dict[str, str]:
        """Return the columns by field, without constants."""
        return {field: name for field, name in self._all().items() if not name.startswith("=")}

    def constants(self) -> dict[str, str]:
        """Return the constants by field."""
        return {field: name[1:] for field, name in self._all().items() if name.startswith("=")}

    def _all(self) -> dict[str, str]:
        return {field: name for field, name in msgspec.structs.asdict(self).items() if name is not None}


class CaptureSettings(msgspec.Struct, frozen=True):
    """A table whose rows are published: `[capture]` of the settings file.

    Arguments:
        table: `name` in the schema `public`, or `schema.name`.
        database: URL for replication, if it differs from that of `[messaging]`.
        slot: name of the replication slot: lower-case letters, digits and `_`.
        publication: name of the publication, of the same characters.

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
