"""Logs: how the event log of a store is read, whichever database holds it."""

from collections.abc import Iterable, Iterator
from typing import Literal, Protocol

import pyarrow as pa

from postroom.adapters.postgres.url import is_url
from postroom.projections.cut import MailboxCut

Driver = Literal["adbc", "python"]
"""ADBC, or the database's ordinary Python driver where ADBC is not available."""


class Log(Protocol):
    """The event log of one store; it is sent to Spark's tasks, so it holds no connection.

    Arguments:
        table: what the log is called in SQL.
        event: SQL of an event's type without its schema version.
    """

    table: str
    event: str

    def starts_with(self, prefix: str) -> str:
        """Return the SQL condition that `type` begins with a prefix."""

    def cuts(self) -> list[MailboxCut]:
        """Return the present extent of every mailbox log; empty ones are left out.

        Raises: NotFound when there is no such store, Unavailable when it can't be read.
        """

    def batches(self, statements: Iterable[str], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the rows of SELECT statements, each of which is a transaction by itself."""


def open_log(store: str, driver: Driver = "adbc") -> Log:
    """Return the log of a store.

    Arguments:
        store: path of a SQLite store, or URL of a PostgreSQL one.
        driver: what to read with.
    """
    if is_url(store):
        from postroom.projections.logs.postgres import PostgresLog

        return PostgresLog(store, driver)
    from postroom.projections.logs.sqlite import SqliteLog

    return SqliteLog(store, driver)


def take_cuts(store: str) -> list[MailboxCut]:
    """Return the present extent of every mailbox log of a store; see `Log.cuts`."""
    return open_log(store).cuts()
