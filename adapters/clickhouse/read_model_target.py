"""Read models in ClickHouse (RFC-037's ClickHouse phase).

Each version of a model is a table; readers use a view, which is replaced atomically when another version
becomes active.
"""

import sqlite3
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import polars as pl

from postroom.adapters.clickhouse.database import CATALOG, CURSOR, PARKED, ClickHouseDatabase, ended, quoted
from postroom.adapters.sqlite.read_model_file import CatalogFile
from postroom.projections.fold import MESSAGES
from postroom.projections.projection import Column, Projection, load_projections

HEADER = Projection(
    "header",
    (
        Column("name", merge="key"),
        Column("value", merge="key"),
        Column("timestamp", "int", "key"),
        Column("id", "int", "key"),
    ),
)
TEXT = Projection(
    "text", (Column("id", "int", "key"), Column("text", required=True), Column("words", required=True))
)
SEARCH_TABLES = (HEADER, TEXT)
_TYPES = {"int": "Int64", "text": "String", "bytes": "String"}


class ClickHouseTarget:
    """Tables in a database of ClickHouse; see `Target`."""

    search_tables: Sequence[Projection] = SEARCH_TABLES

    def __init__(self, database: ClickHouseDatabase) -> None:
        self.where = database.where
        self.staging = database.staging
        self._database = database

    def exists(self) -> bool:
        """Return whether there is a catalog."""
        return self._database.may_exist() and CATALOG in self._database.tables()

    @contextmanager
    def catalog(self) -> Iterator["ClickHouseCatalog"]:
        """Open the catalog, which is stored in a table; see `Target.catalog`."""
        database = self._database
        with database.client() as client:
            client.command(f"CREATE DATABASE IF NOT EXISTS {quoted(database.name)}")
            database.command("create_catalog", table=database.table(CATALOG))
            database.command("create_cursor", table=database.table(CURSOR))
            database.command("add_chain", table=database.table(CURSOR))
            database.command("create_parked", table=database.table(PARKED))
            catalog = database.read_catalog(client, database.tables())
            with closing(catalog.connection):
                yield ClickHouseCatalog(self, catalog.connection, catalog.number)

    def save_catalog(self, number: int, image: bytes) -> None:
        """Save the catalog; the one with the highest number is current."""
        row = {"revision": [number], "image": [b64encode(image).decode()]}
        self._database.insert(CATALOG, pl.DataFrame(row, {"revision": pl.UInt64, "image": pl.String}))

    def read_positions(self, catalog: sqlite3.Connection) -> None:
        """Advance a catalog to the follower's cursors."""
        with self._database.client() as client:
            self._database.read_positions(client, catalog)

    def fill(self, table: str, projection: Projection, files: Sequence[Path]) -> None:
        """Insert files into a new table; see `Target.fill`."""
        database, name = self._database, self._database.table(table)
        self.drop(table)
        create = "create_mailbox" if projection.name == MESSAGES else "create"
        key, columns = ", ".join(map(quoted, projection.key)), definitions(projection.columns)
        database.command(create, table=name, columns=columns, key=key)
        columns = definitions(column for column in projection.columns if column.merge == "key")
        database.command("create_ended", table=database.table(ended(table)), columns=columns)
        names = list(projection.schema)
        with database.client() as client:
            for file in files:
                with file.open("rb") as rows:
                    client.raw_insert(name, names, rows, fmt="Parquet")

    def count(self, table: str) -> int:
        """Return the number of rows of a table."""
        return int(self._database.command("count", rows=self._live(table)))

    def read(self, table: str, projection: Projection, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        """Yield columns of a table; see `Target.read`."""
        names, key = (", ".join(map(quoted, each)) for each in (columns, projection.key))
        query = f"SELECT {names} FROM ({self._live(table)}) ORDER BY {key}"
        return self._database.read(query, {name: projection.schema[name] for name in columns})

    def publish(self, version: int, models: Mapping[str, int]) -> None:
        """Replace the view of each model; see `Target.publish`."""
        tables = self.tables()
        for model, number in models.items():
            table = f"{model}_v{number}"
            if ended(table) in tables:  # else an earlier release made the version and its views
                self._database.command("publish", view=self._database.table(model), rows=self._live(table))

    def tables(self) -> list[str]:
        """Return the names of all tables."""
        return self._database.tables()

    def drop(self, table: str) -> bool:
        """Drop a table, and the table of its ended rows."""
        database = self._database
        for name in (table, ended(table)):
            database.command("drop", table=database.table(name))
        return True

    def _live(self, table: str) -> str:
        return self._database.live(table, load_projections()[table.rpartition("_v")[0]])


class ClickHouseCatalog(CatalogFile):
    """A catalog that is saved to a table as a whole after each change."""

    def __init__(self, target: ClickHouseTarget, connection: sqlite3.Connection, number: int) -> None:
        super().__init__(target.where, connection)
        self._target = target
        self._number = number
        self._saved_changes = connection.total_changes

    def run(self, statement: str, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Run a statement with `:name` for each value, and return its rows."""
        rows = super().run(statement, values)
        if not self.connection.in_transaction:
            self._save()
        return rows

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the statements inside the context as one transaction, and save the catalog.

        It begins with the follower's cursors, which may have advanced.
        """
        with super().transaction():
            self._target.read_positions(self.connection)
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
            self._number += 1
            self._target.save_catalog(self._number, self.connection.serialize())
            self._saved_changes = self.connection.total_changes


def definitions(columns: Iterable[Column]) -> str:
    """Return the definitions of columns."""
    return ", ".join(map(_definition, columns))


def _definition(column: Column) -> str:
    type_ = _TYPES[column.type]
    return f"{quoted(column.name)} {type_ if column.is_required else f'Nullable({type_})'}"
