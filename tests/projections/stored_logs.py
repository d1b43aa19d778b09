"""Logs to read, in every kind of store, beside the records that were written to them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from msgspec.structs import replace

from postroom.adapters.compose.store import open_log_reader, open_store
from postroom.adapters.parquet.log_archive import ParquetLogArchive
from postroom.adapters.postgres.event_log import PostgresEventLog
from postroom.adapters.postgres.url import is_url
from postroom.adapters.sql.log_reader import Driver
from postroom.application.ports.event_log import EventLog
from postroom.domain.commit import GENESIS
from postroom.domain.message import Headers
from postroom.domain.record import Event, Record
from postroom.projections.log_reader import LogExtent, LogReader
from tests.conformance.records import append, created, life, received, sent

ONE, TWO, LATER = "acme@one", "acme@two", "zulu@later"
TOPICS = ("orders", "orders.eu", "ordersX", "Orders", "ü.x", "it's", "%_", "a\x00b", "a\x1ab", "\x1a0")
KINDS = (
    *("sqlite", "sqlite python", "postgres", "postgres python", "jetstream"),
    *("archive sqlite", "archive postgres", "archive jetstream"),
)
ARCHIVED = {ONE: 22, TWO: 0}
"""Through which position a log of a kind with an archive is archived and gone from the store."""


@dataclass(frozen=True)
class Kept:
    """A log, what it holds, and how to write to it."""

    log: LogReader
    records: dict[str, list[Record]]
    write: Callable[[str, Sequence[Event]], None]
    options: dict[str, str]
    """Those of the data source."""

    def extent(self, mailbox: str = ONE) -> LogExtent:
        """Return the present extent of a mailbox's log."""
        return next(extent for extent in self.log.extents() if extent.name == mailbox)

    def everything(self) -> list[tuple[LogExtent, Record]]:
        """Return all records, mailbox by mailbox."""
        return [(extent, record) for extent in self.log.extents() for record in self.records[extent.name]]


def past(mailbox: str, count: int, start: int = 1) -> list[Event]:
    """Return events with all sorts of values, whose time goes on, about messages from number `start` on."""
    events: list[Event] = [created(mailbox)] if start == 1 else []
    for number in range(start, start + count):
        at = 1_000 + 10 * number
        if number % 3 == 0:
            events += life(number, at=at)
            continue
        headers = Headers(number, principal=(None, "me", "o'hara", "\x00")[number % 4])
        message = sent(10**6 + number, at=at, headers=headers)
        events += [replace(message, topic=TOPICS[number % len(TOPICS)]), received(10**6 + number, at=at)]
    return events


def open_event_log(store: str, mailbox: str) -> EventLog:
    """Open a mailbox's log for writing, and make it where it is missing."""
    if is_url(store):
        return PostgresEventLog(store, mailbox, durability="relaxed", partition_positions=16)
    return open_store(store).event_log(mailbox, durability="relaxed")


def keep(kind: str, store: str, folder: Path | str, stack: ExitStack, count: int = 20) -> Kept:
    """Fill a store with two logs."""
    logs: dict[str, EventLog] = {}
    records: dict[str, list[Record]] = {}

    def write(mailbox: str, events: Sequence[Event]) -> None:
        if mailbox not in logs:
            logs[mailbox] = stack.enter_context(closing(open_event_log(store, mailbox)))
        records.setdefault(mailbox, []).extend(append(logs[mailbox], events))

    write(ONE, past(ONE, count))
    write(TWO, past(TWO, 3))
    driver: Driver = "python" if "python" in kind else "adbc"
    if "archive" not in kind:
        return Kept(open_store(store).log_reader(driver), records, write, {"path": store, "driver": driver})
    move(logs[ONE], ParquetLogArchive(folder), records[ONE], ARCHIVED[ONE])
    options = {"path": store, "driver": driver, "archive": str(folder)}
    return Kept(open_log_reader(open_store(store), str(folder), driver), records, write, options)


def move(log: EventLog, archive: ParquetLogArchive, records: Sequence[Record], through: int) -> None:
    """Archive and remove the commits that end at or before a position, as retention does."""
    first = log.first_position() or 1
    before = GENESIS if first == 1 else records[first - 2].chain
    commits = [commit for commit in log.commits() if commit.last <= through]
    if commits:
        archive.store(log.mailbox, commits, before)
    log.truncate(through, 1_000_000)


def rows(batches: Iterator[pa.RecordBatch]) -> list[dict[str, Any]]:
    """Return what was read, row by row."""
    return [row for batch in batches for row in batch.to_pylist()]
