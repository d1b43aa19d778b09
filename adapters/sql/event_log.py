"""Base of the event logs of SQLite and PostgreSQL."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from postroom.application.mailbox.records import Records
from postroom.application.ports.event_log import EventLog, Head, Seal, StoredSnapshot


class SqlEventLog(Records, EventLog):
    """The commits of a mailbox in tables, read and written by the statements of `log.sql`."""

    def head(self) -> Head | None:
        rows = self._fetch("head")
        return Head(*rows[0]) if rows else None

    def first_position(self) -> int | None:
        rows = self._fetch("first_position")
        return rows[0][0] if rows else None

    def position_before(self, at: int) -> int:
        """Return the last position before log time `at`; a binary search, as log time never decreases."""
        head, first = self.head(), self.first_position()
        if head is None or first is None:
            return 0
        through, end = first - 1, head.position
        while through < end:
            extent = self._commit_at((through + end) // 2 + 1)
            if extent is None:  # retention removed it meanwhile
                return self.position_before(at)
            if extent[2] < at:
                through = extent[1]
            else:
                end = extent[0] - 1
        return through

    def save_snapshot(self, snapshot: StoredSnapshot, keep_from: int = 0) -> None:
        self._write("save_snapshot", position=snapshot.position, chain=snapshot.chain, state=snapshot.state)
        self._write("drop_snapshots", before=keep_from)

    def snapshots(self) -> Iterator[StoredSnapshot]:
        for (position,) in self._fetch("snapshot_positions"):
            for row in self._fetch("snapshot", position=position):
                yield StoredSnapshot(*row)

    def seal(self, seal: Seal) -> None:
        self._write("seal", position=seal.position, chain=seal.chain)

    def read_seal(self) -> Seal | None:
        rows = self._fetch("sealed")
        return Seal(*rows[0]) if rows else None

    @abstractmethod
    def _fetch(self, statement: str, **values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a statement."""

    @abstractmethod
    def _write(self, statement: str, **values: Any) -> int:
        """Execute a statement, and return the number of rows that it changed."""

    @abstractmethod
    def _commit_at(self, position: int) -> tuple[Any, ...] | None:
        """Return first, last and log time of the commit that holds a position, or of the one before."""
