"""The message outbox port over a SQLite file of the user, which may be the store itself."""

import asyncio
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Lock

import msgspec

from postroom.adapters.files import FileChanges
from postroom.adapters.sql.statements import statements
from postroom.adapters.sqlite.database import BUSY_TIMEOUT_MS, open_file, written_files
from postroom.adapters.sqlite.store_file import is_frozen
from postroom.application.outbox.events import rank_mailboxes
from postroom.application.ports.outbox import (
    MAX_COUNTED,
    MessageCount,
    MessageOutbox,
    RecordedMessage,
    RefusedMessage,
)
from postroom.application.threads import poll_pause, wait_at_most
from postroom.domain.errors import Unavailable

POLL_SECONDS, MAX_POLL_SECONDS = 0.02, 0.2
QUIET_SECONDS, LOST_SECONDS = 2.0, 5.0
"""Time without a commit after which polling stops, and time after which it resumes even if the kernel reports
no change: reports may be lost, as on a network file system.
"""
COMMIT_SECONDS = 0.002
"""Time that a commit usually takes after its first write, which is what the kernel reports."""
BATCH_BYTES = 8 << 20
COUNT_BUSY_SECONDS = 1.0
"""Time for which a count waits for a program that locks the file."""
_SQL = statements("postroom.adapters.sqlite", "message_outbox.sql")
_File = tuple[int, int]
"""Device and inode of a file, which are not used again while a connection is open."""


class SqliteMessageOutbox(MessageOutbox):
    """Messages for one mailbox in a SQLite file; the file and its table may be created later.

    While the file changes, it polls `PRAGMA data_version`, which changes with every commit of another
    connection, instead of the table; after that, the kernel reports the next change. If another file replaces
    the file, such as a restored backup, it opens that file.
    """

    def __init__(self, path: str | Path, mailbox: str) -> None:
        self._path = Path(path)
        self._mailbox = mailbox
        self._connection: sqlite3.Connection | None = None
        self._connected_to: _File | None = None
        self._poller: sqlite3.Connection | None = None  # never waits, so the event loop uses it
        self._polled: _File | None = None
        self._version: tuple[_File, int] | None = None
        self._changes: FileChanges | None = None
        self._changed = asyncio.Event()
        self._lock = Lock()  # a thread may still use the connection after its caller was cancelled
        self._closed = False

    async def find(self, limit: int, except_topics: Collection[str] = ()) -> list[RecordedMessage]:
        self._version = self._data_version()
        return await asyncio.to_thread(self._find, limit, list(except_topics))

    async def settle(
        self, sent: Sequence[RecordedMessage], refused: Sequence[tuple[RecordedMessage, str]]
    ) -> None:
        await asyncio.to_thread(self._settle, sent, refused)

    async def find_refused(self, limit: int) -> list[RefusedMessage]:
        return await asyncio.to_thread(self._find_refused, limit)

    async def retry(self, ids: Collection[str] | None) -> int:
        return await asyncio.to_thread(self._retry, None if ids is None else list(ids))

    async def wait(self) -> None:
        """Return when the file may have messages that were committed since the last `find`."""
        now = asyncio.get_running_loop().time
        since = now()
        while True:
            quiet = now() - since
            if quiet < QUIET_SECONDS or not self._watch():
                await asyncio.sleep(poll_pause(quiet, POLL_SECONDS, MAX_POLL_SECONDS))
            elif self._data_version() == self._version:  # otherwise the file changed before the watch
                await wait_at_most(LOST_SECONDS, self._changed.wait())
                if self._changed.is_set():
                    await asyncio.sleep(COMMIT_SECONDS)
                    since = now()
            version = self._data_version()
            if version == self._version:
                continue
            if version is None or self._has_rows():
                return
            self._version, since = version, now()

    def _watch(self) -> bool:
        """Make the next change set the event; return False where the kernel does not report it."""
        if self._changes is None:
            self._changes = FileChanges()
            if self._changes.descriptor >= 0:
                asyncio.get_running_loop().add_reader(self._changes.descriptor, self._note_change)
        self._changed.clear()
        if self._file() is None:
            return self._changes.watch([self._path.resolve().parent])
        return self._version is not None and self._changes.watch(written_files(self._path))

    def _note_change(self) -> None:
        if self._changes is not None:
            self._changes.clear()
        self._changed.set()

    async def close(self) -> None:
        """Close the connection; closing twice is fine."""
        if self._changes is not None:
            if self._changes.descriptor >= 0:
                asyncio.get_running_loop().remove_reader(self._changes.descriptor)
            self._changes.close()
        if self._poller is not None:
            self._poller.close()
            self._poller = None
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _find(self, limit: int, except_topics: list[str]) -> list[RecordedMessage]:
        parameters = {
            "mailbox": self._mailbox,
            "limit": limit,
            "except_topics": msgspec.json.encode(except_topics).decode(),
        }
        rows: list[RecordedMessage] = []
        size = 0
        with self._use() as connection:
            if connection is None:
                return []
            try:
                cursor = connection.execute(_SQL["find"], parameters)
            except sqlite3.OperationalError as error:
                if str(error).startswith("no such table"):
                    return []
                raise
            for row in cursor:
                rows.append(RecordedMessage(*row))
                size += len(rows[-1].message)
                if size >= BATCH_BYTES:
                    break
            cursor.close()
        return rows

    def _find_refused(self, limit: int) -> list[RefusedMessage]:
        parameters = {"mailbox": self._mailbox, "limit": limit, "counted": MAX_COUNTED}
        with self._use() as connection:
            if connection is None or not _has_table(connection):
                return []
            rows = connection.execute(_SQL["find_refused"], parameters).fetchall()
        return [RefusedMessage(*(text.encode(errors="replace").decode() for text in row)) for row in rows]

    def _retry(self, ids: list[str] | None) -> int:
        only = None if ids is None else msgspec.json.encode(ids).decode()
        parameters = {"mailbox": self._mailbox, "ids": only, "counted": MAX_COUNTED}
        with self._use() as connection:
            if connection is None or not _has_table(connection):
                return 0
            return connection.execute(_SQL["retry"], parameters).rowcount

    def _settle(
        self, sent: Sequence[RecordedMessage], refused: Sequence[tuple[RecordedMessage, str]]
    ) -> None:
        with self._use() as connection:
            if connection is None:
                return
            connection.execute("BEGIN IMMEDIATE")
            try:
                connection.executemany(_SQL["delete"], [_key(row) for row in sent])
                connection.executemany(
                    _SQL["refuse"], [_key(row) | {"error": error} for row, error in refused]
                )
                connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise

    def _data_version(self) -> tuple[_File, int] | None:
        """Return the file and a number that changes with every commit; None if it can't be read at once."""
        try:
            file = self._file()
            if file != self._polled and self._poller is not None:
                self._poller.close()
                self._poller = None
            if file is None:
                return None
            if self._poller is None:
                self._poller = self._connect(timeout_ms=0)
                self._polled = file
            version: int = self._poller.execute("PRAGMA data_version").fetchone()[0]
        except (sqlite3.Error, OSError):
            return None
        return file, version

    def _has_rows(self) -> bool:
        """Return whether the outbox has messages, of any mailbox, or can't be read at once."""
        try:
            return self._poller is None or self._poller.execute(_SQL["has_rows"]).fetchone() == (1,)
        except sqlite3.Error as error:
            return not str(error).startswith("no such table")

    def _file(self) -> _File | None:
        """Return the file that is at the path now, if any."""
        try:
            stat = self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return stat.st_dev, stat.st_ino

    def _connect(self, timeout_ms: int) -> sqlite3.Connection:
        # The journal mode and the other settings of the file remain the user's.
        connection = open_file(
            self._path, "rw", timeout=timeout_ms / 1_000, isolation_level=None, check_same_thread=False
        )
        connection.text_factory = _decode
        return connection

    @contextmanager
    def _use(self) -> Iterator[sqlite3.Connection | None]:
        """Yield the connection; None while there is no file, and after `close`."""
        with self._lock, self._unavailable():
            file = self._file()
            if file != self._connected_to and self._connection is not None:
                self._connection.close()
                self._connection = None
            if self._connection is None:
                if self._closed or file is None:
                    yield None
                    return
                self._connection = self._connect(BUSY_TIMEOUT_MS)
                self._connected_to = file
            yield self._connection

    @contextmanager
    def _unavailable(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise Unavailable(
                f"The outbox in {self._path} can't be used: {error}. Check the file and its permissions."
            ) from error


def count_messages(path: Path) -> list[MessageCount]:
    """Count the messages in a file by mailbox; see `Store.count_messages`."""
    try:
        path.stat()
        with closing(
            open_file(path, "ro&immutable=1" if is_frozen(path) else "ro", timeout=COUNT_BUSY_SECONDS)
        ) as connection:
            connection.text_factory = lambda text: text.decode(errors="replace")
            groups = connection.execute(_SQL["count"], {"limit": MAX_COUNTED}).fetchall()
            return rank_mailboxes(
                groups, lambda position: connection.execute(_SQL["row"], {"position": position}).fetchone()
            )
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (sqlite3.Error, OSError) as error:
        if str(error).startswith("no such table"):
            return []
        raise Unavailable(
            f"The outbox in {path} can't be read: {error}. Check the file and its permissions."
        ) from error


def _has_table(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute(_SQL["exists"]).fetchone()[0])


def _decode(text: bytes) -> str:
    """Return a text, which need not be UTF-8 in SQLite; a row with such a text is refused, not the batch."""
    return text.decode(errors="surrogateescape")


def _key(row: RecordedMessage) -> dict[str, object]:
    try:
        row.id.encode()
    except UnicodeEncodeError:
        return {"position": row.position, "id": row.id.encode(errors="surrogateescape")}
    except AttributeError:  # SQLite also stores a BLOB as id
        pass
    return {"position": row.position, "id": row.id}
