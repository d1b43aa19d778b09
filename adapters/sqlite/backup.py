"""Reading and writing the SQLite file of a backup."""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import starmap
from pathlib import Path

from msgspec.structs import astuple

from postroom.adapters.sql.statements import statements
from postroom.adapters.sqlite.database import connect_reader, create_file, open_file
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.adapters.sqlite.store_file import create_tables, has_file
from postroom.application.mailbox.codec import compress
from postroom.application.ports.backup import MailboxHead, RecordedRow, StoreLoader, StoreSnapshot
from postroom.application.ports.event_log import Seal, StoredSnapshot
from postroom.domain.commit import GENESIS, POSITIONS_PER_MAILBOX, Commit, IndexEntry, LastEvent
from postroom.domain.errors import NotFound, Unavailable

STEP_PAGES = 2_000
"""Pages that are copied between two calls of `progress`, 8 MB."""
OUTBOX = "outbox_messages"
STORE_TABLES = ("mailbox_names", "log", "log_index", "snapshot", "seal", "store_format", OUTBOX)
"""Tables of Postroom; a file may have others of its user."""
_SQL = statements("postroom.adapters.sqlite", "backup.sql")
_CREATE_OUTBOX = statements("postroom.adapters.sql", "mailbox_outbox.sql")["create_in_sqlite"]


def copy_file(source: Path, target: Path, progress: Callable[[int, int], None] = lambda *_: None) -> None:
    """Copy a store as of one moment while others read and write it, into a file that does not exist.

    One read transaction covers the whole copy. Without it, every commit of another process would restart it;
    with it, writers are not blocked, but the write-ahead log grows meanwhile.

    Arguments:
        progress: called with the number of pages copied, and of all pages.

    Raises: NotFound when there is no store, Unavailable when it can't be copied.
    """
    if not has_file(source):
        raise NotFound(f"There is no store at {source}; name an existing file.")
    try:
        create_file(target)
        with closing(connect_reader(source)) as reader, closing(open_file(target, "rw")) as copy:
            reader.execute("BEGIN")
            if reader.execute("SELECT 1 FROM sqlite_schema WHERE name = 'mailbox_names'").fetchone() is None:
                raise NotFound(f"The file {source} has no mailboxes; name a file that Postroom created.")
            copy.execute("PRAGMA synchronous = OFF")  # the whole file is synced at the end
            reader.backup(
                copy, pages=STEP_PAGES, progress=lambda _, rest, total: progress(total - rest, total)
            )
            copy.execute("PRAGMA journal_mode = DELETE")  # makes it one file, also for read-only media
    except sqlite3.Error as error:
        raise Unavailable(
            f"The store {source} can't be copied to {target}: {error}. Check both disks and their space."
        ) from error


class SqliteStoreSnapshot(StoreSnapshot):
    """The content of a store file that nobody writes; see `StoreSnapshot`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mailboxes(self) -> list[str]:
        """Return the names of all logs, sorted."""
        with self._reading() as reader:
            return [name for (name,) in reader.execute(_SQL["mailboxes"])]

    def heads(self) -> list[MailboxHead]:
        return [self._head(name) for name in self.mailboxes()]

    def tables(self) -> list[str]:
        """Return the names of all tables, the user's included."""
        with self._reading() as reader:
            return [name for (name,) in reader.execute(_SQL["tables"])]

    def log(self, mailbox: str) -> SqliteEventLog:
        """Open a log for reading."""
        return SqliteEventLog(self.path, mailbox, create_missing=False)

    def commits(self, mailbox: str) -> Iterator[Commit]:
        with closing(self.log(mailbox)) as log:
            yield from log.commits()

    def entries(self, mailbox: str) -> Iterator[IndexEntry]:
        with self._reading() as reader:
            yield from starmap(IndexEntry, reader.execute(_SQL["entries"], (mailbox,)))

    def last_events(self, mailbox: str) -> Iterator[LastEvent]:
        """Yield the last events of messages that the index has, in the order of their positions."""
        with self._reading() as reader:
            yield from starmap(LastEvent, reader.execute(_SQL["last_events"], (mailbox,)))

    def snapshots(self, mailbox: str) -> list[StoredSnapshot]:
        with closing(self.log(mailbox)) as log:
            return list(log.snapshots())

    def seal(self, mailbox: str) -> Seal | None:
        with closing(self.log(mailbox)) as log:
            return log.read_seal()

    def recorded_messages(self) -> Iterator[RecordedRow]:
        if OUTBOX not in self.tables():
            return
        with self._reading() as reader:
            yield from map(RecordedRow._make, reader.execute(_SQL["recorded_messages"]))

    def _head(self, mailbox: str) -> MailboxHead:
        with closing(self.log(mailbox)) as log:
            head, first = log.head(), log.first_position()
        if head is None or first is None:
            return MailboxHead(mailbox, 0, 0, GENESIS.hex(), 0, 0)
        return MailboxHead(mailbox, first, head.position, head.chain.hex(), head.epoch, head.at)

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(connect_reader(self.path)) as reader:
                yield reader
        except sqlite3.Error as error:
            raise Unavailable(f"The file {self.path} can't be read: {error}.") from error


class SqliteStoreLoader(StoreLoader):
    """Loader of a new store file in one transaction; see `StoreLoader`."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._connection = connection
        self._ids: dict[str, int] = {}

    def add_mailbox(self, mailbox: str, first: int, last: int) -> None:
        with self._writing():
            ((id_,),) = self._connection.execute(_SQL["add_mailbox"], (mailbox, first - 1)).fetchall()
        self._ids[mailbox] = id_

    def append(self, mailbox: str, commits: Sequence[Commit]) -> None:
        base = self._base(mailbox)
        rows = [
            (base + first, *columns, compress(events), compress(envelopes))
            for first, *columns, events, envelopes, _, _ in commits
        ]
        with self._writing():
            self._connection.executemany(_SQL["add_commit"], rows)
        for commit in commits:
            self.add_entries(mailbox, commit.entries)

    def add_entries(self, mailbox: str, entries: Sequence[IndexEntry]) -> None:
        id_ = self._ids[mailbox]
        with self._writing():
            self._connection.executemany(_SQL["add_entry"], [(id_, *astuple(entry)) for entry in entries])

    def save_snapshots(self, mailbox: str, snapshots: Sequence[StoredSnapshot]) -> None:
        base = self._base(mailbox)
        with self._writing():
            rows = [(base + each.position, each.chain, each.state) for each in snapshots]
            self._connection.executemany(_SQL["add_snapshot"], rows)

    def save_seal(self, mailbox: str, seal: Seal) -> None:
        with self._writing():
            self._connection.execute(_SQL["add_seal"], (self._base(mailbox), *seal))

    def record_messages(self, rows: Sequence[RecordedRow]) -> None:
        with self._writing():
            self._connection.execute(_CREATE_OUTBOX)
            self._connection.executemany(_SQL["record_message"], rows)

    def _base(self, mailbox: str) -> int:
        return self._ids[mailbox] * POSITIONS_PER_MAILBOX

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise Unavailable(
                f"The file {self._path} can't be written: {error}. Check its disk and the space on it."
            ) from error


@contextmanager
def loading(path: Path) -> Iterator[SqliteStoreLoader]:
    """Load a file that does not exist yet; it is complete, but not synced, when the context ends.

    Raises: Unavailable when it can't be written.
    """
    try:
        create_file(path)
        with closing(open_file(path, "rw", isolation_level=None)) as connection:
            connection.execute("PRAGMA synchronous = OFF")
            create_tables(connection)
            connection.execute("PRAGMA journal_mode = OFF")  # not needed: after a failure the file is removed
            connection.execute("BEGIN")
            yield SqliteStoreLoader(path, connection)
            connection.execute("COMMIT")
            connection.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.Error as error:
        raise Unavailable(
            f"The file {path} can't be written: {error}. Check its disk and the space on it."
        ) from error
