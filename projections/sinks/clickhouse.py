"""Read models in ClickHouse: on a server, or embedded in this process by chdb (RFC-037's ClickHouse phase).

Both are spoken to by clickhouse-connect. Each model of a version is a MergeTree table, and a view is what
readers see: it is replaced in one step when a version becomes the active one.
"""

import sqlite3
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from urllib.parse import urlsplit

import clickhouse_connect
import polars as pl
import pyarrow as pa
from blake3 import blake3
from clickhouse_connect.driver.exceptions import ClickHouseError

from postroom.adapters.sql.statements import statements
from postroom.domain.errors import InvalidRequest, Unavailable
from postroom.projections.ddl import is_required, script
from postroom.projections.fold import MESSAGES
from postroom.projections.projection import Column, Projection
from postroom.projections.sinks.sqlite import SqliteDatabase

DEFAULT_DATABASE = "postroom"
CATALOG = "postroom_catalog"
_SQL = statements("postroom.projections", "sql/clickhouse/tables.sql")
_TYPES = {"int": "Int64", "text": "String", "bytes": "String"}
_INSERTING = {"max_partitions_per_insert_block": 0}  # messages of many months may come together
_READING = {"output_format_arrow_string_as_string": 0}  # bytes need not be text

Client = Any
"""A client of clickhouse-connect; its types don't say that both kinds can do the same."""


def open_chdb(folder: str) -> "ClickHouseTarget":
    """Return a target that chdb keeps in a folder, which one process at a time can use."""
    path = Path(folder).absolute()
    return ClickHouseTarget(
        lambda: clickhouse_connect.get_client(interface="chdb", path=str(path)),
        DEFAULT_DATABASE,
        str(path),
        path.with_name(f"{path.name}-staging"),
        path.exists,
    )


def open_clickhouse(url: str) -> "ClickHouseTarget":
    """Return a target on a server.

    Arguments:
        url: `clickhouse://user:password@host:port/database`.
    """
    parts = urlsplit(url)
    shown = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    if not parts.hostname:
        raise InvalidRequest(f"{shown} names no host; write clickhouse://user@host:8123/database.")
    is_secure = parts.scheme == "clickhouses"

    def connect() -> Client:
        return clickhouse_connect.get_client(
            interface="https" if is_secure else "http",
            host=parts.hostname,
            port=parts.port or (8443 if is_secure else 8123),
            username=parts.username,
            password=parts.password or "",
        )

    staging = Path(gettempdir(), f"postroom-{blake3(shown.encode()).hexdigest(8)}-staging")
    return ClickHouseTarget(connect, parts.path.strip("/") or DEFAULT_DATABASE, shown, staging, lambda: True)


class ClickHouseTarget:
    """Tables in a database of ClickHouse; see `Target`.

    Arguments:
        connect: returns a client. exists: tells whether it is worth while.
    """

    def __init__(
        self,
        connect: Callable[[], Client],
        database: str,
        where: str,
        staging: Path,
        exists: Callable[[], bool],
    ) -> None:
        self.where = where
        self.staging = staging
        self._connect = connect
        self._database = database
        self._exists = exists
        self._held: Client | None = None

    def is_there(self) -> bool:
        """Tell whether there is a catalog."""
        return self._exists() and CATALOG in self.tables()

    @contextmanager
    def catalog(self) -> Iterator[SqliteDatabase]:
        """Open the catalog, which is kept in a table; see `Target.catalog`."""
        table = self._name(CATALOG)
        with (
            self._client() as client,
            closing(sqlite3.connect(":memory:", isolation_level=None)) as connection,
        ):
            client.command(f"CREATE DATABASE IF NOT EXISTS {_quoted(self._database)}")
            client.command(_SQL["create_catalog"].format(table=table))
            rows = client.query(_SQL["read_catalog"].format(table=table)).result_rows
            revision, image = rows[0] if rows else (0, "")
            if image:
                connection.deserialize(b64decode(image))
            connection.executescript(script("sqlite", "catalog.sql"))
            self._held = client
            try:
                yield ClickHouseCatalog(self, connection, revision)
            finally:
                self._held = None

    def save_catalog(self, revision: int, image: bytes) -> None:
        """Keep a revision of the catalog."""
        with self._client() as client:
            row = [[revision, b64encode(image).decode()]]
            client.insert(CATALOG, row, column_names=["revision", "image"], database=self._database)

    def fill(self, table: str, projection: Projection, files: Sequence[Path]) -> None:
        """Insert files into a new table; see `Target.fill`."""
        create = _SQL["create_mailbox" if projection.name == MESSAGES else "create"]
        columns = ", ".join(map(_declared, projection.columns))
        name = self._name(table)
        with self._client() as client:
            client.command(_SQL["drop"].format(table=name))
            client.command(create.format(table=name, columns=columns, key=", ".join(projection.key)))
            for file in files:
                with file.open("rb") as rows:
                    client.raw_insert(name, list(projection.schema), rows, settings=_INSERTING, fmt="Parquet")

    def count(self, table: str) -> int:
        """Return how many rows a table has."""
        with self._client() as client:
            return int(client.command(_SQL["count"].format(table=self._name(table))))

    def read(self, table: str, projection: Projection, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        """Yield columns of a table; see `Target.read`."""
        query = _SQL["read"].format(
            columns=", ".join(columns), table=self._name(table), key=", ".join(projection.key)
        )
        schema = {name: projection.schema[name] for name in columns}
        with (
            self._client() as client,
            client.raw_stream(query, settings=_READING, fmt="ArrowStream") as stream,
        ):
            for batch in pa.ipc.open_stream(stream):
                found = pl.from_arrow(batch)
                assert isinstance(found, pl.DataFrame)
                yield found.cast(schema)  # type: ignore[arg-type]

    def publish(self, version: int, models: Mapping[str, int]) -> None:
        """Replace the view of each model; see `Target.publish`."""
        with self._client() as client:
            for model, number in models.items():
                view, table = self._name(model), self._name(f"{model}_v{number}")
                client.command(_SQL["publish"].format(view=view, table=table))

    def tables(self) -> list[str]:
        """Return the names of all tables."""
        with self._client() as client:
            rows = client.query(_SQL["tables"], parameters={"database": self._database}).result_rows
        return [name for (name,) in rows]

    def drop(self, table: str) -> bool:
        """Drop a table."""
        with self._client() as client:
            client.command(_SQL["drop"].format(table=self._name(table)))
        return True

    @contextmanager
    def _client(self) -> Iterator[Client]:
        """Yield the client of whoever has the catalog open, else one for this once: making one takes long."""
        if self._held is not None:
            yield self._held
            return
        try:
            with closing(self._connect()) as client:
                yield client
        except ClickHouseError as error:
            said = str(error).partition("\n")[0]
            raise Unavailable(
                f"The ClickHouse database {self.where} can't be used: {said}. Check its address, and what "
                "its user may do."
            ) from None

    def _name(self, table: str) -> str:
        return f"{_quoted(self._database)}.{_quoted(table)}"


class ClickHouseCatalog(SqliteDatabase):
    """A catalog of which each change is kept in a table, whole."""

    def __init__(self, target: ClickHouseTarget, connection: sqlite3.Connection, revision: int) -> None:
        super().__init__(target.where, connection)
        self._target = target
        self._revision = revision
        self._saved = 0

    def run(self, statement: str, facts: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Run a statement with `:name` for each fact, and return its rows."""
        rows = super().run(statement, facts)
        if not self.connection.in_transaction:
            self._save()
        return rows

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make what is run inside one transaction, and one revision."""
        with super().transaction():
            yield
        self._save()

    def tables(self) -> list[str]:
        """Return the names of all tables."""
        return self._target.tables()

    def drop(self, table: str) -> bool:
        """Drop a table."""
        return self._target.drop(table)

    def _save(self) -> None:
        if self.connection.total_changes != self._saved:
            self._revision += 1
            self._target.save_catalog(self._revision, self.connection.serialize())
            self._saved = self.connection.total_changes


def _declared(column: Column) -> str:
    type_ = _TYPES[column.type]
    return f"{_quoted(column.name)} {type_ if is_required(column) else f'Nullable({type_})'}"


def _quoted(name: str) -> str:
    return "`" + name.replace("\\", "\\\\").replace("`", "\\`") + "`"
