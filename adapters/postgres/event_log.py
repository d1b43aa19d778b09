"""The event log port over a PostgreSQL database."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice, takewhile
from threading import Lock
from typing import Any, Literal

import psycopg

from postroom.adapters.postgres.columns import BinaryValue, append_statement, to_commit, uuid, uuids
from postroom.adapters.postgres.database import connect
from postroom.adapters.postgres.errors import describe, is_lost, shown, unavailable
from postroom.adapters.postgres.log_connections import SQL, LogConnections
from postroom.adapters.postgres.migrate import check_connection
from postroom.adapters.sql.event_log import SqlEventLog
from postroom.application.mailbox.codec import stream_ids
from postroom.application.ports.event_log import Head, LogSize
from postroom.application.telemetry import logger
from postroom.domain.commit import POSITIONS_PER_MAILBOX, Commit, IndexEntry
from postroom.domain.errors import DuplicateRecord, Fenced, NotFound, Unavailable, WrongPosition
from postroom.domain.names import STREAM_BYTES

Durability = Literal["full", "relaxed"]

PARTITION_POSITIONS = 1 << 20
"""Positions per partition of a new mailbox: about 500 MB, so that the indexes of the newest fit in memory."""
RETENTION_WAIT_SECONDS = 2.0

_CHUNK_POSITIONS, _CHUNK_POSITIONS_WITHOUT_ENVELOPES, _CHUNK_COMMITS = 2_000, 20_000, 500
CHUNK_BYTES = 8 << 20
"""Size after which a chunk of commits with envelopes ends."""
SIZE_ROWS = 1 << 12
"""Limit on the commits whose sizes one statement sums."""


class PostgresEventLog(SqlEventLog):
    """The commits of a mailbox in PostgreSQL: one statement, transaction and round trip per append.

    Appends and reads use separate connections, which are reopened when they were ended.
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
            partition_positions: positions per partition of a new mailbox.

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
        return "power-cut" if self._durability == "full" and self._db.is_synced else "process-crash"

    def append(self, commits: Sequence[Commit]) -> None:
        if not commits:
            return
        self._refuse_reader()
        statement, values = append_statement(self._id, commits)
        with self._append_lock:
            self._check_end(commits[0])
            if commits[-1].last > self._last_partitioned:
                self._make_partitions(commits[-1].last)
            self._end = None  # unknown until the append has succeeded
            try:
                is_held = self._insert(commits, statement, values)
            except psycopg.Error as error:
                if isinstance(error, psycopg.errors.IntegrityError):  # the key exists, or it has no partition
                    self._check_end(commits[0])
                failure = describe(error, self._url)
                if isinstance(error, psycopg.errors.UniqueViolation):
                    failure = DuplicateRecord(str(failure))
                raise failure from error
            if not is_held:  # retention removed this position, so another process owns the log
                self._check_end(commits[0])
                raise Unavailable(
                    f"The database {shown(self._url)} rejected an append; open the mailbox again."
                )
            self._end = commits[-1].last
            if self._end > self._next_partition_at:
                self._make_partitions_ahead(self._end)

    def commits(self, after: int = 0, *, envelopes: bool = True) -> Iterator[Commit]:
        # In chunks: the snapshot of a long read would prevent VACUUM from removing old rows.
        size = _CHUNK_POSITIONS if envelopes else _CHUNK_POSITIONS_WITHOUT_ENVELOPES
        position = after + 1
        if extent := self._commit_at(position):
            first, last, _ = extent
            position = first if last >= position else last + 1
        while True:
            commit = None
            for commit in self._fetch_commits(position, position + size - 1, envelopes=envelopes):
                yield commit
            if commit is not None:
                position = max(commit.first, commit.last) + 1  # `last` may have been altered
                continue
            # The end, or a gap: retention removed the start, or another process commits, which must be
            # noticed.
            rows = self._db.fetch("next_position", position=position)
            if not rows:
                return
            position = rows[0][0]

    def commits_of(self, positions: Iterable[int], *, envelopes: bool = True) -> list[Commit]:
        distinct = sorted({position for position in positions if 0 < position < POSITIONS_PER_MAILBOX})
        commits: list[Commit] = []
        for start in range(0, len(distinct), _CHUNK_COMMITS):
            chunk = distinct[start : start + _CHUNK_COMMITS]
            batch = self._find_commits(chunk, self._partition_start(chunk[0]), envelopes)
            # If a commit begins in an earlier partition, the search did not find its positions.
            if missing := [position for position in chunk if not batch or position < batch[0].first]:
                batch = [*self._find_commits(missing, 0, envelopes), *batch]
            commits += batch[1:] if commits and batch and batch[0].first == commits[-1].first else batch
        return commits

    def index_of(self, streams: Iterable[bytes]) -> list[IndexEntry]:
        ids = uuids([stream for stream in streams if len(stream) == STREAM_BYTES])
        return [IndexEntry(*row) for row in self._db.fetch("index_of", streams=ids)]

    def streams_between(self, first: bytes, last: bytes, limit: int) -> list[bytes]:
        bounds = {"first": uuid(first), "last": uuid(last)}
        return [row[0] for row in self._db.fetch("streams_between", limit=limit, **bounds)]

    def position_at_size(self, size: int) -> int:
        """Return the position at a size of the oldest commits; see `EventLog.position_at_size`.

        A position before the newest partition is rounded up to the end of the last commit that begins in its
        partition.
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
        if through < first:
            through = self._end_of_commit(first)
        end = self._end_of_commit(-(-through // self._partition) * self._partition)
        return end if end < head.position else through

    def truncate(self, through: int, limit: int) -> int:
        """Remove the oldest commits through `through`; see `EventLog.truncate`.

        Partitions without later events are dropped, regardless of `limit`; the last one's rows are deleted.
        """
        self._refuse_reader()
        first, extent = self.first_position(), self._commit_at(through)
        if first is None or extent is None:
            return 0
        end = extent[1] if extent[1] <= through else extent[0] - 1  # end of the last commit to be removed
        if end < first:
            return 0
        if end > self._removed_through:
            self._write("mark_removed", through=end)
            self._wait_for_appends()
            self._delete_entries_beyond_partition(end)
            dropped: int = self._db.call("drop_partitions")
            self._removed_through = end
            if dropped >= first:
                return (self.first_position() or end + 1) - first
        oldest = takewhile(lambda commit: commit.last <= end, self.commits(first - 1, envelopes=False))
        removed = list(islice(oldest, limit))
        if not removed:
            return 0
        self._delete("truncate", removed, first, removed[-1].last)
        return removed[-1].last - first + 1

    def size(self) -> LogSize:
        """Return the size of the log; see `EventLog.size`.

        A partly truncated partition counts in proportion to its remaining positions.
        """
        head = self.head()
        return LogSize(*self._db.fetch("size", head=head.position if head else 0)[0])

    def reclaim_space(self, limit: int) -> int:
        """Return 0: dropping a partition frees its space at once."""
        return 0

    def close(self) -> None:
        """Close the connections; idempotent."""
        self._db.close()

    # -- reading ---

    def _fetch_commits(self, first: int, through: int, *, envelopes: bool) -> Iterator[Commit]:
        """Yield the commits that begin at these positions; with envelopes, up to a size."""
        bounds = {"first": first, "through": through}
        if envelopes:
            return map(to_commit, self._db.fetch("commits", bytes=CHUNK_BYTES, **bounds))
        return map(to_commit, self._db.fetch("commits_without_envelopes", **bounds))

    def _find_commits(self, positions: Sequence[int], after: int, envelopes: bool) -> list[Commit]:
        """Return the commits that hold these positions, and begin after position `after`."""
        bounds = {"positions": positions, "after": after, "through": positions[-1]}
        return list(map(to_commit, self._db.fetch("commits_of", envelopes=envelopes, **bounds)))

    def _commit_at(self, position: int) -> tuple[Any, ...] | None:
        position = min(position, POSITIONS_PER_MAILBOX - 1)
        for after in (self._partition_start(position), 0):  # the commit may begin in an earlier partition
            if rows := self._db.fetch("commit_at", position=position, after=after):
                return rows[0]
        return None

    def _partition_start(self, position: int) -> int:
        """Return the position before the partition of a position."""
        return (position - 1) // self._partition * self._partition

    def _end_of_commit(self, position: int) -> int:
        """Return the last position of the commit that holds a position, or of the one before it."""
        extent = self._commit_at(position)
        return extent[1] if extent else 0

    # -- writing ---

    def _fetch(self, statement: str, **values: Any) -> list[tuple[Any, ...]]:
        return self._db.fetch(statement, **values)

    def _write(self, statement: str, **values: Any) -> int:
        self._refuse_reader()
        return self._db.write(statement, **values)

    def _refuse_reader(self) -> None:
        if not self._is_writable:
            raise Unavailable(f"The mailbox {self.mailbox} of {shown(self._url)} was opened read-only.")

    def _delete_entries_beyond_partition(self, end: int) -> None:
        """Delete the entries of a commit that begins in a partition to be dropped and ends beyond it."""
        boundary = end // self._partition * self._partition
        commits = [
            commit
            for commit in self.commits_of([boundary + 1], envelopes=False)
            if commit.first <= boundary and commit.last <= end
        ]
        if commits:
            self._delete("delete_entries", commits, boundary + 1, commits[-1].last)

    def _delete(self, statement: str, commits: Sequence[Commit], first: int, through: int) -> None:
        streams = uuids([stream for commit in commits for stream in stream_ids(commit)])
        self._write(statement, streams=streams, first=first, through=through)

    def _insert(self, commits: Sequence[Commit], statement: str, values: dict[str, BinaryValue]) -> bool:
        """Insert commits; once more if the connection was lost, unless the log holds them by then."""

        def check(end: Head | None) -> bool:
            _verify_end(self.mailbox, commits[0], end)
            return False

        def holds(end: Head | None) -> bool:
            is_held = end is not None and (end.position, end.chain) == (commits[-1].last, commits[-1].chain)
            return is_held or check(end)

        try:
            return self._db.append(statement, values, check)
        except psycopg.OperationalError as error:
            if not is_lost(error):
                raise
        return self._db.append(statement, values, holds)

    def _check_end(self, first: Commit) -> None:
        # Read once: afterwards, an append by another owner makes ours fail on the primary key.
        if self._end is None:
            _verify_end(self.mailbox, first, self.head())
        elif self._end != first.first - 1:
            end, self._end = self._end, None
            raise WrongPosition(self.mailbox, first.first - 1, end)

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
            logger().retry("mailbox.partition_not_made", mailbox=self.mailbox, error=str(error))

    def _wait_for_appends(self) -> None:
        """Wait for the appends that began before `mark_removed` was visible.

        Such an append of a stale owner conflicts with commits that still exist. A later one reads
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


def _verify_end(mailbox: str, first: Commit, end: Head | None) -> None:
    """Raise an error unless a commit continues a log with this end, and no newer owner has written it."""
    position, epoch = (end.position, end.epoch) if end else (0, 0)
    if epoch > first.epoch:
        raise Fenced(mailbox, first.epoch, epoch)
    if position != first.first - 1:
        raise WrongPosition(mailbox, first.first - 1, position)


def mailbox_names(url: str) -> list[str]:
    """Return the names of the mailboxes in a store, sorted.

    Raises: Unavailable when the database can't be used or is not migrated.
    """
    with closing(connect(url, "postroom, lists mailboxes")) as connection, unavailable(url):
        check_connection(connection, url, "store")
        return [name for (name,) in connection.execute(SQL["mailboxes"])]
