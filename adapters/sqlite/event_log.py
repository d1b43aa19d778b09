"""The event log port over a SQLite file."""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import lru_cache
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any

from postroom.adapters.sql.statements import statements
from postroom.adapters.sqlite.database import Durability, connect, connect_reader, create, file_id
from postroom.application.ports.event_log import Head, LogSize, Seal, StoredSnapshot
from postroom.domain.errors import (
    DuplicateRecord,
    Fenced,
    NotFound,
    StoreReplaced,
    Unavailable,
    WrongPosition,
)
from postroom.domain.record import POSITIONS_PER_MAILBOX, Record

_SQL = statements("postroom.adapters.sqlite", "log.sql")
_CHUNK_ROWS = 2_000
SIZE_ROWS = 1 << 12
"""Limit on the records whose sizes one statement sums."""
# SQLite accepts 32,766 values per statement; records of messages have the most columns.
_MAX_ROWS = 1_024
_COLUMNS = ("place", *Record._fields[1:])


class SqliteEventLog:
    """The records of a mailbox in a SQLite file in WAL mode: one transaction and one sync per append."""

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
        elif not self.path.exists():
            raise NotFound(
                f"There is no store at {path}; name an existing file, or send a message to create it."
            )
        with ExitStack() as connections:
            if create_missing:
                self._writer = connections.enter_context(closing(connect(self.path, durability)))
            self._reader = connections.enter_context(closing(connect_reader(self.path)))
            self._base = self._mailbox_id() * POSITIONS_PER_MAILBOX
            self._file = file_id(self.path)
            connections.pop_all()
        self._bounds = {"base": self._base, "top": self._base + POSITIONS_PER_MAILBOX - 1}

    @property
    def durability(self) -> str:
        """Return what an append survives; see `EventLog.durability`."""
        return "power-cut" if self._durability == "full" else "process-crash"

    def append(self, records: Sequence[Record]) -> None:
        """Append records, all or none; see `EventLog.append`."""
        if not records:
            return
        writer = self._require_writer()
        statements = inserts(self._base, records)
        with self._lock:
            try:
                self._check_end(writer, records[0])
                if len(statements) == 1:
                    inserted = writer.execute(*statements[0]).rowcount  # a transaction by itself
                else:
                    inserted = _transact(writer, statements)
            except sqlite3.Error as error:
                self._end = None
                if isinstance(error, sqlite3.IntegrityError):
                    self._check_end(writer, records[0])
                    raise DuplicateRecord(f"The store {self.path} refused a record: {error}.") from error
                raise Unavailable(f"The store {self.path} can't be appended to: {error}.") from error
            if not inserted:  # retention removed this position, so another process owns the log
                self._end = None
                self._check_end(writer, records[0])
                raise Unavailable(f"The store {self.path} rejected an append; open the mailbox again.")
            self._check_file()
            self._end = records[-1].position

    def read(self, after: int = 0, limit: int | None = None) -> Iterator[Record]:
        """Yield whole records in the order of their positions; see `EventLogReader.read`."""
        return map(Record._make, self._scan("read", after, limit))

    def replay(self, after: int = 0) -> Iterator[tuple[Any, ...]]:
        """Yield the columns up to `state` of each record; see `EventLogReader.replay`."""
        return self._scan("replay", after, None)

    def read_stream(self, stream: bytes) -> list[Record]:
        """Return the records of one stream; see `EventLogReader.read_stream`."""
        return [Record._make(row) for row in self._fetch("read_stream", stream=stream)]

    def existing_streams(self, streams: Iterable[bytes]) -> set[bytes]:
        """Return which streams have records; see `EventLogReader.existing_streams`."""
        return {stream for stream in streams if self._fetch("existing_streams", stream=stream)}

    def streams_between(self, first: bytes, last: bytes, limit: int) -> list[bytes]:
        """Return the streams of a range; see `EventLogReader.streams_between`."""
        return [row[0] for row in self._fetch("streams_between", first=first, last=last, limit=limit)]

    def replay_first(self, streams: Iterable[bytes]) -> Iterator[tuple[Any, ...]]:
        """Yield the first records of streams; see `EventLogReader.replay_first`."""
        for stream in streams:
            yield from self._fetch("replay_first", stream=stream)

    def at_positions(self, positions: Sequence[int]) -> dict[int, Record]:
        """Return the records at these positions; see `EventLogReader.at_positions`."""
        records: dict[int, Record] = {}
        for position in positions:
            for row in self._fetch("read", after=position - 1, limit=1):
                if row[0] == position:
                    records[position] = Record._make(row)
        return records

    def head(self) -> Head | None:
        """Return the end of the log; see `EventLogReader.head`."""
        if self._writer is not None:
            self._check_file()
        rows = self._fetch("head")
        return Head(*rows[0]) if rows else None

    def first_position(self) -> int | None:
        """Return the position of the oldest record; see `EventLogReader.first_position`."""
        first: int | None = self._fetch("first_position")[0][0]
        return first

    def position_before(self, at: int) -> int:
        """Return the last position before log time `at`; a binary search, as log time never decreases."""
        head, low = self.head(), self.first_position()
        if head is None or low is None:
            return 0
        high = head.position + 1
        while low < high:
            middle = (low + high) // 2
            if self._fetch("at_position", position=middle)[0][0] < at:
                low = middle + 1
            else:
                high = middle
        return low - 1

    def position_at_size(self, size: int) -> int:
        """Return where the oldest records take `size` bytes; see `EventLog.position_at_size`."""
        first = self.first_position()
        if first is None:
            return 0
        through, rows = first - 1, SIZE_ROWS
        while rows:
            last, total = self._fetch("sizes", after=through, limit=rows)[0]
            if last is None:
                break
            if total <= size:
                through, size = last, size - total
            else:  # the limit is within this batch: use smaller ones
                rows //= 8
        return max(through, first)

    def truncate(self, through: int, limit: int) -> int:
        """Remove the oldest records through `through`; see `EventLog.truncate`."""
        self._write("mark_removed", through=through, id=self._base // POSITIONS_PER_MAILBOX)
        return self._write("truncate", through=through, limit=limit)

    def size(self) -> LogSize:
        """Return the size of the log; see `EventLog.size`.

        The size of a file with several mailboxes is divided in proportion to their records.
        """
        pages, free, page_bytes, records, all_records = self._fetch("size")[0]
        return LogSize((pages - free) * page_bytes * records // max(all_records, 1), pages * page_bytes)

    def reclaim_space(self, limit: int) -> int:
        """Truncate the file after moving its last pages into free ones; see `EventLog.reclaim_space`."""
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

    def save_snapshot(self, snapshot: StoredSnapshot, keep_from: int = 0) -> None:
        """Save a part of a snapshot, and drop those before a position; see `EventLog.save_snapshot`."""
        self._write("save_snapshot", position=snapshot.position, chain=snapshot.chain, state=snapshot.state)
        self._write("drop_snapshots", before=keep_from)

    def snapshots(self) -> Iterator[StoredSnapshot]:
        """Yield the saved snapshots, newest first."""
        for (position,) in self._fetch("snapshot_positions"):
            for row in self._fetch("snapshot", position=position):
                yield StoredSnapshot(*row)

    def seal(self, seal: Seal) -> None:
        """Save the end of the log; see `EventLog.seal`."""
        self._write("seal", position=seal.position, chain=seal.chain)

    def sealed(self) -> Seal | None:
        """Return the seal of the last owner, or None."""
        rows = self._fetch("sealed")
        return Seal(*rows[0]) if rows else None

    def close(self) -> None:
        """Close the file; idempotent."""
        with self._lock:
            self._reader.close()
            if self._writer is not None:
                self._writer.close()

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
        if file_id(self.path) != self._file:
            raise StoreReplaced(self.mailbox, self.path)

    def _check_end(self, writer: sqlite3.Connection, first: Record) -> None:
        # Read once: afterwards, an append by another owner makes ours fail on the primary key.
        epoch = 0
        if self._end is None:
            row = writer.execute(_SQL["head"], self._bounds).fetchone()
            self._end, epoch = (row[0], row[3]) if row else (0, 0)
        if self._end != first.position - 1:
            end, self._end = self._end, None
            if epoch > first.epoch:
                raise Fenced(self.mailbox, first.epoch, epoch)
            raise WrongPosition(self.mailbox, first.position - 1, end)

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

    def _scan(self, statement: str, after: int, limit: int | None) -> Iterator[tuple[Any, ...]]:
        # In chunks: a long read transaction would prevent the WAL from being checkpointed and reused.
        while limit is None or limit > 0:
            size = _CHUNK_ROWS if limit is None else min(limit, _CHUNK_ROWS)
            rows = self._fetch(statement, after=after, limit=size)
            yield from rows
            if len(rows) < size:
                return
            after = rows[-1][0]
            limit = None if limit is None else limit - size


def _has_tables(connection: sqlite3.Connection) -> bool:
    """Return False for a file that another process has just created and is about to fill."""
    return connection.execute(_SQL["has_tables"]).fetchone() is not None


def mailbox_names(path: str | Path) -> list[str]:
    """Return the names of the mailboxes in a store, sorted; none when the file does not exist.

    Raises: Unavailable when the file is not a store.
    """
    if not Path(path).exists():
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


def inserts(base: int, records: Sequence[Record]) -> list[tuple[str, list[Any]]]:
    """Return the statements that insert these records, with their values.

    Binding a value costs as much as storing it, so a column with the same value in all rows is bound once: a
    batch shares its time and epoch, and most headers are absent.
    """
    messages = [record for record in records if record.envelope is not None]
    others = [record for record in records if record.envelope is None]
    place = [base // POSITIONS_PER_MAILBOX, records[0].position]
    return [
        _insert(base, rows[start : start + _MAX_ROWS], place)
        for rows in (messages, others)
        for start in range(0, len(rows), _MAX_ROWS)
    ]


def _insert(base: int, records: Sequence[Record], place: list[int]) -> tuple[str, list[Any]]:
    columns: list[Sequence[Any]] = list(zip(*records, strict=True))
    columns[0] = [base + position for position in columns[0]]
    count = len(records)
    varying = tuple(i for i, column in enumerate(columns) if i == 0 or column.count(column[0]) < count)
    values = [column[0] for i, column in enumerate(columns) if i not in varying]
    values += chain.from_iterable(zip(*(columns[i] for i in varying), strict=True))
    size = _statement_rows(count)
    values += [None] * (len(varying) * (size - count))
    return _insert_statement(varying, size), values + place


def _statement_rows(count: int) -> int:
    """Round up, by at most a quarter, to one of few sizes, so that prepared statements are reused."""
    step = 1 << max(0, count.bit_length() - 3)
    return -(-count // step) * step


@lru_cache(256)
def _insert_statement(varying: tuple[int, ...], size: int) -> str:
    """Return an INSERT of `size` rows that skips the all-NULL rows after the last record.

    One statement for all rows releases the interpreter lock from the first row to the sync; one statement per
    row would have to reacquire it after each row.

    Arguments:
        varying: indexes of the columns that are bound per row; the others are bound once, before them.
    """
    selected = [f"rows.column{varying.index(i) + 1}" if i in varying else c for i, c in enumerate(_COLUMNS)]
    shared = ", ".join(f"? AS {column}" for i, column in enumerate(_COLUMNS) if i not in varying)
    row = f"({', '.join('?' * len(varying))})"
    return (
        f"INSERT INTO log ({', '.join(_COLUMNS)}) SELECT {', '.join(selected)} "
        f"FROM (SELECT {shared or '1'}), (VALUES {', '.join([row] * size)}) AS rows "
        "WHERE rows.column1 IS NOT NULL AND (SELECT removed_through FROM mailbox_names WHERE id = ?) < ?"
    )


def _transact(writer: sqlite3.Connection, statements: Sequence[tuple[str, list[Any]]]) -> int:
    writer.execute("BEGIN IMMEDIATE")
    try:
        inserted = sum(writer.execute(statement, values).rowcount for statement, values in statements)
        writer.execute("COMMIT")
        return inserted
    except BaseException:
        if writer.in_transaction:
            writer.execute("ROLLBACK")
        raise
