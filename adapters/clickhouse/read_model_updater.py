"""The read model updater port over a database of ClickHouse (ADR 0094).

The rows of a batch are inserted with a new revision, which the cursors, inserted last, make visible. A server
may run a statement long after the client stopped waiting for it, even after the batch was applied again.
"""

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from threading import Event

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
from postroom.adapters.clickhouse.revision import Revision, Stopped
from postroom.adapters.sql.statements import statements
from postroom.adapters.sql.tables import to_cursors, to_version
from postroom.domain.commit import POSITIONS_PER_MAILBOX
from postroom.domain.errors import NotFound, Unavailable
from postroom.projections.fold import MESSAGES, derive
from postroom.projections.incremental import START, Batch, Changes, Cursor, Head, Step, Version
from postroom.projections.plan import FORMAT
from postroom.projections.ports.read_model_store import FollowedLog, ReadModelUpdater
from postroom.projections.projection import load_projections

SNAPSHOT_SECONDS = 600
"""How long a query may read a revision after it was replaced."""
MIN_REVISIONS = 100
"""Minimum number of revisions that one compaction removes."""


def compact(database: ClickHouseDatabase) -> None:
    """Remove the rows that ended before `SNAPSHOT_SECONDS`, and those that never became visible.

    If a process is killed in between, the next compaction removes its leftovers.
    """
    cursor, before = database.table(CURSOR), time.time_ns() - SNAPSHOT_SECONDS * 1_000_000_000
    with database.client() as client:
        query = SQL["compactable"].format(cursor=cursor, before=before)
        ((last, revisions),) = client.query(query).result_rows
        if revisions < MIN_REVISIONS:
            return
        never_visible = f"since <= {last} AND NOT {database.visible('since')}"
        for name in database.tables():
            if name.startswith(STAGED) and int(name.removeprefix(STAGED)) <= last:
                database.command("drop", table=database.table(name))  # left by a killed process
            projection = load_projections().get(name.rpartition("_v")[0])
            if projection is None or name.endswith(ended("")):
                continue
            table, ended_rows = database.table(name), database.table(ended(name))
            key = ", ".join(map(quoted, projection.key))
            rows = f"SELECT {key}, since FROM {ended_rows} WHERE {database.visible('until', last)}"
            database.command("delete", table=table, condition=never_visible)
            database.command("delete", table=table, condition=f"({key}, since) IN ({rows})")
            database.command("delete", table=ended_rows, condition=f"until <= {last}")
        database.command("delete", table=database.table(PARKED), condition=never_visible)
        client.insert(CURSOR, [[0, last]], ["version", "revision"], database=database.name)
        newest = f"SELECT version, mailbox_id, max(revision) FROM {cursor} GROUP BY version, mailbox_id"
        condition = f"revision <= {last} AND (version, mailbox_id, revision) NOT IN ({newest})"
        database.command("delete", table=cursor, condition=condition)


COMPACT_SECONDS = 600.0
"""Pause between compactions."""

_SQL = statements("postroom.adapters.sql", "update.sql", format=FORMAT)
_CATALOG = {"projection": "projection", "projection_cursor": "projection_cursor"}


class ClickHouseReadModelUpdater(ReadModelUpdater):
    """An updater of a database of ClickHouse; see `ReadModelUpdater`.

    The database is opened for each batch: one process at a time can have a folder of chdb open.

    Arguments:
        log: the logs of the store, with the lock of the follower.
    """

    stores_envelopes = True

    def __init__(self, database: ClickHouseDatabase, log: FollowedLog) -> None:
        self.where = database.where
        self.rebuild_command = f"postroom views rebuild --into {database.address}"
        self._database = database
        self._log = log
        self._compacted_at = -COMPACT_SECONDS
        self._has_chains = False

    def close(self) -> None:
        self._log.close()

    def leader_lock(self, target: str = "") -> AbstractContextManager[bool]:
        return self._log.leader_lock(target or self.where)

    def heads(self, cursors: dict[int, Cursor]) -> list[Head]:
        return self._log.heads(cursors)

    def wait_for_commit(self, seconds: float) -> bool | None:
        """Wait for a commit in the store; see `FollowedLog.wait_for_commit`."""
        return self._log.wait_for_commit(seconds)

    def active(self) -> Version | None:
        with self._catalog() as (catalog, _):
            return _version(catalog, "active") if catalog is not None else None

    def version(self, number: int) -> Version:
        with self._catalog() as (catalog, _):
            version = _version(catalog, "version", number) if catalog is not None else None
        if version is None:
            raise NotFound(
                f"The read models {self.where} have no version {number}; see `postroom views status`."
            )
        return version

    def cursors(self, version: Version) -> dict[int, Cursor]:
        with self._catalog() as (catalog, _):
            return _cursors(catalog, version) if catalog is not None else {}

    def apply(self, version: Version, steps: Sequence[Step], batch: Batch, stop: Event | None = None) -> bool:
        starts = {step.extent.id: step.start.position for step in steps}
        with self._revision(version, starts, stop) as revision:
            if revision is None:
                return False
            try:
                changes = batch.changes(revision.affected_messages(steps, batch.earlier_messages))
                revision.change_messages(changes)
                revision.apply_derived(changes)
                for name, rows in changes.events.items():
                    revision.merge(load_projections()[name], rows)
                revision.park(changes.parked, [step.extent for step in steps])
                return self._commit(revision, starts, {step.extent.id: step.end for step in steps})
            except Stopped:
                return False

    def remove(self, version: Version, before: int, after: int) -> bool:
        with self._revision(version, {}) as revision:
            if revision is None:
                return False
            rows = revision.messages_between(before, after)
            if not rows.height:
                return True
            models = {name: load_projections()[name] for name in version.models}
            none = {name: pl.DataFrame(schema=each.schema) for name, each in models.items()}
            derived = derive(rows, models)
            revision.replace(models[MESSAGES], rows.select("id"), none[MESSAGES])
            revision.apply_derived(
                Changes(
                    none[MESSAGES], none[MESSAGES], derived, {name: none[name] for name in derived}, {}, ()
                )
            )
            id_ = before // POSITIONS_PER_MAILBOX
            cursor = self.cursors(version).get(id_, START)._replace(mailbox=rows["mailbox"][0])
            if not self._commit(revision, {}, {id_: cursor}):
                return False
            revision.delete_search_rows(before, after)
            return True

    @contextmanager
    def _catalog(self) -> Iterator[tuple[sqlite3.Connection | None, int]]:
        """Yield the catalog, or None without a database, and the visible revision."""
        if not self._database.may_exist():
            yield None, 0
            return
        with self._database.client() as client:
            catalog = self._database.read_catalog(client, self._database.tables())
            with closing(catalog.connection):
                yield catalog.connection, catalog.revision

    @contextmanager
    def _revision(
        self, version: Version, starts: dict[int, int], stop: Event | None = None
    ) -> Iterator[Revision | None]:
        """Yield the next revision; None if the version or its cursors have changed."""
        with self._database.client():
            current = self._current_revision(version, starts)
            if current is None:
                yield None
                return
            # Unique even if another process lost its lock and still writes: its revision never becomes
            # visible.
            revision = Revision(self._database, version, current, max(current + 1, time.time_ns()), stop)
            try:
                yield revision
            except Unavailable:
                raise  # if the server is down, compaction drops the temporary table
            except BaseException:
                revision.close()
                raise
            revision.close()

    def _current_revision(self, version: Version, starts: dict[int, int]) -> int | None:
        with self._catalog() as (catalog, revision):
            if catalog is None:
                return None
            stored, cursors = _version(catalog, "version", version.number), _cursors(catalog, version)
        is_same = stored is not None and stored.status == version.status
        positions = {id_: cursors.get(id_, START).position for id_ in starts}
        return revision if is_same and positions == starts else None

    def _commit(self, revision: Revision, starts: dict[int, int], moved: dict[int, Cursor]) -> bool:
        """Make a revision visible, unless another process has made one visible in the meantime."""
        if not self._has_chains:
            self._database.command("add_chain", table=self._database.table(CURSOR))
            self._has_chains = True
        if self._current_revision(revision.version, starts) != revision.before:
            return False
        if not revision.commit(moved):
            return False
        if time.monotonic() - self._compacted_at >= COMPACT_SECONDS:
            compact(self._database)
            self._compacted_at = time.monotonic()
        return True


def _version(catalog: sqlite3.Connection, statement: str, number: int = 0) -> Version | None:
    row = catalog.execute(_SQL[statement].format(**_CATALOG, version=number)).fetchone()
    return None if row is None else to_version(row)


def _cursors(catalog: sqlite3.Connection, version: Version) -> dict[int, Cursor]:
    return to_cursors(catalog.execute(_SQL["cursors"].format(**_CATALOG, version=version.number)))
