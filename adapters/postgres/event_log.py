"""The event log port over a PostgreSQL database."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from threading import Lock
from typing import Any, Literal, NamedTuple

import psycopg

from postroom.adapters.postgres.columns import POSITIONS, Packed, PackedDumper, insert, restored
from postroom.adapters.postgres.database import (
    Connection,
    Reconnecting,
    closing_on_failure,
    connect,
    describe,
    shown,
    unavailable,
)
from postroom.adapters.postgres.migrate import check_connection
from postroom.adapters.sql.statements import statements
from postroom.application.ports.event_log import Head, LogSize, Seal, StoredSnapshot
from postroom.application.telemetry import logger
from postroom.domain.errors import Fenced, NotFound, Unavailable, WrongPosition
from postroom.domain.record import Record

Durability = Literal["full", "relaxed"]

PARTITION_POSITIONS = 1 << 20
"""Positions per partition of a new mailbox: about 500 MB, whose indexes fit in memory while it is filled."""
TIMEOUT = "60s"
"""How long a statement may take; each is one append or one page of a read."""
DOUBTFUL_WAIT_MS = 5_000
RETENTION_WAIT_SECONDS = 2.0

_SQL = statements("postroom.adapters.postgres", "log.sql")
_CHUNK_ROWS = 2_000
SIZE_ROWS = 1 << 12
"""Records whose sizes are added up at once."""


class _Session(NamedTuple):
    """What tells a server process from all others, later ones of the same number included."""

    pid: int
    started: Any


class PostgresEventLog:
    """Keep a mailbox's records in PostgreSQL: one statement, one transaction and one round trip an append.

    Appends go through one connection and reads through another; each is made again when it was lost.
    """

    def __init__(
        self,
        url: str,
        mailbox: str,
        *,
        durability: Durability = "full",
        create_missing: bool = True,
        partition_positions: int = PARTITION_POSITIONS,
    ):
        """Open the log of `mailbox` in the database at `url`.

        Arguments:
            durability: `full` waits for the disk, and for standbys as the server is told to; `relaxed` may
                lose the last appends when the server crashes, but never when only this process dies.
            create_missing: make the mailbox where missing; else it must exist and the log only reads.
            partition_positions: how many records a partition of a new mailbox holds.

        Raises: NotFound when it must exist and doesn't, Unavailable when the database can't be used or lacks
            our tables.
        """
        self.mailbox = mailbox
        self._url = url
        self._durability = durability
        self._is_writable = create_missing
        self._is_synced = False
        self._append_lock = Lock()
        self._session: _Session | None = None
        self._doubtful: _Session | None = None
        self._end: int | None = None
        self._removed_through = 0
        self._reader = Reconnecting(self._open_reader)
        self._writer = Reconnecting(self._open_writer)
        try:
            with unavailable(url), self._reader.use() as reader:
                check_connection(reader, url, "store")
            id_, self._partition = self._find_mailbox(partition_positions)
            base = id_ * POSITIONS
            self._bounds = {"id": id_, "base": base, "top": base + POSITIONS - 1}
            if create_missing:
                head = self.head()
                self._make_partitions((head.position if head else 0) + 1)
        except BaseException:
            self.close()
            raise

    @property
    def durability(self) -> str:
        """Say what an append survives."""
        return "power-cut" if self._durability == "full" and self._is_synced else "process-crash"

    def append(self, records: Sequence[Record]) -> None:
        """Append records, all or none; see `EventLog.append`."""
        if not records:
            return
        self._refuse_reader()
        statement, values = insert(self._bounds["id"], records)
        with self._append_lock:
            self._check_end(records[0])
            if records[-1].position > self._held:
                self._make_partitions(records[-1].position)
            try:
                inserted = self._insert(statement, values)
            except psycopg.Error as error:
                self._end = None
                if isinstance(error, psycopg.errors.IntegrityError):  # a place is taken, or was dropped
                    self._check_end(records[0])
                raise describe(error, self._url) from error
            if not inserted:  # retention went past our place, so somebody else owns the log by now
                self._end = None
                self._check_end(records[0])
                raise Unavailable(
                    f"The database {shown(self._url)} did not take an append; open the mailbox again."
                )
            self._end = records[-1].position
            if self._end > self._make_at:
                self._make_partitions_ahead(self._end)

    def read(self, after: int = 0, limit: int | None = None) -> Iterator[Record]:
        """Yield whole records in the order of their positions; see `EventLog.read`."""
        return map(Record._make, self._scan("read", after, limit))

    def replay(self, after: int = 0) -> Iterator[tuple[Any, ...]]:
        """Yield the columns up to `state` of each record; see `EventLog.replay`."""
        return self._scan("replay", after, None)

    def history(self, stream: bytes) -> list[Record]:
        """Return the records of one stream; see `EventLog.history`."""
        return [Record._make(restored(row)) for row in self._fetch("history", stream=stream)]

    def known(self, streams: Iterable[bytes]) -> set[bytes]:
        """Return which streams have records; see `EventLog.known`."""
        return {stream for (stream,) in self._fetch("known", streams=list(streams))}

    def at_positions(self, positions: Sequence[int]) -> dict[int, Record]:
        """Return the records at these positions; see `EventLog.at_positions`."""
        places = [self._bounds["base"] + position for position in positions if position > 0]
        return {row[0]: Record._make(restored(row)) for row in self._fetch("at_positions", places=places)}

    def head(self) -> Head | None:
        """Return where the log ends; see `EventLog.head`."""
        rows = self._fetch("head")
        return Head(*rows[0]) if rows else None

    def first_position(self) -> int | None:
        """Return the first position kept; see `EventLog.first_position`."""
        rows = self._fetch("first_position")
        return rows[0][0] if rows else None

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
        """Return where the oldest records take `size` bytes; see `EventLog.position_at_size`.

        That is the end of a partition but for the newest: only whole ones leave the disk.
        """
        first, head = self.first_position(), self.head()
        if first is None or head is None:
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
        through = max(through, first)
        end = -(-through // self._partition) * self._partition
        return end if end < head.position else through

    def truncate(self, through: int, limit: int) -> int:
        """Remove the oldest records through `through`; see `EventLog.truncate`.

        Partitions that hold nothing else are dropped, however many records that are; from the last one
        records are deleted.
        """
        self._refuse_reader()
        first = self.first_position()
        if first is None or first > through:
            return 0
        if through > self._removed_through:
            self._write("mark_removed", through=through)
            self._wait_for_appends()
            dropped: int = self._call("drop_partitions")
            self._removed_through = through
            if dropped >= first:
                return dropped - first + 1
        return self._write("truncate", first=first, last=min(through, first + limit - 1))

    def size(self) -> LogSize:
        """Return how large the log is; see `EventLog.size`.

        Of the partition that retention has begun to remove, what is left counts by its share of positions.
        """
        head = self.head()
        return LogSize(*self._fetch("size", head=head.position if head else 0)[0])

    def give_back(self, limit: int) -> int:
        """Give nothing back: partitions leave the disk when they are dropped."""
        return 0

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
        """Close the connections; closing twice is fine."""
        self._writer.close()
        self._reader.close()

    # -- connections ---

    def _open_reader(self) -> Connection:
        reader = connect(self._url, f"postroom, reads {self.mailbox}")
        with unavailable(self._url), closing_on_failure(reader):
            reader.execute(_SQL["configure_reader"], {"timeout": TIMEOUT})
        return reader

    def _open_writer(self) -> Connection:
        writer = connect(self._url, f"postroom, appends to {self.mailbox}")
        with unavailable(self._url), closing_on_failure(writer):
            writer.adapters.register_dumper(Packed, PackedDumper)
            is_relaxed = self._durability == "relaxed"
            writer.execute(_SQL["configure_writer"], {"timeout": TIMEOUT, "relaxed": is_relaxed})
            pid, started, self._is_synced = writer.execute(_SQL["session"]).fetchone() or (0, None, False)
            self._session = _Session(pid, started)
        return writer

    def _end_doubtful(self, reader: Connection) -> None:
        """End the append whose outcome nobody knows, so that what is read from now on is its outcome."""
        if self._doubtful is None:
            return
        session = self._doubtful._asdict() | {"wait_ms": DOUBTFUL_WAIT_MS}
        if reader.execute(_SQL["end_session"], session).fetchone() == (False,):
            raise Unavailable(
                f"The database {shown(self._url)} is still at work on an append whose caller it lost; "
                "retry shortly."
            )
        self._doubtful = None

    # -- statements ---

    def _fetch(self, statement: str, **values: Any) -> list[tuple[Any, ...]]:
        with unavailable(self._url):
            try:
                return self._fetch_once(statement, values)
            except psycopg.OperationalError:
                if self._reader.is_connected:
                    raise
            return self._fetch_once(statement, values)  # it was lost while it idled, perhaps long ago

    def _fetch_once(self, statement: str, values: dict[str, Any]) -> list[tuple[Any, ...]]:
        with self._reader.use() as reader:
            self._end_doubtful(reader)
            return reader.execute(_SQL[statement], self._bounds | values, binary=True).fetchall()

    def _scan(self, statement: str, after: int, limit: int | None) -> Iterator[tuple[Any, ...]]:
        # In chunks, so that a slow reader never holds a snapshot that keeps old rows from being removed.
        while limit is None or limit > 0:
            size = _CHUNK_ROWS if limit is None else min(limit, _CHUNK_ROWS)
            rows = self._fetch(statement, after=after, last=after + size)
            yield from map(restored, rows)
            after += size
            limit = None if limit is None else limit - len(rows)
            if len(rows) < size:  # the end, or a start that retention removed
                first = self.first_position()
                if first is None or first <= after:
                    return
                after = first - 1

    def _insert(self, statement: str, values: Sequence[Packed]) -> int:
        with self._writer.use() as writer:
            try:
                return writer.execute(statement, values, prepare=True).rowcount
            except psycopg.Error:
                if writer.broken:  # whether the server carried it out, or still will, is unknown
                    self._doubtful = self._session
                raise

    def _write(self, statement: str, **values: Any) -> int:
        self._refuse_reader()
        with unavailable(self._url), self._writer.use() as writer:
            return writer.execute(_SQL[statement], self._bounds | values).rowcount

    def _call(self, statement: str, **values: Any) -> Any:
        with unavailable(self._url), self._writer.use() as writer:
            (answer,) = writer.execute(_SQL[statement], self._bounds | values).fetchone() or (None,)
            return answer

    # -- appending ---

    def _refuse_reader(self) -> None:
        if not self._is_writable:
            raise Unavailable(
                f"The mailbox {self.mailbox} of {shown(self._url)} was opened for reading only."
            )

    def _check_end(self, first: Record) -> None:
        # Looked up once; afterwards, whoever else appends takes a place of ours, and the insert collides.
        epoch = 0
        if self._end is None:
            head = self.head()
            self._end, epoch = (head.position, head.epoch) if head else (0, 0)
        if self._end != first.position - 1:
            end, self._end = self._end, None
            if epoch > first.epoch:
                raise Fenced(self.mailbox, first.epoch, epoch)
            raise WrongPosition(self.mailbox, first.position - 1, end)

    def _make_partitions(self, through: int) -> None:
        """See that there is room for the positions up to `through`, and for half a partition more."""
        self._held: int = self._call("make_partitions", through=through + self._partition // 2)
        self._make_at = self._held - self._partition // 2

    def _make_partitions_ahead(self, end: int) -> None:
        """Make the next partition long before it is needed; the append before it stands, whatever happens."""
        try:
            self._make_partitions(end)
        except Unavailable as error:
            self._make_at = end + self._partition // 16
            logger().warning("mailbox.partition_not_made", mailbox=self.mailbox, error=str(error))

    def _wait_for_appends(self) -> None:
        """Let appends end that began before everybody could see what retention is about to remove.

        A stale owner that wants a place among them collides with what is there, until that is deleted; an
        append that begins afterwards sees that the place is gone.
        """
        deadline = time.monotonic() + RETENTION_WAIT_SECONDS
        older = set(self._fetch("appends_under_way"))
        while older:
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"A transaction has been writing to the log of {shown(self._url)} for long; retention "
                    "removes nothing until it ends."
                )
            time.sleep(0.002)
            older &= set(self._fetch("appends_under_way"))

    def _find_mailbox(self, partition_positions: int) -> tuple[int, int]:
        with unavailable(self._url), self._reader.use() as reader:
            found = reader.execute(_SQL["mailbox"], {"name": self.mailbox}).fetchone()
        if found is None and self._is_writable:
            with unavailable(self._url), self._writer.use() as writer:
                row = {"name": self.mailbox, "positions": partition_positions}
                writer.execute(_SQL["add_mailbox"], row)
                found = writer.execute(_SQL["mailbox"], {"name": self.mailbox}).fetchone()
        if found is None:
            raise NotFound(
                f"The store {shown(self._url)} has no mailbox {self.mailbox}; send a message to create it."
            )
        id_, positions = found
        return id_, positions


def mailbox_names(url: str) -> list[str]:
    """Return the names of the mailboxes in a store, sorted.

    Raises: Unavailable when the database can't be used or lacks our tables.
    """
    with closing(connect(url, "postroom, lists mailboxes")) as connection, unavailable(url):
        check_connection(connection, url, "store")
        return [name for (name,) in connection.execute(_SQL["mailboxes"])]
