"""The backlog of contexts: what waits in the outbox and the inbox of each, for whoever reads the read models.

It is counted from the tables of outbox and inbox, which have partial indexes of what is unsettled, and not
folded from their events: those have no order in which none would be missed that commits late, and an event
that a service inserts by plain SQL has no history before a relay takes it.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from threading import Event, Thread

import msgspec

from postroom.adapters.postgres.database import connect, unavailable
from postroom.adapters.postgres.messaging.backlog import count_backlog
from postroom.adapters.postgres.messaging.tables import Tables
from postroom.adapters.postgres.messaging.transaction import for_psycopg
from postroom.adapters.postgres.url import is_url
from postroom.adapters.sql.statements import statements
from postroom.application.ports.read_models import ContextBacklog, views_path
from postroom.application.telemetry import logger
from postroom.domain.errors import PostroomError, Unavailable
from postroom.projections.sinks.sqlite import connect_views

EVERY_SECONDS = 5.0
_KEEP = statements("postroom.adapters.sql", "contexts.sql")["keep"]


def refresh_contexts(
    store: str, database: str, context: str, tables: Tables | None = None
) -> Sequence[ContextBacklog]:
    """Count what waits in a context's outbox and inbox, and keep it beside the read models of a store.

    Several processes may do so at once: the latest count stays.

    Arguments:
        store: path of a SQLite store, or URL of a PostgreSQL one.
        database: URL of the service's own database.

    Returns: what was counted.
    Raises: Unavailable when one of the two databases can't be used.
    """
    counted = count_backlog(database, context, tables or Tables())
    rows = [msgspec.structs.asdict(each) for each in counted]
    if is_url(store):
        statement = for_psycopg(_KEEP.format(schema="postroom."))
        with connect(store, "postroom contexts") as connection, unavailable(store), connection.transaction():
            connection.cursor().executemany(statement.encode(), rows)
        return counted
    path = views_path(store)
    try:
        with closing(connect_views(path)) as file:
            file.execute("BEGIN IMMEDIATE")
            file.executemany(_KEEP.format(schema=""), rows)
            file.execute("COMMIT")
    except sqlite3.Error as error:
        raise Unavailable(f"The read models {path} can't be written: {error}. Check the path.") from error
    return counted


@contextmanager
def contexts_refreshed(
    store: str,
    database: str,
    context: str,
    tables: Tables | None = None,
    *,
    every_seconds: float = EVERY_SECONDS,
) -> Iterator[None]:
    """Refresh the backlog of a context again and again, in a thread, while the context manager lasts.

    A failure is noted and tried again the next time: whoever follows the log is not held up by it.
    """
    stop = Event()

    def keep_refreshing() -> None:
        while True:
            try:
                refresh_contexts(store, database, context, tables)
            except PostroomError as error:
                logger().warning("contexts.not_refreshed", context=context, error=str(error))
            if stop.wait(every_seconds):
                return

    thread = Thread(target=keep_refreshing, name="postroom contexts", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
