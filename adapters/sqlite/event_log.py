"""The event log port over a SQLite file."""

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec
from msgspec.structs import asdict

from postroom.adapters.sql.event_log import SqlEventLog
from postroom.adapters.sql.statements import statements
from postroom.adapters.sqlite.database import Durability, connect, connect_reader, create
from postroom.adapters.sqlite.store_file import has_file
from postroom.application.mailbox.codec import compress, decompress, decompress_envelopes, stream_ids
from postroom.application.ports.event_log import Head, LogSize
from postroom.domain.commit import POSITIONS_PER_MAILBOX, Commit, IndexEntry
from postroom.domain.errors import (
    DuplicateRecord,
    Fenced,
    NotFound,
    StoreReplaced,
    Unavailable,
    WrongPosition,
)
from postroom.domain.names import STREAM_BYTES

_SQL = statements("postroom.adapters.sqlite", "log.sql")
CHUNK_COMMITS, CHUNK_BYTES = 500, 8 << 20
"""Bounds of the commits that one statement reads."""
SIZE_ROWS = 1 << 12
"""Limit on the commits whose sizes one statement reads."""
_encode_json = msgspec.json.Encoder().encode


class SqliteEventLog(SqlEventLog):
    """The commits of a mailbox in a SQLite file in WAL mode: one transaction and one sync per append."""

    def __init__(
        self,
        path: str | Path,
        mailbox: str,
        *,
        durability: Durability = "full",
        create_missing: bool = True,
        can_shrink: bool = False,
    ):
        """Open the log of `mailbox` in the file at `path`.

        Arguments:
            durability: see `postroom.adapters.sqlite.database.connect`.
            create_missing: create the file and the mailbox if they are missing; otherwise they must exist,
                and the log is read-only.
            can_shrink: create a missing file so that space freed by truncation can be reclaimed.

        Raises: NotFound when the file or the mailbox is missing, Unavailable when the file can't be used.
        """
        self.path = Path(path).absolute()  # the working directory may change
        self.mailbox = mailbox
        self._durability = durability
        self._lock = Lock()
        self._writer: sqlite3.Connection | None = None
        self._end: int | None = None
        if create_missing:
            create(self.path, can_shrink=can_shrink)
        elif not has_file(self.path):
            raise NotFound(
                f"There is no store at {path}; name an existing file, or send a message to create it."
            )
        with ExitStack() as connections:
            if create_missing:
                self._writer = connections.enter_context(closing(connect(self.path, durability)))
            self._reader = connections.enter_context(closing(connect_reader(self.path)))
            self._mailbox = self._mailbox_id()
            self._base = self._mailbox * POSITIONS_PER_MAILBOX
            self._file = self.path.stat()
            connections.pop_all()
        self._bounds = {
            "mailbox": self._mailbox,
            "base": self._base,
            "top": self._base + POSITIONS_PER_MAILBOX - 1,
        }

    @property
    def durability(self) -> str:
        return "power-cut" if self._durability == "full" else "process-crash"

    def append(self, commits: Sequence[Commit]) -> None:
        if not commits:
            return
        writer = self._require_writer()
        with self._lock:
            try:
                self._check_end(writer, commits[0])
                appended = self._insert(writer, commits)
            except sqlite3.Error as error:
                self._end = None
                if isinstance(error, sqlite3.IntegrityError):
                    self._check_end(writer, commits[0])
                    raise DuplicateRecord(f"The store {self.path} refused a commit: {error}.") from error
                raise Unavailable(f"The store {self.path} can't be appended to: {error}.") from error
            if not appended:  # retention removed this position, so another process owns the log
                self._end = None
                self._check_end(writer, commits[0])
                raise Unavailable(f"The store {self.path} rejected an append; open the mailbox again.")
            self._check_file()
            self._end = commits[-1].last

    def commits(self, after: int = 0, *, envelopes: bool = True) -> Iterator[Commit]:
        # In chunks: a long read transaction would prevent the WAL from being checkpointed and reused.
        statement = "commits" if envelopes else "commits_without_envelopes"
        while commits := self._fetch_commits(statement, after=after):
            yield from commits
            after = commits[-1].last

    def commits_of(self, positions: Iterable[int], *, envelopes: bool = True) -> list[Commit]:
        statement = "commits" if envelopes else "commits_without_envelopes"
        commits: list[Commit] = []
        for position in sorted(set(positions)):
            if position < 1 or (commits and position <= commits[-1].last):
                continue
            candidates = self._fetch_commits(statement, 1, after=position - 1)
            commits += [commit for commit in candidates if commit.first <= position]
        return commits

    def index_of(self, streams: Iterable[bytes]) -> list[IndexEntry]:
        ids = [each for each in set(streams) if len(each) == STREAM_BYTES]
        if not ids:
            return []
        numbers = str(list(range(len(ids))))
        return [IndexEntry(*row) for row in self._fetch("index_of", streams=b"".join(ids), numbers=numbers)]

    def streams_between(self, first: bytes, last: bytes, limit: int) -> list[bytes]:
        return [row[0] for row in self._fetch("streams_between", first=first, last=last, limit=limit)]

    def head(self) -> Head | None:
        if self._writer is not None:
            self._check_file()
        return super().head()

    def position_at_size(self, size: int) -> int:
        through = 0
        while rows := self._fetch("sizes", after=through, limit=SIZE_ROWS):
            for last, commit_size in rows:
                size -= commit_size
                if size < 0:
                    return through or int(last)
                through = int(last)
        return through

    def truncate(self, through: int, limit: int) -> int:
        self._write("mark_removed", through=through)
        commits = self._fetch_commits("oldest", limit, through=through)
        if not commits:
            return 0
        last = commits[-1].last
        streams = {stream for commit in commits for stream in stream_ids(commit)}
        entries = [{"mailbox": self._mailbox, "stream": stream, "through": last} for stream in streams]
        writer = self._require_writer()
        with self._lock:
            try:
                with transaction(writer):
                    writer.executemany(_SQL["drop_entries"], entries)
                    writer.execute(_SQL["truncate"], self._bounds | {"through": last})
            except sqlite3.Error as error:
                raise Unavailable(f"The store {self.path} can't be written: {error}.") from error
        return last - commits[0].first + 1

    def size(self) -> LogSize:
        """Return the size of the log; see `CommitReader.size`.

        The size of a file with several mailboxes is divided in proportion to their events.
        """
        pages, free, page_bytes, events, all_events = self._fetch("size")[0]
        return LogSize((pages - free) * page_bytes * events // max(all_events, 1), pages * page_bytes)

    def reclaim_space(self, limit: int) -> int:
        pages, page_bytes, can_shrink = self._fetch("free")[0]
        if not can_shrink:
            return 0
        writer = self._require_writer()
        with self._lock:
            try:  # `execute` would stop this pragma after its first step
                writer.executescript(f"PRAGMA incremental_vacuum({max(1, limit // page_bytes)})")
            except sqlite3.Error as error:
                raise Unavailable(f"The store {self.path} can't be written: {error}.") from error
        return int((pages - self._fetch("free")[0][0]) * page_bytes)

    def close(self) -> None:
        """Close the file; idempotent."""
        with self._lock:
            self._reader.close()
            if self._writer is not None:
                self._writer.close()

    def _commit_at(self, position: int) -> tuple[Any, ...] | None:
        rows = self._fetch("commit_at", position=position)
        return rows[0] if rows else None

    def _mailbox_id(self) -> int:
        name, row = {"name": self.mailbox}, None
        try:
            if _has_tables(self._reader):
                row = self._reader.execute(_SQL["mailbox_id"], name).fetchone()
            if row is None and self._writer is not None:
                self._writer.execute(_SQL["add_mailbox"], name)
                row = self._reader.execute(_SQL["mailbox_id"], name).fetchone()
        except sqlite3.Error as error:
            raise Unavailable(f"The store {self.path} can't be read: {error}.") from error
        if row is None:
            raise NotFound(
                f"The store {self.path} has no mailbox {self.mailbox}; send a message to create it."
            )
        return int(row[0])

    def _check_file(self) -> None:
        # An open file outlives its name, so SQLite goes on, and all would be lost when this process ends.
        with suppress(OSError):
            if os.path.samestat(self.path.stat(), self._file):
                return
        raise StoreReplaced(self.mailbox, self.path)

    def _insert(self, writer: sqlite3.Connection, commits: Sequence[Commit]) -> bool:
        """Insert commits and their entries, all or none; return False if retention removed their place."""
        with transaction(writer):
            for commit in commits:
                values = {
                    "mailbox": self._mailbox,
                    "place": self._base + commit.first,
                    "last": commit.last,
                    "epoch": commit.epoch,
                    "at": commit.at,
                    "chain": commit.chain,
                    "events": compress(commit.events),
                    "envelopes": compress(commit.envelopes),
                }
                if not writer.execute(_SQL["append"], values).rowcount:
                    return False
                self._insert_entries(writer, commit)
        return True

    def _insert_entries(self, writer: sqlite3.Connection, commit: Commit) -> None:
        first = [entry for entry in commit.entries if entry.version == 1 and entry.last is None]
        if first:
            streams = b"".join(entry.stream for entry in first)
            positions = _encode_json([entry.position for entry in first]).decode()
            values = {"mailbox": self._mailbox, "streams": streams, "positions": positions}
            writer.execute(_SQL["add_first_entries"], values)
        for entry in commit.entries:
            if entry.version != 1 or entry.last is not None:
                writer.execute(_SQL["add_entry"], {"mailbox": self._mailbox} | asdict(entry))
        if commit.last_events:
            streams = b"".join([update.stream for update in commit.last_events])
            lasts = _encode_json([update.last for update in commit.last_events]).decode()
            values = {"mailbox": self._mailbox, "streams": streams, "lasts": lasts}
            writer.execute(_SQL["set_last"], values)

    def _check_end(self, writer: sqlite3.Connection, first: Commit) -> None:
        # Read once: afterwards, an append by another owner makes ours fail on the primary key.
        epoch = 0
        if self._end is None:
            row = writer.execute(_SQL["head"], self._bounds).fetchone()
            self._end, epoch = (row[0], row[3]) if row else (0, 0)
        if self._end != first.first - 1:
            end, self._end = self._end, None
            if epoch > first.epoch:
                raise Fenced(self.mailbox, first.epoch, epoch)
            raise WrongPosition(self.mailbox, first.first - 1, end)

    def _require_writer(self) -> sqlite3.Connection:
        if self._writer is None:
            raise Unavailable(f"The store {self.path} was opened read-only.")
        return self._writer

    def _fetch(self, statement: str, **values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            try:
                return self._reader.execute(_SQL[statement], self._bounds | values).fetchall()
            except sqlite3.Error as error:
                raise Unavailable(f"The store {self.path} can't be read: {error}.") from error

    def _write(self, statement: str, **values: Any) -> int:
        writer = self._require_writer()
        with self._lock:
            try:
                return writer.execute(_SQL[statement], self._bounds | values).rowcount
            except sqlite3.Error as error:
                raise Unavailable(f"The store {self.path} can't be written: {error}.") from error

    def _fetch_commits(self, statement: str, limit: int = CHUNK_COMMITS, **values: Any) -> list[Commit]:
        """Return the next commits, up to a number and, after the first, a size."""
        commits: list[Commit] = []
        size = 0
        with self._lock:
            try:
                with closing(self._reader.execute(_SQL[statement], self._bounds | values)) as rows:
                    for row in rows:
                        commit = _decompress_commit(Commit._make((*row, (), ())))
                        commits.append(commit)
                        size += len(commit.events) + len(commit.envelopes)
                        if len(commits) >= limit or size >= CHUNK_BYTES:
                            break
            except sqlite3.Error as error:
                raise Unavailable(f"The store {self.path} can't be read: {error}.") from error
        return commits


def _has_tables(connection: sqlite3.Connection) -> bool:
    """Return False for a file that another process has just created and is about to fill."""
    return connection.execute(_SQL["has_tables"]).fetchone() is not None


def mailbox_names(path: str | Path) -> list[str]:
    """Return the names of the mailboxes in a store, sorted; empty when the file does not exist.

    Raises: Unavailable when the file is not a store.
    """
    if not has_file(Path(path)):
        return []
    try:
        reader = connect_reader(Path(path))
        try:
            return [row[1] for row in reader.execute(_SQL["mailboxes"])] if _has_tables(reader) else []
        finally:
            reader.close()
    except sqlite3.Error as error:
        raise Unavailable(
            f"The store {path} can't be read: {error}. Name a file that Postroom created."
        ) from error


def _decompress_commit(commit: Commit) -> Commit:
    return commit._replace(
        events=decompress(commit.events, commit.first),
        envelopes=decompress_envelopes(commit.envelopes),
    )


@contextmanager
def transaction(writer: sqlite3.Connection) -> Iterator[None]:
    """Execute the statements of the context in one transaction, all or none."""
    writer.execute("BEGIN IMMEDIATE")
    try:
        yield
        writer.execute("COMMIT")
    except BaseException:
        if writer.in_transaction:
            writer.execute("ROLLBACK")
        raise
