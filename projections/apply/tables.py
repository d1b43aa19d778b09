"""The tables of the read models in SQL, whichever database holds them."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from operator import itemgetter
from typing import Any

import msgspec
import polars as pl

from postroom.adapters.sql.statements import statements
from postroom.domain.errors import NotFound
from postroom.domain.record import Record
from postroom.domain.search import BodyRules
from postroom.projections.apply import Cursor, Head, Step, Version
from postroom.projections.apply.changes import KNOWN, Batch, Changes, KnownRow
from postroom.projections.cut import PLACES
from postroom.projections.fold import MESSAGES, derive
from postroom.projections.models import messages
from postroom.projections.models.backlog import PROJECTION as BACKLOG
from postroom.projections.models.messages import Parked
from postroom.projections.parking import parking
from postroom.projections.projection import (
    Column,
    MessageProjection,
    Projection,
    merge_rows,
    projections,
)
from postroom.projections.search_text import search_tables

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
"""Every topic there is."""

_SQL = statements("postroom.projections", "sql/apply.sql")
_decode_models = msgspec.json.Decoder(dict[str, int]).decode


class _Plan(msgspec.Struct, frozen=True):
    """What following has to know of a version's plan; see `postroom.projections.sinks.Plan`."""

    bodies: str = "{}"
    archive: str | None = None


class Moved(Exception):
    """The version or its cursor is not what the batch began at: somebody else was quicker."""


class SqlTables(ABC):
    """Apply batches to SQL tables; see `Tables`.

    Arguments:
        where: the read models, as they may be shown.
    """

    min, max = "min", "max"
    """What the lesser and the greater of two values is called."""

    def __init__(self, where: str) -> None:
        self.where = where

    @abstractmethod
    def _table(self, name: str) -> str:
        """Return how a table is written in a statement."""

    @abstractmethod
    def _transaction(self) -> AbstractContextManager[None]:
        """Change the read models in one transaction; raise Unavailable for what the database says."""

    @abstractmethod
    def _read(self, statement: str) -> list[tuple[Any, ...]]:
        """Return the rows of a statement on the catalog."""

    @abstractmethod
    def _read_log(self, statement: str) -> list[tuple[Any, ...]]:
        """Return the rows of a statement on the log."""

    @abstractmethod
    def _write(self, statement: str, given: pl.DataFrame) -> None:
        """Run a statement on rows that are given, of which there is at least one."""

    @abstractmethod
    def _fetch(self, statement: str, given: pl.DataFrame) -> list[tuple[Any, ...]]:
        """Return what a statement selects by rows that are given, of which there is at least one."""

    @abstractmethod
    def _hold(self, version: Version) -> None:
        """Keep a version as it is until the transaction ends; raise Moved when it is no longer as it was."""

    @abstractmethod
    def _index_text(self, number: int, texts: pl.DataFrame) -> None:
        """Have texts found that were inserted."""

    @abstractmethod
    def _unindex_text(self, number: int, ids: pl.DataFrame) -> None:
        """Have texts no longer found that are about to be removed."""

    def active(self) -> Version | None:
        """Return the version that is served; see `Tables.active`."""
        rows = self._read(self._sql("active"))
        return _version(rows[0]) if rows else None

    def version(self, number: int) -> Version:
        """Return a version; see `Tables.version`."""
        rows = self._read(self._sql("version", version=number))
        if not rows:
            raise NotFound(
                f"The read models {self.where} have no version {number}; see `postroom project status`."
            )
        return _version(rows[0])

    def cursors(self, version: Version) -> dict[int, Cursor]:
        """Return how far a version has come; see `Tables.cursors`."""
        rows = self._read(self._sql("cursors", version=version.number))
        return {id_: Cursor(position, at) for id_, position, at in rows}

    def heads(self, covered: dict[int, Cursor]) -> list[Head]:
        """Return where the mailbox logs end; see `Tables.heads`."""
        known = self._read_log(self._sql("mailboxes"))
        if not known:
            return []
        covered_by = {id_: covered[id_].position if id_ in covered else 0 for id_, _, _ in known}
        each = (
            self._sql("head", id=id_, covered=id_ * PLACES + position, end=(id_ + 1) * PLACES)
            for id_, position in covered_by.items()
        )
        ends = dict(self._read_log(" UNION ALL ".join(statement.rstrip(";") for statement in each)))
        return [
            Head(id_, name, removed + 1, covered_by[id_] if ends[id_] is None else ends[id_] % PLACES)
            for id_, name, removed in known
        ]

    def records(self, mailbox: int, first: int, last: int) -> list[Record]:
        """Return records of a mailbox; see `Tables.records`."""
        base = mailbox * PLACES
        columns = ", ".join(("place", *Record._fields[1:]))
        rows = self._read_log(self._sql("records", columns=columns, first=base + first, last=base + last))
        return [Record(place - base, *values) for place, *values in rows]

    def apply(self, version: Version, steps: Sequence[Step], batch: Batch) -> bool:
        """Apply a batch; see `Tables.apply`."""
        try:
            with self._transaction():
                self._hold(version)
                self._move(version, steps)
                changes = batch.changes(self._known(version, steps, batch.unsent))
                self._insert_sent(version, changes.sent)
                self._write_some("change", changes.changed, mailbox=_of(version, MESSAGES))
                self._apply_derived(version, changes)
                for name, rows in changes.events.items():
                    self._merge(_of(version, name), projections()[name], rows)
                self._park(version, steps, changes.parked)
        except Moved:
            return False
        return True

    def remove(self, version: Version, before: int, after: int) -> bool:
        """Remove messages that retention removed; see `Tables.remove`."""
        try:
            with self._transaction():
                self._hold(version)
                names = ", ".join(f"message.{name}" for name in KNOWN)
                wanted = self._sql(
                    "removed", columns=names, mailbox=_of(version, MESSAGES), before=before, after=after
                )
                rows = self._read(wanted)
                if rows:
                    self._remove(version, rows)
        except Moved:
            return False
        return True

    def _remove(self, version: Version, rows: Sequence[KnownRow]) -> None:
        types = {name: messages.PROJECTION.schema[name] for name in KNOWN}
        gone = pl.DataFrame(rows, types, orient="row").with_columns(envelope_blob=pl.lit(b""))
        number, ids = version.models[MESSAGES], gone.select("id")
        self._unindex_text(number, ids)
        headers = pl.DataFrame(search_tables(gone, version.bodies)["header"])
        self._delete(f"header_v{number}", headers.columns, headers)
        for table in (f"text_v{number}", _of(version, MESSAGES)):
            self._delete(table, ("id",), ids)
        topics = gone.group_by("topic").agg(pl.len().cast(pl.Int64).alias("messages"))
        self._write_some("recount", topics, table=f"topic_v{number}", mailbox=_of(version, MESSAGES))
        nothing = {"table": f"topic_v{number}", "key": "topic", "is_nothing_left": "messages = 0"}
        self._write_some("delete_nothing_left", topics.select("topic"), **nothing)
        models = {name: projections()[name] for name in version.models}
        none = {name: pl.DataFrame(schema=each.schema) for name, each in models.items()}
        before = {name: merge_rows(models[name], each) for name, each in derive(gone, models).items()}
        empty = none[MESSAGES]
        self._apply_derived(
            version, Changes(empty, empty, before, {name: none[name] for name in before}, {}, ())
        )

    def _move(self, version: Version, steps: Sequence[Step]) -> None:
        moves = [
            (version.number, step.cut.id, step.cut.name, step.begins.position, step.cut.last, step.cut.at)
            for step in steps
        ]
        names = ("version", "mailbox_id", "mailbox", "expected", "position", "at")
        given = _given(moves, names)
        self._write_some("begin_cursors", given.filter(pl.col("expected") == 0))
        if len(self._fetch_some("move_cursors", given)) < len(steps):
            raise Moved

    def _known(self, version: Version, steps: Sequence[Step], unsent: pl.DataFrame) -> list[KnownRow]:
        """Return the messages that the batch goes on about, and those that are delayed no longer."""
        names = {"columns": ", ".join(f"message.{name}" for name in KNOWN), "mailbox": _of(version, MESSAGES)}
        now = _given([(step.cut.name, step.cut.at) for step in steps], ("mailbox", "now"))
        found = self._fetch_some("known", unsent, **names) + self._fetch_some("due", now, **names)
        # An id sent again, once retention had forgotten it, names several messages: the latest comes last.
        return sorted({row[0]: row for row in found}.values(), key=itemgetter(0))

    def _insert_sent(self, version: Version, sent: pl.DataFrame) -> None:
        if not sent.height:
            return
        self._insert(_of(version, MESSAGES), sent)
        number = version.models[MESSAGES]
        searched = search_tables(sent, version.bodies)
        for name, rows in searched.items():
            self._insert(f"{name}_v{number}", pl.DataFrame(rows))
        self._index_text(number, pl.DataFrame(searched["text"]))
        timestamp = pl.col("timestamp")
        topics = sent.group_by("topic").agg(
            pl.len().cast(pl.Int64).alias("messages"),
            timestamp.min().alias("first_timestamp"),
            timestamp.max().alias("last_timestamp"),
        )
        self._merge(f"topic_v{number}", TOPIC, topics)

    def _apply_derived(self, version: Version, changes: Changes) -> None:
        for name, after in changes.after.items():
            projection, before = projections()[name], changes.before[name]
            assert isinstance(projection, MessageProjection)
            if projection.key == ("id",):
                self._delete(_of(version, name), ("id",), before)
                self._insert(_of(version, name), after)
            elif projection is BACKLOG or all(each.merge in ("key", "sum") for each in projection.columns):
                self._add(version, projection, before, after)
            else:
                self._derive_again(version, projection, before, after)

    def _add(
        self, version: Version, projection: Projection, before: pl.DataFrame, after: pl.DataFrame
    ) -> None:
        """Change counts by what was added and what was taken away."""
        sums = [each.name for each in projection.columns if each.merge == "sum"]
        counts = [*projection.key, *sums]
        negated = before.select(*projection.key, *(-pl.col(name) for name in sums))
        changed = pl.concat([after.select(counts), negated]).group_by(projection.key).agg(pl.col(sums).sum())
        table = _of(version, projection.name)
        columns = tuple(each for each in projection.columns if each.name in counts)
        self._merge(table, Projection(projection.name, columns), changed.select(counts))
        nothing = " AND ".join(f"{name} = 0" for name in sums)
        keys = changed.select(projection.key)
        key = ", ".join(projection.key)
        self._write_some("delete_nothing_left", keys, table=table, key=key, is_nothing_left=nothing)
        if projection is BACKLOG:
            self._write_some("oldest", keys, backlog=table, mailbox=_of(version, MESSAGES))

    def _derive_again(
        self, version: Version, projection: MessageProjection, before: pl.DataFrame, after: pl.DataFrame
    ) -> None:
        """Make the rows anew whose messages changed: the second least, say, is not known from the rows.

        Where the key is of the messages themselves, theirs are looked up; otherwise all unsettled ones are.
        """
        keys = pl.concat([before.select(projection.key), after.select(projection.key)]).unique()
        if not keys.height:
            return
        is_of_messages = set(projection.key) <= set(KNOWN)
        names = [*KNOWN, "envelope_blob"]
        rows = self._fetch_some(
            "unsettled",
            keys if is_of_messages else keys.head(1),
            columns=", ".join(f"message.{name}" for name in names),
            mailbox=_of(version, MESSAGES),
            is_given=" AND ".join(f"message.{name} = given.{name}" for name in projection.key)
            if is_of_messages
            else "true",
        )
        types = {name: messages.PROJECTION.schema[name] for name in names}
        self._delete(_of(version, projection.name), projection.key, keys)
        # What can't be folded was parked when it came.
        wanted = parking({projection.name: projection}, [])
        derived = derive(pl.DataFrame(rows, types, orient="row"), wanted)[projection.name]
        self._insert(_of(version, projection.name), derived.join(keys, on=projection.key, how="semi"))

    def _park(self, version: Version, steps: Sequence[Step], parked: Sequence[Parked]) -> None:
        mailboxes = {step.cut.id: step.cut.name for step in steps}
        now = time.time_ns() // 1_000
        rows = [
            (
                version.number,
                each.place,
                mailboxes[each.place // PLACES],
                each.place % PLACES,
                each.type,
                each.error,
                now,
            )
            for each in {each.place: each for each in reversed(parked)}.values()
        ]
        names = ("version", "place", "mailbox", "position", "type", "error", "parked_at")
        if rows:
            self._write_some("park", _given(rows, names))

    def _insert(self, table: str, rows: pl.DataFrame) -> None:
        self._write_some("insert", rows, table=table, columns=", ".join(rows.columns))

    def _delete(self, table: str, key: Sequence[str], rows: pl.DataFrame) -> None:
        self._write_some("delete", rows.select(key), table=table, key=", ".join(key))

    def _merge(self, table: str, projection: Projection, rows: pl.DataFrame) -> None:
        merged = ", ".join(self._merged(each) for each in projection.columns if each.merge != "key")
        self._write_some(
            "merge",
            rows,
            table=table,
            columns=", ".join(rows.columns),
            key=", ".join(projection.key),
            merged=merged,
        )

    def _merged(self, column: Column) -> str:
        old, new = f"merged.{column.name}", f"excluded.{column.name}"
        if column.merge == "sum":
            return f"{column.name} = {old} + {new}"
        if column.merge == "replace":
            return f"{column.name} = {new}"
        function = self.min if column.merge == "min" else self.max
        return f"{column.name} = {function}(coalesce({old}, {new}), coalesce({new}, {old}))"

    def _write_some(self, name: str, given: pl.DataFrame, **names: object) -> None:
        if given.height:
            self._write(self._sql(name, **names), given)

    def _fetch_some(self, name: str, given: pl.DataFrame, **names: object) -> list[tuple[Any, ...]]:
        return self._fetch(self._sql(name, **names), given) if given.height else []

    def _sql(self, name: str, **names: object) -> str:
        """Return a statement with its names filled in; `{rows}` stays, to be filled in when it is run."""
        tables = {each: self._table(each) for each in (*CATALOG, *LOG)}
        values = {
            each: self._table(str(value)) if each in ("table", "mailbox", "backlog") else value
            for each, value in names.items()
        }
        return _SQL[name].format(**tables, **values, rows="{rows}")


def _of(version: Version, model: str) -> str:
    return f"{model}_v{version.models[model]}"


def _given(rows: Sequence[tuple[Any, ...]], names: Sequence[str]) -> pl.DataFrame:
    return pl.DataFrame(rows, names, orient="row", infer_schema_length=None)


def _version(row: tuple[Any, ...]) -> Version:
    number, status, models, plan = row
    own = {} if models is None else _decode_models(models)  # an earlier release's have other columns
    built = msgspec.json.decode(plan, type=_Plan) if plan else _Plan()
    return Version(number, status, own, msgspec.json.decode(built.bodies, type=BodyRules), built.archive)
