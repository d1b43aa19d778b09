"""The connections of an event log in PostgreSQL."""

from collections.abc import Callable
from typing import Any, NamedTuple

import psycopg

from postroom.adapters.postgres.columns import BinaryValue, PackedDumper
from postroom.adapters.postgres.database import Connection, closing_on_failure, connect
from postroom.adapters.postgres.errors import shown, unavailable
from postroom.adapters.postgres.migrate import check_connection
from postroom.adapters.postgres.reconnecting import Reconnecting
from postroom.adapters.sql.statements import statements
from postroom.application.ports.event_log import Head
from postroom.domain.errors import Unavailable

TIMEOUT = "60s"
"""Time limit of a statement: one append, or one page of a read."""
UNCERTAIN_APPEND_WAIT_MS = 5_000

_WRITER = {
    "statement_timeout": TIMEOUT,
    "idle_session_timeout": "0",
    # New partitions have no statistics yet; every statement here has an index.
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
}
_READER = {
    "default_transaction_read_only": "on",
    "statement_timeout": TIMEOUT,
    "idle_session_timeout": "0",
    # A custom plan prunes partitions before locking them.
    "plan_cache_mode": "force_custom_plan",
    # New partitions have no statistics yet; every query here has an index.
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "jit": "off",
}

SQL = statements("postroom.adapters.postgres", "log.sql")


class _Session(NamedTuple):
    """Identity of a server process: its pid may be reused, but not with the same start time."""

    pid: int
    started: Any


class LogConnections:
    """One connection that reads and one that writes, each opened on first use and reopened when it was ended.

    An append whose connection was lost may still commit: its session is terminated before the next read or
    append, so that these see its outcome.

    Arguments:
        is_relaxed: do not wait for the disk; see `PostgresEventLog`.

    Attributes:
        bounds: parameters of every statement: id and positions of the mailbox.
        is_synced: whether the server syncs its log to the disk; False until something was written.
    """

    def __init__(self, url: str, mailbox: str, *, is_relaxed: bool) -> None:
        self.bounds: dict[str, int] = {}
        self.is_synced = False
        self._url = url
        self._mailbox = mailbox
        self._is_relaxed = is_relaxed
        self._session: _Session | None = None
        self._verified: _Session | None = None
        self._uncertain: _Session | None = None
        self._reader = Reconnecting(self._open_reader)
        self._writer = Reconnecting(self._open_writer)

    def close(self) -> None:
        """Close both; idempotent."""
        self._writer.close()
        self._reader.close()

    def fetch(self, statement: str, **values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a statement; once more if the connection was lost.

        Raises: Unavailable when the database can't be used or is not migrated.
        """

        def fetch(reader: Connection) -> list[tuple[Any, ...]]:
            self._end_uncertain_append(reader)
            return reader.execute(SQL[statement], self.bounds | values, binary=True).fetchall()

        with unavailable(self._url):
            return self._reader.run(fetch)

    def write(self, statement: str, **values: Any) -> int:
        """Execute an idempotent statement and return the number of rows; again if the connection was lost."""
        with unavailable(self._url):
            return self._writer.run(
                lambda writer: writer.execute(SQL[statement], self.bounds | values).rowcount
            )

    def call(self, statement: str, **values: Any) -> Any:
        """Execute an idempotent statement that writes, and return its only value, as `write` does."""

        def call(writer: Connection) -> Any:
            (result,) = writer.execute(SQL[statement], self.bounds | values).fetchone() or (None,)
            return result

        with unavailable(self._url):
            return self._writer.run(call)

    def append(
        self,
        statement: str,
        values: dict[str, BinaryValue],
        holds: Callable[[Head | None], bool],
    ) -> bool:
        """Insert commits, and return whether the log holds them.

        Arguments:
            holds: called with the end of the log before the first append of a session, as the server of a
                failover may have another one. Returns whether the log holds the commits already, and raises
                an error if they can't be appended there.

        Raises: psycopg.Error, as its meaning depends on the end of the log.
        """
        with self._writer.use() as writer:
            if self._verified is not self._session:
                self._end_uncertain_append(writer)
                rows = writer.execute(SQL["head"], self.bounds, binary=True).fetchall()
                if holds(Head(*rows[0]) if rows else None):
                    # Commit again, to wait for the disk and the standbys: the lost session may not have done
                    # so.
                    writer.execute(SQL["mark_removed"], self.bounds | {"through": 0})
                    return True
                self._verified = self._session
            try:
                return writer.execute(statement, values, prepare=True).rowcount > 0
            except psycopg.Error:
                if writer.broken:  # the server may have executed it, or still will
                    self._uncertain = self._session
                raise

    def _end_uncertain_append(self, connection: Connection) -> None:
        uncertain = self._uncertain
        if uncertain is None:
            return
        session = uncertain._asdict() | {"wait_ms": UNCERTAIN_APPEND_WAIT_MS}
        if connection.execute(SQL["end_session"], session).fetchone() == (False,):
            raise Unavailable(
                f"The database {shown(self._url)} is still running an append whose connection was lost; "
                "retry shortly."
            )
        if self._uncertain is uncertain:  # else another append's outcome has become uncertain meanwhile
            self._uncertain = None

    def _open_reader(self) -> Connection:
        reader = connect(self._url, f"postroom, reads {self._mailbox}", _READER)
        with unavailable(self._url), closing_on_failure(reader):
            check_connection(reader, self._url, "store")
            reader.adapters.register_dumper(BinaryValue, PackedDumper)
        return reader

    def _open_writer(self) -> Connection:
        name, owner = f"postroom, appends to {self._mailbox}", f"the owner of {self._mailbox}"
        settings = _WRITER | ({"synchronous_commit": "off"} if self._is_relaxed else {})
        # Only `off` is changed: an operator may have chosen a stronger setting than `on`.
        sync = "" if self._is_relaxed else "on"
        writer = connect(self._url, name, settings, session_for=owner, sync=sync)
        with unavailable(self._url), closing_on_failure(writer):
            writer.adapters.register_dumper(BinaryValue, PackedDumper)
            pid, started, self.is_synced = writer.execute(SQL["session"]).fetchone() or (0, None, False)
            self._session = _Session(pid, started)
        return writer
