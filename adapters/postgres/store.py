"""A store in a PostgreSQL database."""

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec

from postroom.adapters.postgres.database import connect, identity, shown, unavailable
from postroom.adapters.postgres.event_log import Durability, PostgresEventLog, mailbox_names
from postroom.adapters.postgres.messaging.message_outbox import (
    PostgresMessageOutbox,
    count_messages,
    has_message_outbox,
)
from postroom.adapters.postgres.ownership import PostgresOwnership
from postroom.adapters.sql.statements import statements
from postroom.adapters.sql.transaction import for_psycopg
from postroom.application.ports.outbox import MessageCount
from postroom.application.ports.read_models import ContextBacklog

if TYPE_CHECKING:
    from postroom.adapters.postgres.log_reader import PostgresLogReader
    from postroom.adapters.postgres.read_model_store import PostgresReadModelStore
    from postroom.adapters.postgres.read_model_updater import PostgresReadModelUpdater
    from postroom.adapters.postgres.read_models import PostgresReadModels
    from postroom.adapters.sql.log_reader import Driver


class PostgresStore:
    """A store in a PostgreSQL database that has been migrated; see `Store`."""

    def __init__(self, url: str) -> None:
        self.where = shown(url)
        self._url = url

    def event_log(
        self, mailbox: str, *, durability: Durability = "full", can_shrink: bool = False
    ) -> PostgresEventLog:
        """Open the log of a mailbox for writing; see `Store.event_log`."""
        return PostgresEventLog(self._url, mailbox, durability=durability)

    def existing_log(self, mailbox: str) -> PostgresEventLog:
        """Open the log of a mailbox for reading; see `Store.existing_log`."""
        return PostgresEventLog(self._url, mailbox, create_missing=False)

    def ownership(self) -> PostgresOwnership:
        """Return the ownership of mailboxes; see `Store.ownership`."""
        return PostgresOwnership(self._url)

    def socket_path(self, mailbox: str) -> None:
        """Return None: a database has no folder of its own; see `Store.socket_path`."""

    @property
    def identity(self) -> str:
        """Return server and database; see `Store.identity`."""
        return identity(self._url)

    def message_outbox(self, mailbox: str) -> PostgresMessageOutbox:
        """Open the messages recorded for a mailbox; see `Store.message_outbox`."""
        return PostgresMessageOutbox(self._url, mailbox)

    def has_message_outbox(self) -> bool:
        """Return whether the table of the outbox exists; see `Store.has_message_outbox`."""
        return has_message_outbox(self._url)

    def count_messages(self) -> list[MessageCount]:
        """Count recorded messages; see `Store.count_messages`."""
        return count_messages(self._url)

    def mailboxes(self) -> list[str]:
        """Return the names of all mailboxes; see `Store.mailboxes`."""
        return mailbox_names(self._url)

    def log_reader(self, driver: "Driver" = "auto", *, allow_gaps: bool = False) -> "PostgresLogReader":
        """Return the log reader; see `Store.log_reader`."""
        from postroom.adapters.postgres.log_reader import PostgresLogReader

        return PostgresLogReader(self._url, driver, allow_gaps)

    def read_models(self) -> "PostgresReadModels":
        """Open the read models for queries; see `Store.read_models`."""
        from postroom.adapters.postgres.read_models import PostgresReadModels  # SQLAlchemy is slow to import

        return PostgresReadModels(self._url)

    def read_model_store(self) -> "PostgresReadModelStore":
        """Return the read model store; see `Store.read_model_store`."""
        from postroom.adapters.postgres.read_model_store import PostgresReadModelStore

        return PostgresReadModelStore(self._url)

    def read_model_updater(self) -> "PostgresReadModelUpdater":
        """Open the read models for updates; see `Store.read_model_updater`."""
        from postroom.adapters.postgres.read_model_updater import PostgresReadModelUpdater

        return PostgresReadModelUpdater(self._url)

    def save_context_backlog(self, backlog: Sequence[ContextBacklog]) -> None:
        """Save the backlog of a context; see `Store.save_context_backlog`."""
        statement = for_psycopg(
            statements("postroom.adapters.sql", "contexts.sql")["save"].format(schema="postroom.")
        )
        rows = [msgspec.structs.asdict(each) for each in backlog]
        with (
            closing(connect(self._url, "postroom contexts")) as connection,
            unavailable(self._url),
            connection.transaction(),
        ):
            connection.cursor().executemany(statement.encode(), rows)
