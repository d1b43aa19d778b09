"""Removal of rows that ended a while ago (ADR 0094)."""

import time

from postroom.adapters.clickhouse.database import (
    CURSOR,
    PARKED,
    SQL,
    STAGED,
    ClickHouseDatabase,
    ended,
    quoted,
)
from postroom.projections.projection import load_projections

SNAPSHOT_SECONDS = 600
"""How long a query may read a revision after it was replaced."""
MIN_REVISIONS = 100
"""Number of revisions that are compacted at once, at least."""


def compact(database: ClickHouseDatabase) -> None:
    """Remove the rows that ended before `SNAPSHOT_SECONDS`, and those that never became visible.

    A process that is killed in between leaves what the next compaction removes.
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
                database.command("drop", table=database.table(name))  # of a process that was killed
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
