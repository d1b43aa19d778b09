"""Read models in ClickHouse: on a server, or embedded in this process by chdb (RFC-037's ClickHouse phase).

Both are accessed with clickhouse-connect. Each version of a model is a MergeTree table; readers use a view,
which is replaced atomically when another version becomes active.
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

from postroom.adapters.sql.ddl import SQLITE, script
from postroom.adapters.sql.statements import statements
from postroom.adapters.sqlite.read_model_file import CatalogFile
from postroom.domain.errors import InvalidRequest, Unavailable
from postroom.projections.fold import MESSAGES
from postroom.projections.projection import Column, Projection

DEFAULT_DATABASE = "postroom"
CATALOG = "postroom_catalog"
_SQL = statements("postroom.adapters.clickhouse", "tables.sql")
_TYPES = {"int": "Int64", "text": "String", "bytes": "String"}
_INSERTING = {"max_partitions_per_insert_block": 0}  # an insert may span many months
_READING = {"output_format_arrow_string_as_string": 0}  # bytes need not be text

Client = Any
"""A client of clickhouse-connect; HTTP and chdb clients have no common public type."""


def open_chdb(folder: str) -> "ClickHouseTarget":
    """Return a target in a folder, stored by chdb; only one process at a time can open it."""
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
    where = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    if not parts.hostname:
        raise InvalidRequest(f"{where} names no host; use clickhouse://user@host:8123/database.")
    is_secure = parts.scheme == "clickhouses"

    def connect() -> Client:
        return clickhouse_connect.get_client(
            interface="https" if is_secure else "http",
            host=parts.hostname,
            port=parts.port or (8443 if is_secure else 8123),
            username=parts.username,
            password=parts.password or "",
        )

    staging = Path(gettempdir(), f"postroom-{blake3(where.encode()).hexdigest(8)}-staging")
    return ClickHouseTarget(connect, parts.path.strip("/") or DEFAULT_DATABASE, where, staging, lambda: True)


class ClickHouseTarget:
    """Tables in a database of ClickHouse; see `Target`.

    Arguments:
        connect: returns a client.
        may_exist: returns, without connecting, whether the database can exist.
    """

    def __init__(
        self,
        connect: Callable[[], Client],
        database: str,
        where: str,
        staging: Path,
        may_exist: Callable[[], bool],
    ) -> None:
        self.where = where
        self.staging = staging
        self._connect = connect
        self._database = database
        self._may_exist = may_exist
        self._open_client: Client | None = None

    def exists(self) -> bool:
        """Return whether there is a catalog."""
        return self._may_exist() and CATALOG in self.tables()

    @contextmanager
    def catalog(self) -> Iterator[CatalogFile]:
        """Open the catalog, which is stored in a table; see `Target.catalog`."""
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
            connection.executescript(script(SQLITE, "catalog.sql"))
            self._open_client = client
            try:
                yield ClickHouseCatalog(self, connection, revision)
            finally:
                self._open_client = None

    def save_catalog(self, revision: int, image: bytes) -> None:
        """Save a revision of the catalog."""
        with self._client() as client:
            row = [[revision, b64encode(image).decode()]]
            client.insert(CATALOG, row, column_names=["revision", "image"], database=self._database)

    def fill(self, table: str, projection: Projection, files: Sequence[Path]) -> None:
        """Insert files into a new table; see `Target.fill`."""
        create = _SQL["create_mailbox" if projection.name == MESSAGES else "create"]
        columns = ", ".join(map(_column_definition, projection.columns))
        name = self._name(table)
        with self._client() as client:
            client.command(_SQL["drop"].format(table=name))
            client.command(create.format(table=name, columns=columns, key=", ".join(projection.key)))
            for file in files:
                with file.open("rb") as rows:
                    client.raw_insert(name, list(projection.schema), rows, settings=_INSERTING, fmt="Parquet")

    def count(self, table: str) -> int:
        """Return the number of rows of a table."""
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
                yield pl.DataFrame(batch).cast(schema)  # type: ignore[arg-type]

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
        """Yield the client of the open catalog, because connecting is slow, or else a new one."""
        if self._open_client is not None:
            yield self._open_client
            return
        try:
            with closing(self._connect()) as client:
                yield client
        except ClickHouseError as error:
            reason = str(error).partition("\n")[0]
            raise Unavailable(
                f"The ClickHouse database {self.where} can't be used: {reason}. Check its address and "
                "the user's privileges."
            ) from None

    def _name(self, table: str) -> str:
        return f"{_quoted(self._database)}.{_quoted(table)}"


class ClickHouseCatalog(CatalogFile):
    """A catalog that is saved to a table as a whole after each change."""

    def __init__(self, target: ClickHouseTarget, connection: sqlite3.Connection, revision: int) -> None:
        super().__init__(target.where, connection)
        self._target = target
        self._revision = revision
        self._saved_changes = 0

    def run(self, statement: str, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Run a statement with `:name` for each value, and return its rows."""
        rows = super().run(statement, values)
        if not self.connection.in_transaction:
            self._save()
        return rows

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the statements inside the context as one transaction, and save one revision."""
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
        if self.connection.total_changes != self._saved_changes:
            self._revision += 1
            self._target.save_catalog(self._revision, self.connection.serialize())
            self._saved_changes = self.connection.total_changes


def _column_definition(column: Column) -> str:
    type_ = _TYPES[column.type]
    return f"{_quoted(column.name)} {type_ if column.is_required else f'Nullable({type_})'}"


def _quoted(name: str) -> str:
    return "`" + name.replace("\\", "\\\\").replace("`", "\\`") + "`"
