"""Views in the PostgreSQL database that holds the log, in the same schema."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import msgspec
import polars as pl
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3
from psycopg import sql

from postroom.adapters.postgres.columns import ESCAPE, INDEXED_CHARS, escape
from postroom.adapters.postgres.database import connect, shown, unavailable
from postroom.adapters.postgres.migrate import check_connection
from postroom.adapters.sql.statements import statements as named_statements
from postroom.domain.errors import NotFound, Unavailable
from postroom.domain.search import BodyRules
from postroom.projections.cut import MailboxCut, encode_cuts
from postroom.projections.search_text import search_tables
from postroom.projections.views.versions import now, owner, statements

TABLES = ("mailbox", "backlog", "dead_letters", "header", "topic", "text")
"""What each version has."""
OF_MESSAGES = ("mailbox", "dead_letters", "header", "text")
"""Those whose rows have the place of a message as `id`."""

_SQL = named_statements("postroom.projections", "sql/postgres/views.sql")
_TYPES = {pa.string(): "text", pa.large_string(): "text", pa.binary(): "bytea"}

Connection = psycopg.Connection[tuple[Any, ...]]


@contextmanager
def open_postgres_views(store: str, bodies: BodyRules) -> Iterator["PostgresViews"]:
    """Open the read models of a PostgreSQL store for a rebuild; see `open_views`."""
    with closing(connect(store, "postroom rebuild")) as connection, unavailable(store):
        check_connection(connection, store, "store")
        connection.execute(_SQL["configure"])
        _lock(connection, store)
        views = PostgresViews(store, connection, bodies)
        views.drop_orphans()
        yield views


class PostgresViews:
    """The read models in one database; see `Views`.

    Arguments:
        store: URL of the database.
        connection: to it, which holds the lock of rebuilds and commits each statement by itself.
        bodies: whose bodies are searched for words.
    """

    def __init__(self, store: str, connection: Connection, bodies: BodyRules) -> None:
        self._bodies = bodies
        self.where = shown(store)
        self.staging = Path(gettempdir(), f"postroom-{blake3(self.where.encode()).hexdigest(8)}-staging-")
        self._db = connection

    def begin(self, cuts: Sequence[MailboxCut]) -> int:
        """Make the empty tables of a new version; see `Views.begin`."""
        facts = {"owner": owner(), "now": now(), "cuts": encode_cuts(cuts)}
        with self._db.transaction():
            version = _number(self._db, "begin", facts)
            assert version is not None
            for script in ("tables.sql", "search_tables.sql"):
                for statement in statements("postgres", script, version=version):
                    self._db.execute(statement.encode())
        return version

    def load(
        self, table: str, version: int, batches: Iterator[pa.Table], loaded: Callable[[int], None]
    ) -> int:
        """Write rows into a table of a version, and what is searched beside messages; see `Views.load`."""
        rows = 0
        for batch in batches:
            with self._db.transaction():
                self._copy(f"{table}_v{version}", batch)
                if table == "mailbox":
                    for name, beside in search_tables(pl.DataFrame(batch), self._bodies).items():
                        self._copy(f"{name}_v{version}", beside)
            rows += batch.num_rows
            loaded(rows)
        return rows

    def index(self, version: int, done: Callable[[int, int], None]) -> None:
        """Build indexes and the topics; see `Views.index`."""
        values = {"version": version, "indexed_chars": INDEXED_CHARS}
        all_ = [
            statement
            for script in ("indexes.sql", "search_indexes.sql")
            for statement in statements("postgres", script, **values)
        ]
        for number, statement in enumerate(all_, 1):
            self._db.execute(statement.encode())
            done(number, len(all_))

    def remove_truncated(self, version: int, before: int, after: int) -> None:
        """Remove what the log lost to retention; see `Views.remove_truncated`."""
        with self._db.transaction():
            for table in OF_MESSAGES:
                self._db.execute(
                    sql.SQL(_SQL["remove"]).format(_table(f"{table}_v{version}")),
                    {"before": before, "after": after},
                )

    def flip(self, version: int, counts: dict[str, int], seconds: dict[str, float]) -> None:
        """Make a version the active one; see `Views.flip`."""
        facts = {
            "version": version,
            "now": now(),
            "counts": msgspec.json.encode(counts).decode(),
            "seconds": msgspec.json.encode(seconds).decode(),
        }
        with self._db.transaction():
            self._db.execute(_SQL["retire"])
            self._db.execute(_SQL["activate"], facts)

    def fail(self, version: int, error: str) -> None:
        """Drop a version that could not be built; see `Views.fail`."""
        with suppress(psycopg.Error):  # of a server that is gone, say: the next rebuild cleans up
            self._drop(version, "failed", error)

    def drop_old(self) -> None:
        """Drop every version but the active one and the one before it; see `Views.drop_old`."""
        for (version,) in self._db.execute(_SQL["retired"]).fetchall()[1:]:
            # A reader that has been at it for two versions is left alone until the next rebuild.
            with suppress(psycopg.errors.LockNotAvailable):
                self._drop(version, "dropped")

    def drop_orphans(self) -> None:
        """Drop what killed rebuilds left: the lock is ours, so whoever was building is dead."""
        for (version,) in self._db.execute(_SQL["building"]).fetchall():
            self._drop(version, "failed", "the rebuild was killed")

    def _drop(self, version: int, status: str, error: str | None = None) -> None:
        with self._db.transaction():
            for table in TABLES:
                self._db.execute(sql.SQL(_SQL["drop"]).format(_table(f"{table}_v{version}")))
            self._db.execute(_SQL["dropped"], {"version": version, "status": status, "error": error})

    def _copy(self, table: str, batch: pa.Table) -> None:
        # Not by ADBC, which took longer: 200 to 230 thousand rows a second where this took 230 to 290.
        columns = sql.SQL(", ").join(map(sql.Identifier, batch.column_names))
        statement = sql.SQL(_SQL["copy"]).format(_table(table), columns)
        with self._db.cursor() as cursor, cursor.copy(statement) as copy:
            copy.set_types([_TYPES.get(column.type, "bigint") for column in batch.schema])
            for row in zip(*map(_storable, batch.columns), strict=True):
                copy.write_row(row)


def roll_back_postgres(store: str) -> int:
    """Make the version before the active one active again; see `roll_back`."""
    with closing(connect(store, "postroom roll back")) as connection:
        check_connection(connection, store, "store")
        with unavailable(store), connection.transaction():
            found = _number(connection, "newest_retired", {})
            if found is None:
                raise NotFound(
                    f"The read models {shown(store)} have no earlier version to go back to; rebuild them "
                    "instead with `postroom project rebuild`."
                )
            connection.execute(_SQL["retire"])
            connection.execute(_SQL["reactivate"], {"version": found})
    return found


def _lock(connection: Connection, store: str) -> None:
    """Take the lock that ends with the connection, and so with the process at the latest."""
    try:
        connection.execute(_SQL["lock"])
    except psycopg.errors.LockNotAvailable as error:
        row = connection.execute(_SQL["builder"]).fetchone()
        other = row[0] if row is not None else "another process"
        raise Unavailable(
            f"The read models {shown(store)} are being rebuilt by {other}; wait until that is done.", 10_000
        ) from error


def _number(connection: Connection, statement: str, facts: dict[str, object]) -> int | None:
    row = connection.execute(_SQL[statement], facts).fetchone()
    return None if row is None or row[0] is None else int(row[0])


def _table(name: str) -> sql.Identifier:
    return sql.Identifier("postroom", name)


def _storable(column: pa.ChunkedArray) -> Iterable[Any]:
    """Return a column's values; in text, what PostgreSQL can't hold is escaped as it is in the log."""
    values: list[Any] = column.to_pylist()
    if column.type not in (pa.string(), pa.large_string()) or not (
        _occurs(column, "\0") or _occurs(column, ESCAPE)
    ):
        return values
    return (None if text is None else escape(text) for text in values)


def _occurs(column: pa.ChunkedArray, character: str) -> bool:
    return bool(pc.any(pc.match_substring(column, character)).as_py())
