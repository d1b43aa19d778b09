"""The event log port over a PostgreSQL database."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from threading import Lock
from typing import Any, Literal

import psycopg

from postroom.adapters.postgres.columns import insert, unescape_row
from postroom.adapters.postgres.database import connect, describe, shown, unavailable
from postroom.adapters.postgres.log_connections import SQL, LogConnections
from postroom.adapters.postgres.migrate import check_connection
from postroom.application.ports.event_log import Head, LogSize, Seal, StoredSnapshot
from postroom.application.telemetry import logger
from postroom.domain.errors import DuplicateRecord, Fenced, NotFound, Unavailable, WrongPosition
from postroom.domain.record import POSITIONS_PER_MAILBOX, Record

Durability = Literal["full", "relaxed"]

PARTITION_POSITIONS = 1 << 20
"""Positions per partition of a new mailbox: about 500 MB, so that the indexes of the newest fit in memory."""
RETENTION_WAIT_SECONDS = 2.0

_CHUNK_ROWS = 2_000
SIZE_ROWS = 1 << 12
"""Limit on the records whose sizes one statement sums."""


class PostgresEventLog:
    """The records of a mailbox in PostgreSQL: one statement, transaction and round trip per append.

    Appends and reads use separate connections, which are reopened when they are lost.
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
            durability: `full` waits for the disk, and for standbys as the server is configured; `relaxed` may
                lose the last appends when the server crashes, but never when only this process does.
            create_missing: create the mailbox if it is missing; otherwise it must exist, and the log is
                read-only.
            partition_positions: records per partition of a new mailbox.

        Raises: NotFound when the mailbox is missing, Unavailable when the database can't be used or is not
            migrated.
        """
        self.mailbox = mailbox
        self._url = url
        self._durability = durability
        self._is_writable = create_missing
        self._append_lock = Lock()
        self._end: int | None = None
        self._removed_through = 0
        self._db = LogConnections(url, mailbox, is_relaxed=durability == "relaxed")
        try:
            self._id, self._partition = self._find_mailbox(partition_positions)
            self._base = self._id * POSITIONS_PER_MAILBOX
            self._db.bounds = {
                "id": self._id,
                "base": self._base,
                "top": self._base + POSITIONS_PER_MAILBOX - 1,
            }
            if create_missing:
                head = self.head()
                self._make_partitions((head.position if head else 0) + 1)
        except BaseException:
            self.close()
            raise

    @property
    def durability(self) -> str:
        """Return what an append survives; see `EventLog.durability`."""
        return "power-cut" if self._durability == "full" and self._db.is_synced else "process-crash"

    def append(self, records: Sequence[Record]) -> None:
        """Append records, all or none; see `EventLog.append`."""
        if not records:
            return
        self._refuse_reader()
        statement, values = insert(self._id, records)
        with self._append_lock:
            self._check_end(records[0])
            if records[-1].position > self._last_partitioned:
                self._make_partitions(records[-1].position)
            try:
                inserted = self._db.insert(statement, values)
            except psycopg.Error as error:
                self._end = None
                if isinstance(
                    error, psycopg.errors.IntegrityError
                ):  # the key exists, or its partition was dropped
                    self._check_end(records[0])
                failure = describe(error, self._url)
                if isinstance(error, psycopg.errors.UniqueViolation):
                    failure = DuplicateRecord(str(failure))
                raise failure from error
            if not inserted:  # retention removed this position, so another process owns the log
                self._end = None
                self._check_end(records[0])
                raise Unavailable(
                    f"The database {shown(self._url)} rejected an append; open the mailbox again."
                )
            self._end = records[-1].position
            if self._end > self._next_partition_at:
                self._make_partitions_ahead(self._end)

    def read(self, after: int = 0, limit: int | None = None) -> Iterator[Record]:
        """Yield whole records in the order of their positions; see `EventLogReader.read`."""
        return map(Record._make, self._scan("read", after, limit))

    def replay(self, after: int = 0) -> Iterator[tuple[Any, ...]]:
        """Yield the columns up to `state` of each record; see `EventLogReader.replay`."""
        return self._scan("replay", after, None)

    def read_stream(self, stream: bytes) -> list[Record]:
        """Return the records of one stream; see `EventLogReader.read_stream`."""
        return [Record._make(unescape_row(row)) for row in self._db.fetch("read_stream", stream=stream)]

    def existing_streams(self, streams: Iterable[bytes]) -> set[bytes]:
        """Return which streams have records; see `EventLogReader.existing_streams`."""
        return {stream for (stream,) in self._db.fetch("existing_streams", streams=list(streams))}

    def streams_between(self, first: bytes, last: bytes, limit: int) -> list[bytes]:
        """Return the streams of a range; see `EventLogReader.streams_between`."""
        return [row[0] for row in self._db.fetch("streams_between", first=first, last=last, limit=limit)]

    def replay_first(self, streams: Iterable[bytes]) -> Iterator[tuple[Any, ...]]:
        """Yield the first records of streams; see `EventLogReader.replay_first`."""
        return map(unescape_row, self._db.fetch("replay_first", streams=list(streams)))

    def at_positions(self, positions: Sequence[int]) -> dict[int, Record]:
        """Return the records at these positions; see `EventLogReader.at_positions`."""
        places = [self._base + position for position in positions if position > 0]
        return {
            row[0]: Record._make(unescape_row(row)) for row in self._db.fetch("at_positions", places=places)
        }

    def head(self) -> Head | None:
        """Return the end of the log; see `EventLogReader.head`."""
        rows = self._db.fetch("head")
        return Head(*rows[0]) if rows else None

    def first_position(self) -> int | None:
        """Return the position of the oldest record; see `EventLogReader.first_position`."""
        rows = self._db.fetch("first_position")
        return rows[0][0] if rows else None

    def position_before(self, at: int) -> int:
        """Return the last position before log time `at`; a binary search, as log time never decreases."""
        head, low = self.head(), self.first_position()
        if head is None or low is None:
            return 0
        high = head.position + 1
        while low < high:
            middle = (low + high) // 2
            if self._db.fetch("at_position", position=middle)[0][0] < at:
                low = middle + 1
            else:
                high = middle
        return low - 1

    def position_at_size(self, size: int) -> int:
        """Return where the oldest records take `size` bytes; see `EventLog.position_at_size`.

        A position before the newest partition is rounded up to the end of its partition.
        """
        first, head = self.first_position(), self.head()
        if first is None or head is None:
            return 0
        through, rows = first - 1, SIZE_ROWS
        while rows:
            last, total = self._db.fetch("sizes", after=through, limit=rows)[0]
            if last is None:
                break
            if total <= size:
                through, size = last, size - total
            else:  # the limit is within this batch: use smaller ones
                rows //= 8
        through = max(through, first)
        end = -(-through // self._partition) * self._partition
        return end if end < head.position else through

    def truncate(self, through: int, limit: int) -> int:
        """Remove the oldest records through `through`; see `EventLog.truncate`.

        Partitions without later records are dropped, regardless of `limit`; the last one's rows are deleted.
        """
        self._refuse_reader()
        first = self.first_position()
        if first is None or first > through:
            return 0
        if through > self._removed_through:
            self._write("mark_removed", through=through)
            self._wait_for_appends()
            dropped: int = self._db.call("drop_partitions")
            self._removed_through = through
            if dropped >= first:
                return dropped - first + 1
        return self._write("truncate", first=first, last=min(through, first + limit - 1))

    def size(self) -> LogSize:
        """Return the size of the log; see `EventLog.size`.

        A partly truncated partition counts in proportion to its remaining positions.
        """
        head = self.head()
        return LogSize(*self._db.fetch("size", head=head.position if head else 0)[0])

    def reclaim_space(self, limit: int) -> int:
        """Return 0: dropping a partition frees its space at once."""
        return 0

    def save_snapshot(self, snapshot: StoredSnapshot, keep_from: int = 0) -> None:
        """Save a part of a snapshot, and drop those before a position; see `EventLog.save_snapshot`."""
        self._write("save_snapshot", position=snapshot.position, chain=snapshot.chain, state=snapshot.state)
        self._write("drop_snapshots", before=keep_from)

    def snapshots(self) -> Iterator[StoredSnapshot]:
        """Yield the saved snapshots, newest first."""
        for (position,) in self._db.fetch("snapshot_positions"):
            for row in self._db.fetch("snapshot", position=position):
                yield StoredSnapshot(*row)

    def seal(self, seal: Seal) -> None:
        """Save the end of the log; see `EventLog.seal`."""
        self._write("seal", position=seal.position, chain=seal.chain)

    def sealed(self) -> Seal | None:
        """Return the seal of the last owner, or None."""
        rows = self._db.fetch("sealed")
        return Seal(*rows[0]) if rows else None

    def close(self) -> None:
        """Close the connections; idempotent."""
        self._db.close()

    # -- reading ---

    def _scan(self, statement: str, after: int, limit: int | None) -> Iterator[tuple[Any, ...]]:
        # In chunks: the snapshot of a long read would prevent VACUUM from removing old rows.
        while limit is None or limit > 0:
            size = _CHUNK_ROWS if limit is None else min(limit, _CHUNK_ROWS)
            rows = self._db.fetch(statement, after=after, last=after + size)
            yield from map(unescape_row, rows)
            after += size
            limit = None if limit is None else limit - len(rows)
            if len(rows) < size:  # the end, or a start that retention removed
                first = self.first_position()
                if first is None or first <= after:
                    return
                after = first - 1

    # -- writing ---

    def _write(self, statement: str, **values: Any) -> int:
        self._refuse_reader()
        return self._db.write(statement, **values)

    def _refuse_reader(self) -> None:
        if not self._is_writable:
            raise Unavailable(f"The mailbox {self.mailbox} of {shown(self._url)} was opened read-only.")

    def _check_end(self, first: Record) -> None:
        # Read once: afterwards, an append by another owner makes ours fail on the primary key.
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
        """Create the partitions for the positions up to `through` and half a partition ahead."""
        self._last_partitioned: int = self._db.call("make_partitions", through=through + self._partition // 2)
        self._next_partition_at = self._last_partitioned - self._partition // 2

    def _make_partitions_ahead(self, end: int) -> None:
        """Create the next partition before it is needed; a failure does not affect the last append."""
        try:
            self._make_partitions(end)
        except Unavailable as error:
            self._next_partition_at = end + self._partition // 16
            logger().warning("mailbox.partition_not_made", mailbox=self.mailbox, error=str(error))

    def _wait_for_appends(self) -> None:
        """Wait for the appends that began before `mark_removed` was visible.

        Such an append of a stale owner conflicts with records that still exist. A later one reads
        `removed_through` and inserts nothing.
        """
        deadline = time.monotonic() + RETENTION_WAIT_SECONDS
        older = set(self._db.fetch("appends_under_way"))
        while older:
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"A transaction is still writing to the log of {shown(self._url)} after "
                    f"{RETENTION_WAIT_SECONDS:.0f} s; retention continues when it ends."
                )
            time.sleep(0.002)
            older &= set(self._db.fetch("appends_under_way"))

    def _find_mailbox(self, partition_positions: int) -> tuple[int, int]:
        name = {"name": self.mailbox}
        rows = self._db.fetch("mailbox", **name)
        if not rows and self._is_writable:
            self._db.write("add_mailbox", **name, positions=partition_positions)
            rows = self._db.fetch("mailbox", **name)
        if not rows:
            raise NotFound(
                f"The store {shown(self._url)} has no mailbox {self.mailbox}; send a message to create it."
            )
        id_, positions = rows[0]
        return id_, positions


def mailbox_names(url: str) -> list[str]:
    """Return the names of the mailboxes in a store, sorted.

    Raises: Unavailable when the database can't be used or is not migrated.
    """
    with closing(connect(url, "postroom, lists mailboxes")) as connection, unavailable(url):
        check_connection(connection, url, "store")
        return [name for (name,) in connection.execute(SQL["mailboxes"])]
