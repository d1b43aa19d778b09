"""Logs: how the event log of a store is read, whichever database holds it, its archived past included."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from postroom.adapters.postgres.url import is_url
from postroom.projections.cut import MailboxCut, Range
from postroom.projections.logs.conditions import Condition
from postroom.projections.logs.reading import Driver


class Log(Protocol):
    """The event log of one store; it is sent to Spark's tasks, so it holds no connection."""

    def mailboxes(self) -> dict[str, int]:
        """Return the ids of all mailboxes by their names, in the order of the ids.

        Raises: NotFound when there is no such store, Unavailable when it can't be read.
        """

    def heads(self) -> dict[str, int]:
        """Return the last position of every mailbox log by the mailbox's name; empty ones are left out.

        Raises: NotFound when there is no such store, Unavailable when it can't be read.
        """

    def cuts(self, through: Mapping[str, int] | None = None) -> list[MailboxCut]:
        """Return the extent of every mailbox log, in the order of the ids; empty ones are left out.

        Arguments:
            through: the last position wanted, by mailbox, the others being left out; None means all there is.

        Raises: NotFound when there is no such store, Unavailable when it can't be read.
        """

    def read(
        self, ranges: Iterable[Range], columns: Sequence[str], where: Sequence[Condition] = ()
    ) -> Iterator[pa.RecordBatch]:
        """Yield the records of ranges in the order of their positions.

        Each read transaction covers at most `POSITIONS_PER_READ` positions and ends before the next begins.

        Arguments:
            columns: which of `COLUMNS`; no others are read from the disk or sent.
            where: conditions on columns that are `STORED`, but for `place`; all of them hold.
        """


def open_log(store: str, driver: Driver = "auto", archive: str | Path | None = None) -> Log:
    """Return the log of a store.

    Arguments:
        store: path of a SQLite store, or URL of a PostgreSQL one.
        driver: what to read with, where there is a choice.
        archive: folder in which retention stored what it removed, to be read as the log's beginning.
    """
    log: Log
    if is_url(store):
        from postroom.projections.logs.postgres import PostgresLog

        log = PostgresLog(store, driver)
    else:
        from postroom.projections.logs.sqlite import SqliteLog

        log = SqliteLog(store, driver)
    if archive is None:
        return log
    from postroom.projections.logs.archived import ArchivedLog

    return ArchivedLog(log, str(archive))


def take_cuts(store: str, archive: str | Path | None = None) -> list[MailboxCut]:
    """Return the present extent of every mailbox log of a store; see `Log.cuts`."""
    return open_log(store, archive=archive).cuts()


def read_range(
    log: Log,
    cut: MailboxCut,
    first: int,
    last: int,
    columns: Sequence[str],
    where: Sequence[Condition] = (),
) -> Iterator[pa.RecordBatch]:
    """Yield the records of one mailbox at positions `first` to `last`, in their order; see `Log.read`."""
    return log.read([Range(cut, first, last)], columns, where)
