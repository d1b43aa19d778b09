"""The read model updater port over SQL tables in any database."""

import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from operator import itemgetter
from threading import Event
from typing import Any

import polars as pl

from postroom.adapters.sql.ddl import SQLITE, read_columns
from postroom.adapters.sql.statements import statements
from postroom.adapters.sql.tables import chain_text, read_heads, to_cursors, to_version
from postroom.domain.commit import POSITIONS_PER_MAILBOX
from postroom.domain.errors import NotFound
from postroom.domain.search import NO_BODIES
from postroom.projections.fold import MESSAGES, derive, with_parking
from postroom.projections.incremental import (
    STORED_COLUMNS,
    Batch,
    Changes,
    Cursor,
    Head,
    Step,
    StoredRow,
    Version,
    stored_frame,
)
from postroom.projections.models.backlog import PROJECTION as BACKLOG
from postroom.projections.models.messages import ParkedRecord
from postroom.projections.plan import FORMAT
from postroom.projections.ports.read_model_store import ReadModelUpdater
from postroom.projections.projection import (
    Column,
    MessageProjection,
    Projection,
    load_projections,
)
from postroom.projections.search_text import compact_tables

CATALOG = ("projection", "projection_cursor", "projection_parked")
LOG = ("log", "mailbox_names")
TOPIC = Projection(
    "topic",
    (
        Column("topic", merge="key"),
        Column("messages", "int", "sum"),
        Column("first_timestamp", "int", "min"),
        Column("last_timestamp", "int", "max"),
    ),
)
"""The table of all topics."""

_SQL = statements("postroom.adapters.sql", "update.sql", format=FORMAT)


class CursorConflict(Exception):
    """The version or its cursor changed since the batch was folded."""


class _Stop(Exception):
    """The process is to stop before the batch is applied."""


ROWS_PER_INSERT = 20_000
"""Messages whose texts are prepared at once, while PostgreSQL inserts the previous messages."""
ROWS_PER_STATEMENT = 4_000
"""PostgreSQL works on some rows while the next are packed; a stop takes effect between two statements."""


class SqlReadModelUpdater(ReadModelUpdater):
    """An updater of SQL tables; see `ReadModelUpdater`.

    Arguments:
        where: the read models' name for messages, without a password.
    """

    dialect = SQLITE
    min, max = "min", "max"
    """The SQL functions that return the lesser and the greater of two values."""
    other_columns: tuple[str, ...] = ()
    """Columns of messages in `compact_tables` that the database has in another table."""
    rebuild_command = "postroom views rebuild"
    stores_envelopes = False

    def __init__(self, where: str) -> None:
        self.where = where
        self._stop: Event | None = None

    @abstractmethod
    def leader_lock(self, target: str = "") -> AbstractContextManager[bool]:
        """Try to hold the lock of a follower; see `FollowedLog.leader_lock`."""

    @abstractmethod
    def _table(self, name: str) -> str:
        """Return the name of a table in statements."""

    @abstractmethod
    def _transaction(self) -> AbstractContextManager[None]:
        """Open a transaction on the read models; raise Unavailable for database errors."""

    @abstractmethod
    def _read(self, statement: str) -> list[tuple[Any, ...]]:
        """Return the rows of a statement on the catalog."""

    @abstractmethod
    def _read_log(self, statement: str) -> list[tuple[Any, ...]]:
        """Return the rows of a statement on the log."""

    @abstractmethod
    def _write(self, statement: str, rows: pl.DataFrame) -> None:
        """Run a statement with at least one input row."""

    @abstractmethod
    def _fetch(self, statement: str, rows: pl.DataFrame) -> list[tuple[Any, ...]]:
        """Return the results of a statement with at least one input row."""

    @abstractmethod
    def _lock(self, version: Version) -> None:
        """Lock a version until the transaction ends; raise CursorConflict when its status changed."""

    @abstractmethod
    def _index_text(self, number: int, tables: dict[str, pl.DataFrame]) -> None:
        """Index the texts of inserted messages, which `compact_tables` returned."""

    @abstractmethod
    def _unindex_text(self, number: int, texts: pl.DataFrame) -> None:
        """Remove texts from the text indexes, before the messages are deleted."""

    def active(self) -> Version | None:
        rows = self._read(self._sql("active"))
        return to_version(rows[0]) if rows else None

    def version(self, number: int) -> Version:
        rows = self._read(self._sql("version", version=number))
        if not rows:
            raise NotFound(
                f"The read models {self.where} have no version {number}; see `postroom views status`."
            )
        return to_version(rows[0])

    def cursors(self, version: Version) -> dict[int, Cursor]:
        rows = self._read(self._sql("cursors", version=version.number))
        return to_cursors(rows)

    def heads(self, cursors: dict[int, Cursor]) -> list[Head]:
        return read_heads(self._read_log, {each: self._table(each) for each in LOG}, cursors)

    def wait_for_commit(self, seconds: float) -> bool | None:
        """Return None; see `FollowedLog.wait_for_commit`."""
        return None

    def apply(self, version: Version, steps: Sequence[Step], batch: Batch, stop: Event | None = None) -> bool:
        self._stop = stop
        try:
            with self._transaction():
                self._lock(version)
                self._move(version, steps)
                changes = batch.changes(self._affected_messages(version, steps, batch.earlier_messages))
                self._insert_sent(version, changes.inserts)
                self._write_rows("change", changes.updates, mailbox=_of(version, MESSAGES))
                self._apply_derived(version, changes)
                for name, rows in changes.events.items():
                    self._merge(_of(version, name), load_projections()[name], rows)
                self._park(version, steps, changes.parked)
        except (CursorConflict, _Stop):
            return False
        finally:
            self._stop = None
        return True

    def remove(self, version: Version, before: int, after: int) -> bool:
        try:
            with self._transaction():
                self._lock(version)
                names = self._stored_columns()
                rows = self._read(
                    self._sql(
                        "removed", columns=names, mailbox=_of(version, MESSAGES), before=before, after=after
                    )
                )
                if rows:
                    self._remove(version, rows)
        except CursorConflict:
            return False
        return True

    def _remove(self, version: Version, rows: Sequence[StoredRow]) -> None:
        truncated_messages = stored_frame(rows)
        number, ids = version.models[MESSAGES], truncated_messages.select("id")
        self._unindex_text(number, compact_tables(truncated_messages, NO_BODIES)["search"])
        for table in (f"text_v{number}", _of(version, MESSAGES)):
            self._delete(table, ("id",), ids)
        topics = truncated_messages.group_by("topic").agg(pl.len().cast(pl.Int64).alias("messages"))
        self._write_rows("recount", topics, table=f"topic_v{number}", mailbox=_of(version, MESSAGES))
        empty_topics = {"table": f"topic_v{number}", "key": "topic", "is_empty": "messages = 0"}
        self._write_rows("delete_empty", topics.select("topic"), **empty_topics)
        models = {name: load_projections()[name] for name in version.models}
        none = {name: pl.DataFrame(schema=each.schema) for name, each in models.items()}
        before = derive(truncated_messages, models)
        empty = none[MESSAGES]
        self._apply_derived(
            version, Changes(empty, empty, before, {name: none[name] for name in before}, {}, ())
        )

    def _move(self, version: Version, steps: Sequence[Step]) -> None:
        moves = [
            (
                *(version.number, extent.id, extent.name, start.position, extent.last, extent.at),
                chain_text(extent.last, extent.chain),
            )
            for start, extent in steps
        ]
        names = ("version", "mailbox_id", "mailbox", "expected", "position", "at", "chain")
        cursors = _frame(moves, names)
        self._write_rows("begin_cursors", cursors.filter(pl.col("expected") == 0))
        if len(self._fetch_rows("move_cursors", cursors)) < len(steps):
            raise CursorConflict

    def _affected_messages(
        self, version: Version, steps: Sequence[Step], earlier_messages: pl.DataFrame
    ) -> list[StoredRow]:
        """Return the messages that the batch continues, and those whose delay ends."""
        names = {
            "columns": self._stored_columns(),
            "mailbox": _of(version, MESSAGES),
        }
        now = _frame([(step.extent.name, step.extent.at) for step in steps], ("mailbox", "now"))
        rows = self._fetch_rows("stored", earlier_messages, **names) + self._fetch_rows("due", now, **names)
        # An id that is reused after retention belongs to several messages, of which the latest is last.
        return sorted({row[0]: row for row in rows}.values(), key=itemgetter(0))

    def _insert_sent(self, version: Version, sent: pl.DataFrame) -> None:
        if not sent.height:
            return
        number = version.models[MESSAGES]
        for part in sent.iter_slices(ROWS_PER_INSERT):
            tables = compact_tables(part, version.bodies)
            self._write_rows("add_names", tables["header"], table=f"header_v{number}")
            self._insert(_of(version, MESSAGES), tables[MESSAGES].drop(self.other_columns))
            self._index_text(number, tables)
        timestamp = pl.col("timestamp")
        topics = sent.group_by("topic").agg(
            pl.len().cast(pl.Int64).alias("messages"),
            timestamp.min().alias("first_timestamp"),
            timestamp.max().alias("last_timestamp"),
        )
        self._merge(f"topic_v{number}", TOPIC, topics)

    def _apply_derived(self, version: Version, changes: Changes) -> None:
        for name, after in changes.after.items():
            projection, before = load_projections()[name], changes.before[name]
            assert isinstance(projection, MessageProjection)
            if projection.key == ("id",):
                self._delete(_of(version, name), ("id",), before)
                self._insert(_of(version, name), after)
            elif projection is BACKLOG or all(each.merge in ("key", "sum") for each in projection.columns):
                self._add(version, projection, before, after)
            else:
                self._rederive(version, projection, before, after)

    def _add(
        self, version: Version, projection: Projection, before: pl.DataFrame, after: pl.DataFrame
    ) -> None:
        """Add the counts of `after` and subtract the counts of `before`."""
        sums = [each.name for each in projection.columns if each.merge == "sum"]
        counts = [*projection.key, *sums]
        negated = before.select(*projection.key, *(-pl.col(name) for name in sums))
        differences = (
            pl.concat([after.select(counts), negated]).group_by(projection.key).agg(pl.col(sums).sum())
        )
        table = _of(version, projection.name)
        columns = tuple(each for each in projection.columns if each.name in counts)
        self._merge(table, Projection(projection.name, columns), differences.select(counts))
        is_empty = " AND ".join(f"{name} = 0" for name in sums)
        keys = differences.select(projection.key)
        key = ", ".join(projection.key)
        self._write_rows("delete_empty", keys, table=table, key=key, is_empty=is_empty)
        if projection is BACKLOG:
            self._write_rows("oldest", keys, backlog=table, mailbox=_of(version, MESSAGES))

    def _rederive(
        self, version: Version, projection: MessageProjection, before: pl.DataFrame, after: pl.DataFrame
    ) -> None:
        """Recompute the rows of changed messages: a minimum, for example, can't be updated incrementally.

        If the key consists of columns of the messages, only messages with these keys are read; otherwise all
        unsettled ones.
        """
        keys = pl.concat([before.select(projection.key), after.select(projection.key)]).unique()
        if not keys.height:
            return
        has_message_key = set(projection.key) <= set(STORED_COLUMNS)
        rows = self._fetch_rows(
            "unsettled",
            keys if has_message_key else keys.head(1),
            columns=self._stored_columns(),
            mailbox=_of(version, MESSAGES),
            condition=" AND ".join(f"message.{name} = source.{name}" for name in projection.key)
            if has_message_key
            else "true",
        )
        unsettled = stored_frame(rows)
        self._delete(_of(version, projection.name), projection.key, keys)
        # Messages that can't be folded were parked with their batch.
        projections = with_parking({projection.name: projection}, [])
        new_rows = derive(unsettled, projections)[projection.name]
        self._insert(_of(version, projection.name), new_rows.join(keys, on=projection.key, how="semi"))

    def _park(self, version: Version, steps: Sequence[Step], parked: Sequence[ParkedRecord]) -> None:
        mailboxes = {step.extent.id: step.extent.name for step in steps}
        now = time.time_ns() // 1_000
        rows = [
            (
                version.number,
                each.place,
                mailboxes[each.place // POSITIONS_PER_MAILBOX],
                each.place % POSITIONS_PER_MAILBOX,
                each.type,
                each.error,
                now,
            )
            for each in {each.place: each for each in reversed(parked)}.values()
        ]
        names = ("version", "place", "mailbox", "position", "type", "error", "parked_at")
        if rows:
            self._write_rows("park", _frame(rows, names))

    def _insert(self, table: str, rows: pl.DataFrame) -> None:
        # Most headers are absent from all messages.
        rows = rows.select(column for column in rows if column.null_count() < rows.height)
        self._write_rows("insert", rows, table=table, columns=", ".join(rows.columns))

    def _delete(self, table: str, key: Sequence[str], rows: pl.DataFrame) -> None:
        self._write_rows("delete", rows.select(key), table=table, key=", ".join(key))

    def _merge(self, table: str, projection: Projection, rows: pl.DataFrame) -> None:
        changes = [self._merge_expression(each) for each in projection.columns if each.merge != "key"]
        self._write_rows(
            "merge",
            rows,
            table=table,
            columns=", ".join(rows.columns),
            key=", ".join(projection.key),
            assignments=", ".join(changes),
        )

    def _merge_expression(self, column: Column) -> str:
        old, new = f"merged.{column.name}", f"excluded.{column.name}"
        if column.merge == "sum":
            return f"{column.name} = {old} + {new}"
        if column.merge == "replace":
            return f"{column.name} = {new}"
        function = self.min if column.merge == "min" else self.max
        return f"{column.name} = {function}(coalesce({old}, {new}), coalesce({new}, {old}))"

    def _stored_columns(self) -> str:
        return read_columns(MESSAGES, STORED_COLUMNS, self.dialect, "message.")

    def _write_rows(self, name: str, rows: pl.DataFrame, **names: object) -> None:
        statement = self._sql(name, **names)
        for chunk in rows.iter_slices(ROWS_PER_STATEMENT):
            if self._stop is not None and self._stop.is_set():
                raise _Stop
            self._write(statement, chunk)

    def _fetch_rows(self, name: str, rows: pl.DataFrame, **names: object) -> list[tuple[Any, ...]]:
        return self._fetch(self._sql(name, **names), rows) if rows.height else []

    def _sql(self, name: str, **names: object) -> str:
        """Return a statement with all placeholders replaced except `{rows}` and `{values}`."""
        tables = {each: self._table(each) for each in (*CATALOG, *LOG)}
        values = {
            each: self._table(str(value)) if each in ("table", "mailbox", "backlog") else value
            for each, value in names.items()
        }
        return _SQL[name].format(**tables, **values, rows="{rows}", values="{values}")


def _of(version: Version, model: str) -> str:
    return f"{model}_v{version.models[model]}"


def _frame(rows: Sequence[tuple[Any, ...]], names: Sequence[str]) -> pl.DataFrame:
    return pl.DataFrame(rows, names, orient="row", infer_schema_length=None)
