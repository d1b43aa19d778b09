"""SQL for the tables of read models, generated from the columns of their projections.

SQL for single models is in the `.sql` files of the database's package.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from postroom.adapters.sql.statements import read_text
from postroom.projections.fold import MESSAGES
from postroom.projections.models.messages import UUID_SQL
from postroom.projections.projection import Column, Projection, Type, load_projections

VIEWS = {
    "messages": MESSAGES,
    "backlog": "backlog",
    "dead_letters": "dead_letters",
    "activity": "activity",
}
"""Views of the active version and the models that they show, beside RFC-037's `mailbox`."""


@dataclass(frozen=True)
class Dialect:
    """The properties of a database's SQL.

    Arguments:
        package: package of the database's `.sql` files.
        schema: prefix of table names.
        types: column types by their types in projections.
        stream_text: expression of the UUID in a column `stream`, with `{}` for the prefix of the column.
    """

    package: str
    schema: str
    types: dict[Type, str]
    stream_text: str

    def table(self, name: str) -> str:
        """Return the qualified name of a table."""
        return f"{self.schema}{name}"


SQLITE = Dialect(
    "postroom.adapters.sqlite",
    "",
    {"int": "INTEGER", "text": "TEXT", "bytes": "BLOB"},
    UUID_SQL,
)
# Text is compared bytewise, as in the log.
POSTGRES = Dialect(
    "postroom.adapters.postgres",
    "postroom.",
    {"int": "BIGINT", "text": 'TEXT COLLATE "C"', "bytes": "BYTEA"},
    "encode({0}stream, 'hex')::uuid::text",
)


def read_columns(model: str, names: Iterable[str], dialect: Dialect, prefix: str = "") -> str:
    """Return columns of a model's table for a SELECT, with the message ids that only `stream` has.

    Arguments:
        prefix: of the columns, such as `message.`.
    """
    id_ = f"coalesce({prefix}message_id, {dialect.stream_text.format(prefix)}) AS message_id"
    return ", ".join(
        id_ if (model, name) == (MESSAGES, "message_id") else f"{prefix}{name}" for name in names
    )


def create_table(projection: Projection, version: int, dialect: Dialect) -> str:
    """Return the statement that creates a version's table; in PostgreSQL the key is one of the indexes."""
    columns = [_column(column, dialect) for column in projection.columns]
    name = dialect.table(f"{projection.name}_v{version}")
    if dialect is POSTGRES:
        # It is vacuumed once, when it is complete.
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
    """Return the statements that create the indexes of a version's table."""
    table = f"{projection.name}_v{version}"
    # A unique index can be built concurrently with others; a primary key would wait for them.
    key = [f"CREATE UNIQUE INDEX {table}_key ON {dialect.table(table)} ({', '.join(projection.key)})"]
    return [
        *(key if dialect is POSTGRES else []),
        *(
            f"CREATE INDEX {table}_{number} ON {dialect.table(table)} ({', '.join(columns)})"
            for number, columns in enumerate(projection.indexes, 1)
        ),
    ]


def replace_views(models: Mapping[str, int], dialect: Dialect) -> list[str]:
    """Return the statements that make the views with stable names show models of one version.

    Arguments:
        models: by model, the version whose table contains it; the views of others are dropped.
    """
    run: list[str] = []
    if MESSAGES not in models:
        run.append(f"DROP VIEW IF EXISTS {dialect.table('mailbox')}")
    else:
        id_ = read_columns(MESSAGES, ["message_id"], dialect)
        run += statements(dialect, "mailbox_view.sql", version=models[MESSAGES], message_id=id_)
    for view, model in VIEWS.items():
        name = dialect.table(view)
        if dialect is SQLITE or model not in models:
            run.append(f"DROP VIEW IF EXISTS {name}")
        if model in models:
            # Replaced views, unlike views that are dropped and created, keep the privileges granted on them.
            create = "CREATE VIEW" if dialect is SQLITE else "CREATE OR REPLACE VIEW"
            columns = ", ".join(
                _view_column(model, each, dialect) for each in load_projections()[model].columns
            )
            run.append(f"{create} {name} AS SELECT {columns} FROM {dialect.table(model)}_v{models[model]}")
    return run


def merge_into(projection: Projection, version: int, staged: str) -> str:
    """Return PostgreSQL's statement that merges all staged rows of a key.

    Arguments:
        staged: a table with the projection's columns and `part`, which orders the rows.
    """
    merged = ", ".join(map(_merge_expression, projection.columns))
    table = POSTGRES.table(f"{projection.name}_v{version}")
    return (
        f"INSERT INTO {table} ({', '.join(projection.schema)}) SELECT {merged} "
        f"FROM {POSTGRES.table(staged)} GROUP BY {', '.join(projection.key)}"
    )


def compare(projection: Projection, version: int, other: int, schema: str) -> tuple[str, str]:
    """Return a statement that counts the rows that were added, removed and changed between two versions.

    The second statement returns the key of the first such row.

    Arguments:
        version, other: the new version and the old one.
    """
    key = projection.key
    keys = ", ".join(key)
    new, old = (", ".join(f"{side}.{name}" for name in projection.stored_schema) for side in ("new", "old"))
    changed_rows = (
        f"FROM {schema}{projection.name}_v{version} AS new "
        f"FULL JOIN {schema}{projection.name}_v{other} AS old USING ({keys}) "
        f"WHERE ({new}) IS DISTINCT FROM ({old})"
    )
    count = (
        f"SELECT count(*) FILTER (WHERE old.{key[0]} IS NULL), count(*) FILTER (WHERE new.{key[0]} IS NULL), "
        f"count(*) FILTER (WHERE old.{key[0]} = new.{key[0]}) {changed_rows}"
    )
    return count, f"SELECT {keys} {changed_rows} ORDER BY {keys} LIMIT 1"


def script(dialect: Dialect, name: str) -> str:
    """Return a `.sql` file of a database."""
    return read_text(dialect.package, f"sql/{name}")


def statements(dialect: Dialect, name: str, **values: object) -> list[str]:
    """Return the statements of a script, with placeholders such as `{version}` replaced by values."""
    text = re.sub(r"--.*", "", script(dialect, name))
    for key, value in values.items():
        text = text.replace(f"{{{key}}}", str(value))
    # Semicolons within dollar quotes and triggers do not end a statement.
    parts = re.findall(r"(?:\$\$.*?\$\$|\bBEGIN\b.*?\bEND\b|[^;])+", text, re.DOTALL)
    return [statement.strip() for statement in parts if statement.strip()]


def select_rows(projection: Projection, version: int, dialect: Dialect, where: str) -> str:
    """Return the statement that selects the rows of a version's table that satisfy a condition."""
    table = dialect.table(f"{projection.name}_v{version}")
    columns = read_columns(projection.name, projection.stored_schema, dialect)
    return f"SELECT {columns} FROM {table}{' WHERE ' if where else ''}{where}"


def _column(column: Column, dialect: Dialect) -> str:
    return f"{column.name} {dialect.types[column.type]}{' NOT NULL' if column.is_required else ''}"


def _view_column(model: str, column: Column, dialect: Dialect) -> str:
    if not column.in_sql:
        return f"CAST(NULL AS {dialect.types[column.type]}) AS {column.name}"
    return read_columns(model, [column.name], dialect)


def _merge_expression(column: Column) -> str:
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
