"""The tables of the read models, one set a version (`projections/rows.py` says what their columns mean)."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from sqlalchemy import BigInteger, Column, LargeBinary, MetaData, Table, Text
from sqlalchemy.types import TypeEngine

projection = Table(
    "projection",
    MetaData(),
    Column("version", BigInteger, primary_key=True),
    *(Column(name, Text) for name in ("status", "owner", "cuts", "counts", "seconds", "error")),
    *(Column(name, BigInteger) for name in ("started_at", "finished_at")),
)
"""Every version that was ever built, and which one is active."""

_COLUMNS = {
    "mailbox": """
        id:int message_id timestamp:int topic content_type schema_url schema_version encryption correlation_id
        principal namespace trace_id span_id custom_headers mailbox position:int shard:int status attempts:int
        envelope_blob:bytes
    """,
    "backlog": "mailbox topic shard:int ready:int in_flight:int delayed:int dead:int oldest_at:int",
    "dead_letters": """
        id:int mailbox topic shard:int message_id reason attempt:int last_error fingerprint
        first_seen:int last_seen:int redriven:int redriven_at:int
    """,
    "header": "name value timestamp:int id:int",
    "topic": "topic messages:int first_timestamp:int last_timestamp:int",
    "text": "id:int text",
}
_TYPES = {"int": BigInteger, "bytes": LargeBinary, "": Text}


class ReadModelTables:
    """The tables of one version; only the columns that queries read are declared.

    Arguments:
        text: type of the columns that hold text.
    """

    def __init__(self, version: int, text: type[TypeEngine[str]]) -> None:
        self.version = version
        types = {"int": BigInteger, "bytes": LargeBinary, "": text}
        self.mailbox, self.backlog, self.dead_letters, self.header, self.topic, self.text = (
            _table(f"{name}_v{version}", columns, types) for name, columns in _COLUMNS.items()
        )


@lru_cache(maxsize=4)
def tables_of(version: int, text: Any) -> ReadModelTables:
    """Return the tables of a version; the same objects again, so that compiled statements are found again."""
    return ReadModelTables(version, text)


def _table(name: str, columns: str, types: Mapping[str, type[TypeEngine[Any]]]) -> Table:
    pairs = (column.partition(":") for column in columns.split())
    return Table(name, MetaData(), *(Column(column, types[kind]) for column, _, kind in pairs))
