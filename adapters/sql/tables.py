"""The tables of the read models, one set for each version; `projections/models` defines the columns."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    FromClause,
    LargeBinary,
    MetaData,
    Row,
    Table,
    Text,
    func,
    inspect,
    literal,
    literal_column,
    select,
)
from sqlalchemy.types import TypeEngine

from postroom.adapters.sql.statements import statements
from postroom.application.ports.read_models import ParkedRecord
from postroom.domain.commit import POSITIONS_PER_MAILBOX
from postroom.domain.message import Headers
from postroom.domain.search import BodyRules
from postroom.projections.fold import MESSAGES
from postroom.projections.incremental import START, Cursor, Head, Version

projection = Table(
    "projection",
    MetaData(),
    Column("version", BigInteger, primary_key=True),
    *(Column(name, Text) for name in ("status", "owner", "cuts", "counts", "seconds", "error", "models")),
    *(Column(name, BigInteger) for name in ("started_at", "finished_at")),
    Column("plan", Text),
)
"""All versions, with their status."""

projection_cursor = Table(
    "projection_cursor",
    MetaData(),
    Column("version", BigInteger, primary_key=True),
    Column("mailbox_id", BigInteger, primary_key=True),
    Column("mailbox", Text),
    Column("position", BigInteger),
    Column("at", BigInteger),
    Column("chain", Text),
)
"""The log positions that a version includes."""

projection_parked = Table(
    "projection_parked",
    MetaData(),
    *(Column(name, BigInteger) for name in ("version", "place", "position", "parked_at")),
    *(Column(name, Text) for name in ("mailbox", "type", "error")),
)
"""Records that could not be folded."""

context_backlog = Table(
    "context_backlog",
    MetaData(),
    *(Column(name, Text) for name in ("context", "box")),
    *(Column(name, BigInteger) for name in ("count", "parked", "oldest_at", "as_of")),
)
"""The backlog of each context's outbox and inbox at its last count; independent of versions."""

_HEADERS = (f"{name}:int" if name == "timestamp" else name for name in Headers.__struct_fields__)
_COLUMNS = {
    "mailbox": f"""
        id:int topic {" ".join(_HEADERS)} mailbox position:int shard:int status attempts:int
    """,
    "backlog": "mailbox topic shard:int ready:int in_flight:int delayed:int dead:int oldest_at:int",
    "dead_letters": """
        id:int mailbox topic shard:int message_id original_subject reason attempt:int last_error fingerprint
        first_seen:int last_seen:int redriven:int redriven_at:int lineage
    """,
    "activity": "mailbox period starts_at:int topic event events:int first_at:int last_at:int",
    "header": "name value timestamp:int id:int",
    "topic": "topic messages:int first_timestamp:int last_timestamp:int",
    "text": "id:int text words",
}


MESSAGE_COLUMNS = tuple(column.partition(":")[0] for column in _COLUMNS["mailbox"].split())
"""The columns of messages, in the order in which they are read."""

_SQL_COLUMNS = "stream:bytes text"
"""Further columns of messages in SQL databases, whose message id is NULL if it is the stream id."""
_OF_MESSAGES = ("header", "topic", "text", "text_index", "word_index")
"""Additional tables of the model `mailbox`."""

_decode_models = msgspec.json.Decoder(dict[str, int]).decode


MakeTable = Callable[[str, Sequence[Column[Any]]], FromClause]
"""Return the source of rows for a table's name and columns."""


def _table(name: str, columns: Sequence[Column[Any]]) -> FromClause:
    return Table(name, MetaData(), *columns)


class ReadModelTables:
    """The tables of one version, with the columns that queries read.

    Arguments:
        models: JSON object of its models, each with the version whose table it uses.
        text: type of columns of text.
        stream_text: expression of the UUID in a column `stream`, with `{}` for the prefix of the column, in
            databases where a message id equal to this UUID is stored as NULL; None where message ids are
            never NULL.
        make: returns the source of rows of a table, the table itself by default.
    """

    def __init__(
        self,
        version: int,
        models: str,
        text: type[TypeEngine[str]],
        stream_text: str | None,
        make: MakeTable = _table,
    ) -> None:
        self.version = version
        self.text_type = text
        self.models = _decode_models(models)
        types: dict[str, type[TypeEngine[Any]]] = {"int": BigInteger, "bytes": LargeBinary, "": text}
        columns = _COLUMNS | ({MESSAGES: f"{_COLUMNS[MESSAGES]} {_SQL_COLUMNS}"} if stream_text else {})
        tables = {name: make(self.name(name), _columns(each, types)) for name, each in columns.items()}
        self.mailbox, self.backlog, self.dead_letters = (
            tables[name] for name in ("mailbox", "backlog", "dead_letters")
        )
        self.message_id: ColumnElement[str] = self.mailbox.c.message_id
        if stream_text is not None:
            stream = literal_column(stream_text.format(f"{self.name(MESSAGES)}."), text)
            self.message_id = func.coalesce(self.message_id, stream)
        # The stream id last, if message ids may be NULL: a client formats it faster than most databases.
        read = MESSAGE_COLUMNS if stream_text is None else (*MESSAGE_COLUMNS, "stream")
        self.rows = select(*(self.mailbox.c[name] for name in read))
        self.activity = tables["activity"]
        self.header, self.topic, self.text = (tables[name] for name in ("header", "topic", "text"))

    def name(self, table: str) -> str:
        """Return the name of a table; a model may be shared with an earlier version."""
        model = "mailbox" if table in _OF_MESSAGES else table
        return f"{table}_v{self.models.get(model, self.version)}"


@lru_cache(maxsize=4)
def tables_of(version: int, models: str, text: Any, stream_text: str | None) -> ReadModelTables:
    """Return the tables of a version, cached so that SQLAlchemy reuses compiled statements."""
    return ReadModelTables(version, models, text, stream_text)


def _columns(text: str, types: Mapping[str, type[TypeEngine[Any]]]) -> list[Column[Any]]:
    pairs = (column.partition(":") for column in text.split())
    return [Column(column, types[kind]) for column, _, kind in pairs]


class Settings(msgspec.Struct, frozen=True):
    """The fields of a version's `Plan` that updates and queries need."""

    bodies: str = "{}"
    archive: str | None = None

    @property
    def body_rules(self) -> BodyRules:
        """Return the topics whose bodies are searched for words."""
        return msgspec.json.decode(self.bodies, type=BodyRules)


def settings_of(plan: str | None) -> Settings:
    """Return the settings of a version from its plan as JSON."""
    return msgspec.json.decode(plan, type=Settings) if plan else Settings()


def to_version(row: tuple[Any, ...]) -> Version:
    """Return a version from a row of the catalog: its number, its status, and its tables and plan as JSON."""
    number, status, models, plan = row
    tables = {} if models is None else _decode_models(models)  # an earlier release has other tables
    settings = settings_of(plan)
    return Version(number, status, tables, settings.body_rules, settings.archive)


def to_cursors(rows: Iterable[tuple[Any, ...]]) -> dict[int, Cursor]:
    """Return the cursors of a version, by mailbox id, from rows of the catalog."""
    return {id_: Cursor(position, at, _chain(text, position), name) for id_, position, at, text, name in rows}


def read_cursors(db: Connection, version: Row[Any]) -> dict[int, Cursor]:
    """Return the cursors of a version by mailbox id; cursors of an earlier release have only extents."""
    if version.models is None:
        extents = msgspec.json.decode(version.cuts)
        return {each["id"]: Cursor(each["last"], each["at"], "", each["name"]) for each in extents}
    cursor = projection_cursor.c
    # A file of an earlier release that was not followed since lacks the column.
    has_chain = db.dialect.name != "sqlite" or any(
        each["name"] == "chain" for each in inspect(db).get_columns(projection_cursor.name)
    )
    chain = cursor.chain if has_chain else literal(None).label("chain")
    columns = (cursor.mailbox_id, cursor.position, cursor.at, chain, cursor.mailbox)
    return to_cursors(map(tuple, db.execute(select(*columns).where(cursor.version == version.version))))


def read_parked(db: Connection, version: int, shown: int) -> tuple[int, tuple[ParkedRecord, ...]]:
    """Return the number of records that a version could not fold, and the first of them."""
    parked = projection_parked.c
    total = db.scalar(select(func.count()).select_from(projection_parked).where(parked.version == version))
    columns = (parked.mailbox, parked.position, parked.type, parked.error, parked.parked_at)
    rows = db.execute(
        select(*columns).where(parked.version == version).order_by(parked.place).limit(shown)
    ).all()
    return int(total or 0), tuple(
        ParkedRecord(row.mailbox, row.position, row.type, row.error, row.parked_at) for row in rows
    )


def chain_text(position: int, chain: str) -> str | None:
    """Return the chain hash of a cursor as the catalog stores it; None if it is unknown."""
    return f"{position}:{chain}" if chain else None


def _chain(text: str | None, position: int) -> str:
    """Return a chain hash from the catalog; empty if an earlier release has moved the cursor since."""
    stored_position, _, chain = (text or "").partition(":")
    return chain if stored_position == str(position) else ""


HEADS_PER_READ = 400
"""Number of mailboxes whose ends one statement reads; SQLite limits the terms of a UNION to 500."""
_SQL = statements("postroom.adapters.sql", "update.sql")


def read_heads(
    read: Callable[[str], list[tuple[Any, ...]]], tables: Mapping[str, str], cursors: Mapping[int, Cursor]
) -> list[Head]:
    """Return the heads of the mailbox logs in the order of ids; empty logs end at 0.

    Arguments:
        read: returns the rows of a statement on the log.
        tables: names of the tables `log` and `mailbox_names`.
        cursors: cursors by mailbox id, at whose positions the commits are looked up.
    """
    mailboxes = dict(read(_SQL["mailboxes"].format(**tables)))
    queries = []
    for id_ in mailboxes:
        base, position = id_ * POSITIONS_PER_MAILBOX, cursors.get(id_, START).position
        values = {"base": base, "end": base + POSITIONS_PER_MAILBOX, "place": base + position}
        queries.append(_SQL["head"].format(**tables, id=id_, position=position, **values).rstrip(";"))
    parts = (queries[start : start + HEADS_PER_READ] for start in range(0, len(queries), HEADS_PER_READ))
    return [
        Head(id_, mailboxes[id_], removed + 1, last or removed, (chain or b"").hex(), at or 0)
        for part in parts
        for id_, removed, last, chain, at in read(" UNION ALL ".join(part))
    ]
