"""The tables of read models as SQL, made from the columns of their projections.

What only one model needs is written by hand in `sql/`.
"""

import re
from dataclasses import dataclass
from importlib.resources import files

from postroom.projections.projection import Column, Projection, Type


@dataclass(frozen=True)
class Dialect:
    """Say how a database spells what both mean.

    Arguments:
        folder: its folder under `sql/`.
        schema: what table names begin with.
        types: of columns.
    """

    folder: str
    schema: str
    types: dict[Type, str]

    def table(self, name: str) -> str:
        """Return the name of a table as statements spell it."""
        return f"{self.schema}{name}"


SQLITE = Dialect("sqlite", "", {"int": "INTEGER", "text": "TEXT", "bytes": "BLOB"})
# Text is compared byte by byte, as it is in the log.
POSTGRES = Dialect("postgres", "postroom.", {"int": "BIGINT", "text": 'TEXT COLLATE "C"', "bytes": "BYTEA"})


def create_table(projection: Projection, version: int, dialect: Dialect) -> str:
    """Return the statement that makes the table of a version; PostgreSQL's gets its key with the indexes."""
    columns = [_column(column, dialect) for column in projection.columns]
    name = dialect.table(f"{projection.name}_v{version}")
    if dialect is POSTGRES:
        # Nothing is vacuumed before it is complete.
        return f"CREATE TABLE {name} ({', '.join(columns)}) WITH (autovacuum_enabled = false)"
    if [column.type for column in projection.columns if column.merge == "key"] == ["int"]:
        (key,) = projection.key
        columns = [
            f"{key} INTEGER PRIMARY KEY" if column.name == key else text
            for column, text in zip(projection.columns, columns, strict=True)
        ]
        return f"CREATE TABLE {name} ({', '.join(columns)}) STRICT"
    return (
        f"CREATE TABLE {name} ({', '.join(columns)}, PRIMARY KEY ({', '.join(projection.key)})) "
        "STRICT, WITHOUT ROWID"
    )


def create_indexes(projection: Projection, version: int, dialect: Dialect) -> list[str]:
    """Return the statements that index the table of a version."""
    table = f"{projection.name}_v{version}"
    # Not a primary key, which would wait for the other indexes that are built meanwhile.
    key = [f"CREATE UNIQUE INDEX {table}_key ON {dialect.table(table)} ({', '.join(projection.key)})"]
    return [
        *(key if dialect is POSTGRES else []),
        *(
            f"CREATE INDEX {table}_{number} ON {dialect.table(table)} ({', '.join(columns)})"
            for number, columns in enumerate(projection.indexes, 1)
        ),
    ]


def merge_into(projection: Projection, version: int, staged: str) -> str:
    """Return PostgreSQL's statement that makes one row of all staged rows of a key.

    Arguments:
        staged: a table with the projection's columns and `part`, by which earlier rows sort first.
    """
    merged = ", ".join(map(_merged, projection.columns))
    table = POSTGRES.table(f"{projection.name}_v{version}")
    return (
        f"INSERT INTO {table} ({', '.join(projection.schema)}) SELECT {merged} "
        f"FROM {POSTGRES.table(staged)} GROUP BY {', '.join(projection.key)}"
    )


def compare(projection: Projection, version: int, other: int, schema: str) -> tuple[str, str]:
    """Return a statement that counts rows that only `version` has, only `other` has, and both have unlike.

    The second statement finds the key of the first of these rows.
    """
    key = projection.key
    keys = ", ".join(key)
    new, old = (", ".join(f"{side}.{name}" for name in projection.schema) for side in ("new", "old"))
    compared = (
        f"FROM {schema}{projection.name}_v{version} AS new "
        f"FULL JOIN {schema}{projection.name}_v{other} AS old USING ({keys}) "
        f"WHERE ({new}) IS DISTINCT FROM ({old})"
    )
    counts = (
        f"SELECT count(*) FILTER (WHERE old.{key[0]} IS NULL), count(*) FILTER (WHERE new.{key[0]} IS NULL), "
        f"count(*) FILTER (WHERE old.{key[0]} = new.{key[0]}) {compared}"
    )
    return counts, f"SELECT {keys} {compared} ORDER BY {keys} LIMIT 1"


def script(folder: str, name: str) -> str:
    """Return a file of `projections/sql`."""
    return (files("postroom.projections") / "sql" / folder / name).read_text("utf-8")


def statements(dialect: Dialect, name: str, **values: int) -> list[str]:
    """Return the statements of a script, with `{version}` and the like replaced by their values."""
    text = re.sub(r"--.*", "", script(dialect.folder, name))
    for key, value in values.items():
        text = text.replace(f"{{{key}}}", str(value))
    # A body in dollar quotes and that of a trigger have semicolons of their own.
    found = re.findall(r"(?:\$\$.*?\$\$|\bBEGIN\b.*?\bEND\b|[^;])+", text, re.DOTALL)
    return [statement.strip() for statement in found if statement.strip()]


def is_required(column: Column) -> bool:
    """Tell whether a column is never null."""
    return column.required or column.merge in ("key", "sum")


def _column(column: Column, dialect: Dialect) -> str:
    return f"{column.name} {dialect.types[column.type]}{' NOT NULL' if is_required(column) else ''}"


def _merged(column: Column) -> str:
    name = column.name
    match column.merge:
        case "key":
            return name
        case "sum":
            return f"sum({name})::bigint"
        case "min" | "max":
            return f"{column.merge}({name})"
        case "replace":
            return f"(array_agg({name} ORDER BY part DESC))[1]"
