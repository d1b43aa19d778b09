"""A store in a SQLite file."""

import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

from postroom.adapters.sql.statements import statements
from postroom.adapters.sqlite.database import Durability
from postroom.adapters.sqlite.event_log import SqliteEventLog, mailbox_names
from postroom.adapters.sqlite.message_outbox import SqliteMessageOutbox, count_messages
from postroom.adapters.sqlite.ownership import FileOwnership
from postroom.adapters.sqlite.store_file import check_writer
from postroom.application.ports.outbox import MessageCount
from postroom.domain.errors import Unavailable

if TYPE_CHECKING:
    from postroom.adapters.sql.log_reader import Driver
    from postroom.adapters.sqlite.log_reader import SqliteLogReader
    from postroom.adapters.sqlite.read_model_store import SqliteReadModelStore
    from postroom.adapters.sqlite.read_model_updater import SqliteReadModelUpdater
    from postroom.adapters.sqlite.read_models import SqliteReadModels
    from postroom.application.ports.read_models import ContextBacklog


class SqliteStore:
    """A store in a SQLite file, with its read models in a second file; see `Store`."""

    def __init__(self, path: str) -> None:
        self.where = path
        # Found once: the working directory or a symbolic link may change before a take-over.
        self._file = _resolve(path)

    def event_log(
        self, mailbox: str, *, durability: Durability = "full", can_shrink: bool = False
    ) -> SqliteEventLog:
        """Open the log of a mailbox for writing; see `Store.event_log`."""
        return SqliteEventLog(self._file, mailbox, durability=durability, can_shrink=can_shrink)

    def existing_log(self, mailbox: str) -> SqliteEventLog:
        """Open the log of a mailbox for reading; see `Store.existing_log`."""
        return SqliteEventLog(self._file, mailbox, create_missing=False)

    def ownership(self) -> FileOwnership:
        """Return the ownership of mailboxes; see `Store.ownership`."""
        return FileOwnership(self._file)

    def socket_path(self, mailbox: str) -> Path:
        """Return the path of a mailbox's socket, beside the file; see `Store.socket_path`."""
        return self._file.with_name(f"{self._file.name}-socket-{quote(mailbox, safe='@$')}")

    def check_writer(self) -> None:
        """Check that this process may write the file, if it exists; raises UnusableStore."""
        check_writer(self._file)

    @property
    def identity(self) -> str:
        """Return the file's path, without symbolic links; see `Store.identity`."""
        return str(self._file)

    def message_outbox(self, mailbox: str) -> SqliteMessageOutbox:
        """Open the messages recorded for a mailbox; see `Store.message_outbox`."""
        return SqliteMessageOutbox(str(self._file), mailbox)

    def has_message_outbox(self) -> bool:
        """Return True: recording creates the table; see `Store.has_message_outbox`."""
        return True

    def count_messages(self) -> list[MessageCount]:
        """Count recorded messages; see `Store.count_messages`."""
        return count_messages(self._file)

    def mailboxes(self) -> list[str]:
        """Return the names of all mailboxes; see `Store.mailboxes`."""
        return mailbox_names(self._file)

    def log_reader(self, driver: "Driver" = "auto", *, allow_gaps: bool = False) -> "SqliteLogReader":
        """Return the log reader; see `Store.log_reader`."""
        from postroom.adapters.sqlite.log_reader import SqliteLogReader

        return SqliteLogReader(str(self._file), driver, allow_gaps)

    def read_models(self) -> "SqliteReadModels":
        """Open the read models for queries; see `Store.read_models`."""
        from postroom.adapters.sqlite.read_models import SqliteReadModels  # SQLAlchemy is slow to import

        return SqliteReadModels(self._file)

    def read_model_store(self) -> "SqliteReadModelStore":
        """Return the read model store; see `Store.read_model_store`."""
        from postroom.adapters.sqlite.read_model_store import SqliteReadModelStore

        return SqliteReadModelStore(self._file)

    def read_model_updater(self) -> "SqliteReadModelUpdater":
        """Open the read models for updates; see `Store.read_model_updater`."""
        from postroom.adapters.sqlite.read_model_updater import SqliteReadModelUpdater

        return SqliteReadModelUpdater(self._file)

    def save_context_backlog(self, backlog: "Sequence[ContextBacklog]") -> None:
        """Save the backlog of a context; see `Store.save_context_backlog`."""
        from postroom.adapters.sqlite.read_model_file import connect_catalog, views_path

        path = views_path(self._file)
        statement = statements("postroom.adapters.sql", "contexts.sql")["save"].format(schema="")
        try:
            with closing(connect_catalog(path)) as file:
                file.execute("BEGIN IMMEDIATE")
                file.executemany(statement, [msgspec.structs.asdict(each) for each in backlog])
                file.execute("COMMIT")
        except sqlite3.Error as error:
            raise Unavailable(f"The read models {path} can't be written: {error}. Check the path.") from error


def _resolve(path: str) -> Path:
    try:
        return Path(os.path.realpath(path))
    except OSError as error:  # the working directory was removed
        raise Unavailable(f"The store {path} can't be found: {error}; use an absolute path.") from error
