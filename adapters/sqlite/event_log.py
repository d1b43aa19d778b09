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
from postroom.adapters.sqlite.database import Durability, connect, connect_reader, create
from postroom.application.ports.event_log import Head, LogSize, Seal, StoredSnapshot
from postroom.domain.errors import Fenced, NotFound, Unavailable, WrongPosition
from postroom.domain.record import Record

POSITIONS = 1 << 40
"""Places per mailbox: a record's place is the mailbox's id times this, plus its position."""

_SQL = statements("postroom.adapters.sqlite", "log.sql")
_CHUNK_ROWS = 2_000
SIZE_ROWS = 1 << 12
"""Records whose sizes are added up at once."""
# SQLite takes 32,766 values a statement; records of messages have the most columns.
_MAX_ROWS = 1_024
_COLUMNS = ("place", *Record._fields[1:])


class SqliteEventLog:
    """Keep a mailbox's records in a SQLite file: WAL mode, one transaction and one sync an append."""

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
            create_missing: make the file and the mailbox where missing; else they must exist and the log
                only reads.
            can_shrink: make a file that is missing so that it can give space back to the disk.

        Raises: NotFound when it must exist and doesn't, Unavailable when the file can't be used.
        """
        self.path = Path(path)
        self.mailbox = mailbox
        self._durability = durability
        self._lock = Lock()
        self._writer: sqlite3.Connection | None = None
        self._end: int | None = None
        if create_missing:
            create(self.path, can_shrink=can_shrink)
        elif not self.path.exists():
            raise NotFound(
                f"There is no store at {path}; name one that exists, or send a message to create it."
            )
        with ExitStack() as opened:
            if create_missing:
                self._writer = opened.enter_context(closing(connect(self.path, durability)))
            self._reader = opened.enter_context(closing(connect_reader(self.path)))
            self._base = self._mailbox_id() * POSITIONS
            opened.pop_all()
        self._bounds = {"base": self._base, "top": self._base + POSITIONS - 1}

    @property
    def durability(self) -> str:
        """Say what an append survives."""
        return "power-cut" if self._durability == "full" else "process-crash"

    def append(self, records: Sequence[Record]) -> None:
        """Append records, all or none; see `EventLog.append`."""
        if not records:
            return
        writer = self._writer_or_refusal()
        statements = _inserts(self._base, records)
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
                raise Unavailable(f"The store {self.path} did not take an append: {error}.") from error
            if not inserted:  # retention went past our place, so somebody else owns the log by now
                self._end = None
                self._check_end(writer, records[0])
                raise Unavailable(f"The store {self.path} did not take an append; open the mailbox again.")
            self._end = records[-1].position

    def read(self, after: int = 0, limit: int | None = None) -> Iterator[Record]:
        """Yield whole records in the order of their positions; see `EventLog.read`."""
        return map(Record._make, self._scan("read", after, limit))

    def replay(self, after: int = 0) -> Iterator[tuple[Any, ...]]:
        """Yield the columns up to `state` of each record; see `EventLog.replay`."""
        return self._scan("replay", after, None)

    def history(self, stream: bytes) -> list[Record]:
        """Return the records of one stream; see `EventLog.history`."""
        return [Record._make(row) for row in self._fetch("history", stream=stream)]

    def known(self, streams: Iterable[bytes]) -> set[bytes]:
        """Return which streams have records; see `EventLog.known`."""
        return {stream for stream in streams if self._fetch("known", stream=stream)}

    def at_positions(self, positions: Sequence[int]) -> dict[int, Record]:
        """Return the records at these positions; see `EventLog.at_positions`."""
        found: dict[int, Record] = {}
        for position in positions:
            for row in self._fetch("read", after=position - 1, limit=1):
                if row[0] == position:
                    found[position] = Record._make(row)
        return found

    def head(self) -> Head | None:
        """Return where the log ends; see `EventLog.head`."""
        rows = self._fetch("head")
        return Head(*rows[0]) if rows else None

    def first_position(self) -> int | None:
        """Return the first position kept; see `EventLog.first_position`."""
        first: int | None = self._fetch("first_position")[0][0]
        return first

    def position_before(self, at: int) -> int:
        """Return the last position before log time `at`; log time never decreases, so halving finds it."""
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
            last, taken = self._fetch("sizes", after=through, limit=rows)[0]
            if last is None:
                break
            if taken <= size:
                through, size = last, size - taken
            else:  # too many at once: look closer
                rows //= 8
        return max(through, first)

    def truncate(self, through: int, limit: int) -> int:
        """Remove the oldest records through `through`; see `EventLog.truncate`."""
        self._write("mark_removed", through=through, id=self._base // POSITIONS)
        return self._write("truncate", through=through, limit=limit)

    def size(self) -> LogSize:
        """Return how large the log is; see `EventLog.size`.

        Of a file that several mailboxes share, each has as large a part as it has records.
        """
        pages, free, page_bytes, records, all_records = self._fetch("size")[0]
        return LogSize((pages - free) * page_bytes * records // max(all_records, 1), pages * page_bytes)

    def give_back(self, limit: int) -> int:
        """Move what stands at the file's end into free pages, and cut it off; see `EventLog.give_back`."""
        pages, page_bytes, can_shrink = self._fetch("free")[0]
        if not can_shrink:
            return 0
        writer = self._writer_or_refusal()
        with self._lock:
            try:  # a script, as nothing else takes every step of this pragma
                writer.executescript(f"PRAGMA incremental_vacuum({max(1, limit // page_bytes)})")
            except sqlite3.Error as error:
                raise Unavailable(f"The store {self.path} can't be written: {error}.") from error
        return int((pages - self._fetch("free")[0][0]) * page_bytes)

    def save_snapshot(self, snapshot: StoredSnapshot) -> None:
        """Keep a snapshot and drop all but the newest two."""
        self._write("save_snapshot", position=snapshot.position, chain=snapshot.chain, state=snapshot.state)
        self._write("drop_old_snapshots")

    def snapshots(self) -> Iterator[StoredSnapshot]:
        """Yield the kept snapshots, newest first."""
        for (position,) in self._fetch("snapshot_positions"):
            for row in self._fetch("snapshot", position=position):
                yield StoredSnapshot(*row)

    def seal(self, seal: Seal) -> None:
        """Keep where the log ends now."""
        self._write("seal", position=seal.position, chain=seal.chain)

    def sealed(self) -> Seal | None:
        """Return where the log ended when its owner last left, or None."""
        rows = self._fetch("sealed")
        return Seal(*rows[0]) if rows else None

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        with self._lock:
            self._reader.close()
            if self._writer is not None:
                self._writer.close()

    def _mailbox_id(self) -> int:
        if self._writer is not None:
            self._writer.execute(_SQL["add_mailbox"], {"name": self.mailbox})
        try:
            row = self._reader.execute(_SQL["mailbox_id"], {"name": self.mailbox}).fetchone()
        except sqlite3.Error as error:
            raise Unavailable(f"The store {self.path} can't be read: {error}.") from error
        if row is None:
            raise NotFound(
                f"The store {self.path} has no mailbox {self.mailbox}; send a message to create it."
            )
        return int(row[0])

    def _check_end(self, writer: sqlite3.Connection, first: Record) -> None:
        # Looked up once; afterwards, whoever else appends takes a place of ours, and the insert collides.
        epoch = 0
        if self._end is None:
            row = writer.execute(_SQL["head"], self._bounds).fetchone()
            self._end, epoch = (row[0], row[3]) if row else (0, 0)
        if self._end != first.position - 1:
            end, self._end = self._end, None
            if epoch > first.epoch:
                raise Fenced(self.mailbox, first.epoch, epoch)
            raise WrongPosition(self.mailbox, first.position - 1, end)

    def _writer_or_refusal(self) -> sqlite3.Connection:
        if self._writer is None:
            raise Unavailable(f"The store {self.path} was opened for reading only.")
        return self._writer

    def _fetch(self, statement: str, **values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            try:
                return self._reader.execute(_SQL[statement], self._bounds | values).fetchall()
            except sqlite3.Error as error:
                raise Unavailable(f"The store {self.path} can't be read: {error}.") from error

    def _write(self, statement: str, **values: Any) -> int:
        writer = self._writer_or_refusal()
        with self._lock:
            try:
                return writer.execute(_SQL[statement], self._bounds | values).rowcount
            except sqlite3.Error as error:
                raise Unavailable(f"The store {self.path} can't be written: {error}.") from error

    def _scan(self, statement: str, after: int, limit: int | None) -> Iterator[tuple[Any, ...]]:
        # In chunks, so that a slow reader never pins old pages and keeps the WAL from being reused.
        while limit is None or limit > 0:
            size = _CHUNK_ROWS if limit is None else min(limit, _CHUNK_ROWS)
            rows = self._fetch(statement, after=after, limit=size)
            yield from rows
            if len(rows) < size:
                return
            after = rows[-1][0]
            limit = None if limit is None else limit - size


def mailbox_names(path: str | Path) -> list[str]:
    """Return the names of the mailboxes in a store, sorted; none when the file does not exist.

    Raises: Unavailable when it is no store.
    """
    if not Path(path).exists():
        return []
    try:
        reader = connect_reader(Path(path))
        try:
            return [row[1] for row in reader.execute(_SQL["mailboxes"])]
        finally:
            reader.close()
    except sqlite3.Error as error:
        raise Unavailable(
            f"The store {path} can't be read: {error}. Name a file that Postroom made."
        ) from error


def _inserts(base: int, records: Sequence[Record]) -> list[tuple[str, list[Any]]]:
    """Return the statements that insert these records, with their values.

    Handing a value over costs Python as much as SQLite needs to store it, so a column that is the same in all
    rows is handed over once: most are, as a group shares its time and epoch, and headers are mostly absent.
    """
    messages = [record for record in records if record.envelope is not None]
    others = [record for record in records if record.envelope is None]
    place = [base // POSITIONS, records[0].position]
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
    """Round up to one of few sizes, at most a quarter more, so that statements are prepared once."""
    step = 1 << max(0, count.bit_length() - 3)
    return -(-count // step) * step


@lru_cache(256)
def _insert_statement(varying: tuple[int, ...], size: int) -> str:
    """Return an INSERT of `size` rows that skips the all-NULL ones behind the last record.

    One statement for all rows runs outside Python's interpreter lock from the first row to the sync;
    statements by the row would take the lock back between them, each time waiting for the deciding thread.

    Arguments:
        varying: indexes of the columns whose values come by row; the others' come once, in front.
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
