"""A revision of the rows in ClickHouse while it is written (ADR 0094)."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Event
from typing import Any

import polars as pl

from postroom.adapters.clickhouse.database import (
    CURSOR,
    PARKED,
    SQL,
    STAGED,
    ClickHouseDatabase,
    ended,
    quoted,
)
from postroom.adapters.clickhouse.read_model_target import definitions
from postroom.adapters.sql.versions import parked_rows
from postroom.domain.errors import Unavailable
from postroom.projections.fold import MESSAGES, derive, with_parking
from postroom.projections.incremental import (
    CHANGEABLE_COLUMNS,
    STORED_COLUMNS,
    Changes,
    Cursor,
    Step,
    StoredRow,
    Version,
)
from postroom.projections.log_reader import LogExtent
from postroom.projections.models import messages
from postroom.projections.models.backlog import PROJECTION as BACKLOG
from postroom.projections.models.messages import ParkedRecord
from postroom.projections.projection import (
    Column,
    MessageProjection,
    Projection,
    Type,
    load_projections,
    merge_rows,
)
from postroom.projections.search_text import search_tables

_STORED = {name: messages.PROJECTION.schema[name] for name in STORED_COLUMNS}
_MOVED = {
    "mailbox_id": pl.Int64(),
    "mailbox": pl.String(),
    "position": pl.Int64(),
    "at": pl.Int64(),
    "chain": pl.String(),
}
_TYPES: dict[Any, Type] = {pl.Int64(): "int", pl.String(): "text", pl.Binary(): "bytes"}


class Stopped(Exception):
    """The process is to stop before the revision is complete."""


class Revision:
    """A revision while it is written.

    Arguments:
        before: the visible revision that it follows.
        stop: set when the process is to stop.
    """

    def __init__(
        self, database: ClickHouseDatabase, version: Version, before: int, number: int, stop: Event | None
    ) -> None:
        self.version = version
        self.before = before
        self.number = number
        self._database = database
        self._stop = stop
        self._staged = database.table(f"{STAGED}{number}")

    def close(self) -> None:
        """Drop the temporary table, unless the database has failed."""
        with suppress(Unavailable):
            self._database.command("drop", table=self._staged)

    def check_stop(self) -> None:
        """Raise Stopped if the process is to stop."""
        if self._stop is not None and self._stop.is_set():
            raise Stopped

    def affected_messages(self, steps: Sequence[Step], earlier_messages: pl.DataFrame) -> list[StoredRow]:
        """Return the messages that a batch continues, and those whose delay ends."""
        rows = self._live(messages.PROJECTION)
        frames = [self._among(rows, _STORED, earlier_messages)]
        now = [(step.extent.name, step.extent.at) for step in steps]
        self._stage(pl.DataFrame(now, ("mailbox", "now"), orient="row"))
        columns = ", ".join(f"message.{quoted(name)} AS {quoted(name)}" for name in STORED_COLUMNS)
        query = SQL["due"].format(columns=columns, rows=rows, staged=self._staged)
        frames += self._database.read(query, _STORED)
        return pl.concat(frames).unique("id").sort("id").rows()

    def messages_between(self, before: int, after: int) -> pl.DataFrame:
        """Return the messages with places from `before` to below `after`, without their envelopes."""
        live = self._live(messages.PROJECTION, STORED_COLUMNS)
        query = f"SELECT * FROM ({live}) WHERE id >= {before} AND id < {after}"
        return pl.concat([pl.DataFrame(schema=_STORED), *self._database.read(query, _STORED)])

    def change_messages(self, changes: Changes) -> None:
        """Insert new messages, and replace changed ones by rows with their new status."""
        if changes.inserts.height:
            self._insert(MESSAGES, changes.inserts)
            number = self.version.models[MESSAGES]
            for name, rows in search_tables(changes.inserts, self.version.bodies).items():
                self._database.insert(f"{name}_v{number}", pl.DataFrame(rows))
        if changes.updates.height:
            self._stage(changes.updates)
            self._end(messages.PROJECTION)
            columns = (
                f"{'staged' if name in CHANGEABLE_COLUMNS else 'message'}.{quoted(name)}"
                for name in messages.PROJECTION.schema
            )
            self._database.command(
                "change",
                table=self._database.table(self._table(MESSAGES)),
                names=", ".join(map(quoted, messages.PROJECTION.schema)),
                columns=", ".join(columns),
                since=self.number,
                rows=self._live(messages.PROJECTION),
                staged=self._staged,
            )

    def apply_derived(self, changes: Changes) -> None:
        """Apply the changes of the read models of unsettled messages, after the changes of messages."""
        for name, after in changes.after.items():
            projection, before = load_projections()[name], changes.before[name]
            assert isinstance(projection, MessageProjection)
            keys = pl.concat([before.select(projection.key), after.select(projection.key)]).unique()
            if not keys.height:
                continue
            if projection.key == ("id",):
                rows = after
            elif projection is BACKLOG or all(each.merge in ("key", "sum") for each in projection.columns):
                rows = self._counted(projection, keys, before, after)
            else:
                rows = self._derived(projection, keys)
            self.replace(projection, keys, rows)

    def merge(self, projection: Projection, rows: pl.DataFrame) -> None:
        """Merge rows of an `EventProjection` into the stored ones."""
        if rows.height:
            keys = rows.select(projection.key)
            stored = self._among(self._live(projection), projection.schema, keys)
            self.replace(projection, keys, merge_rows(projection, pl.concat([stored, rows])))

    def replace(self, projection: Projection, keys: pl.DataFrame, rows: pl.DataFrame) -> None:
        """End the rows with these keys, and insert others."""
        self._stage(keys)
        self._end(projection)
        self._insert(projection.name, rows)

    def park(self, parked: Sequence[ParkedRecord], extents: Sequence[LogExtent]) -> None:
        """Record the records that could not be folded."""
        rows = parked_rows(parked, extents, self.version.number)
        self._database.insert(PARKED, rows.with_columns(self._since))

    def commit(self, moved: Mapping[int, Cursor]) -> bool:
        """Make this revision visible; return False if another one became visible after `before`.

        Arguments:
            moved: the new cursors, by mailbox id.
        """
        rows = [(id_, each.mailbox, each.position, each.at, each.chain) for id_, each in moved.items()]
        self._stage(pl.DataFrame(rows, _MOVED, orient="row"))
        cursor = self._database.table(CURSOR)
        # One statement checks and inserts, because it may be run late.
        self._database.command(
            "commit",
            cursor=cursor,
            staged=self._staged,
            version=self.version.number,
            revision=self.number,
            before=self.before,
        )
        return int(self._database.command("is_committed", cursor=cursor, revision=self.number)) == 1

    def delete_search_rows(self, before: int, after: int) -> None:
        """Delete the search rows of messages that no query finds."""
        for name in ("header", "text"):
            table = self._database.table(f"{name}_v{self.version.models[MESSAGES]}")
            self._database.command("delete", table=table, condition=f"id >= {before} AND id < {after}")

    def _counted(
        self, projection: Projection, keys: pl.DataFrame, before: pl.DataFrame, after: pl.DataFrame
    ) -> pl.DataFrame:
        """Return the stored counts, plus the counts of `after`, minus the counts of `before`."""
        sums = [each.name for each in projection.columns if each.merge == "sum"]
        counts = [*projection.key, *sums]
        stored = self._among(self._live(projection), projection.schema, keys)
        frames = [
            stored.select(counts),
            after.select(counts),
            before.select(*projection.key, *(-pl.col(name) for name in sums)),
        ]
        rows = pl.concat(frames).group_by(projection.key).agg(pl.col(sums).sum())
        rows = rows.filter(pl.any_horizontal(pl.col(name) != 0 for name in sums))
        if projection is not BACKLOG:
            return rows.select(projection.schema.keys())
        key = ", ".join(map(quoted, projection.key))
        query = SQL["oldest"].format(key=key, rows=self._written_messages(), staged=self._staged)
        schema = {name: projection.schema[name] for name in (*projection.key, "oldest_at")}
        oldest = pl.concat([pl.DataFrame(schema=schema), *self._database.read(query, schema)])
        return rows.join(oldest, projection.key, "left").select(projection.schema.keys())

    def _derived(self, projection: MessageProjection, keys: pl.DataFrame) -> pl.DataFrame:
        """Return the rows derived anew from the unsettled messages.

        If the key consists of columns of the messages, only messages with these keys are read; otherwise all
        unsettled ones.
        """
        key = ", ".join(map(quoted, projection.key))
        condition = "true"
        if set(projection.key) <= set(STORED_COLUMNS):
            self._stage(keys)
            condition = f"({key}) IN (SELECT {key} FROM {self._staged})"
        schema = messages.PROJECTION.schema
        query = SQL["unsettled"].format(
            columns=", ".join(map(quoted, schema)), rows=self._written_messages(), condition=condition
        )
        rows = pl.concat([pl.DataFrame(schema=schema), *self._database.read(query, schema)])
        # Messages that can't be folded were parked with their batch.
        projections = with_parking({projection.name: projection}, [])
        return derive(rows, projections)[projection.name].join(keys, on=projection.key, how="semi")

    def _written_messages(self) -> str:
        """Return the query for the messages of this revision."""
        return self._database.live(
            self._table(MESSAGES), messages.PROJECTION, revision=self.before, own=self.number
        )

    def _live(self, projection: Projection, columns: Sequence[str] | None = None) -> str:
        table = self._table(projection.name)
        return self._database.live(table, projection, columns=columns, revision=self.before)

    def _among(self, rows: str, schema: dict[str, pl.DataType], keys: pl.DataFrame) -> pl.DataFrame:
        """Return the rows with these keys, which stay staged."""
        none = pl.DataFrame(schema=schema)
        if not keys.height:
            return none
        self._stage(keys)
        query = SQL["among"].format(
            columns=", ".join(map(quoted, schema)),
            rows=rows,
            key=", ".join(map(quoted, keys.columns)),
            staged=self._staged,
        )
        return pl.concat([none, *self._database.read(query, schema)])

    def _end(self, projection: Projection) -> None:
        """End the visible rows with the staged keys."""
        self._database.command(
            "end",
            ended=self._database.table(ended(self._table(projection.name))),
            key=", ".join(map(quoted, projection.key)),
            until=self.number,
            rows=self._live(projection, (*projection.key, "since")),
            staged=self._staged,
        )

    def _stage(self, rows: pl.DataFrame) -> None:
        self.check_stop()
        columns = [Column(name, _TYPES[type_]) for name, type_ in rows.schema.items()]
        self._database.command("stage", table=self._staged, columns=definitions(columns))
        self._database.insert(f"{STAGED}{self.number}", rows)

    def _insert(self, name: str, rows: pl.DataFrame) -> None:
        self.check_stop()
        self._database.insert(self._table(name), rows.with_columns(self._since))

    @property
    def _since(self) -> pl.Expr:
        return pl.lit(self.number, pl.UInt64).alias("since")

    def _table(self, model: str) -> str:
        return f"{model}_v{self.version.models[model]}"
