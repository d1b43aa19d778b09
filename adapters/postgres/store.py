"""A store in a PostgreSQL database, and the checks of `postroom doctor`."""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from shlex import quote
from typing import TYPE_CHECKING

import msgspec

from postroom.adapters.postgres.database import Connection, connect, is_pooled
from postroom.adapters.postgres.errors import identity, shown, unavailable
from postroom.adapters.postgres.event_log import Durability, PostgresEventLog, mailbox_names
from postroom.adapters.postgres.messaging.message_outbox import (
    PostgresMessageOutbox,
    count_messages,
    has_message_outbox,
)
from postroom.adapters.postgres.migrate import check_connection
from postroom.adapters.postgres.ownership import PostgresOwnership
from postroom.adapters.postgres.url import DEFAULT_SCHEMA, schema_of
from postroom.adapters.sql.statements import statements
from postroom.adapters.sql.transaction import for_psycopg
from postroom.application.diagnosis import Finding, clock_finding
from postroom.application.ports.outbox import MessageCount
from postroom.application.ports.read_models import ContextBacklog
from postroom.domain.errors import UnusableServer

if TYPE_CHECKING:
    from postroom.adapters.postgres.log_reader import PostgresLogReader
    from postroom.adapters.postgres.read_model_store import PostgresReadModelStore
    from postroom.adapters.postgres.read_model_writer import PostgresReadModelUpdater
    from postroom.adapters.postgres.read_models import PostgresReadModels
    from postroom.adapters.sql.log_reader import Driver
    from postroom.adapters.sql.read_models import OpenArchive


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

    def read_models(self, open_archive: "OpenArchive | None" = None) -> "PostgresReadModels":
        """Open the read models for queries; see `Store.read_models`."""
        from postroom.adapters.postgres.read_models import PostgresReadModels  # SQLAlchemy is slow to import

        return PostgresReadModels(self._url, open_archive)

    def read_model_store(self) -> "PostgresReadModelStore":
        """Return the read model store; see `Store.read_model_store`."""
        from postroom.adapters.postgres.read_model_store import PostgresReadModelStore

        return PostgresReadModelStore(self._url)

    def read_model_updater(self) -> "PostgresReadModelUpdater":
        """Open the read models for updates; see `Store.read_model_updater`."""
        from postroom.adapters.postgres.read_model_writer import PostgresReadModelUpdater

        return PostgresReadModelUpdater(self._url)

    def followed_log(self) -> "PostgresReadModelUpdater":
        """Open the logs for a follower; see `Store.followed_log`."""
        return self.read_model_updater()

    def queried_log(self, open_archive: "OpenArchive | None" = None) -> "PostgresReadModels":
        """Open the logs for queries; see `Store.queried_log`."""
        return self.read_models(open_archive)

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


MIN_VERSION = 140_000
FULL_SHARE = 0.8
MAX_OWNERS = 20
_POOLER = "Name the server itself for owners, relays with hints, followers, rebuilds and capture."
_SQL = statements("postroom.adapters.postgres", "sql/diagnosis.sql")
_DIRECTORY = statements("postroom.adapters.postgres", "owner_directory.sql")


def check_database(url: str, set_: str, name: str, seconds: float) -> Iterator[Finding]:
    """Check whether a database can be used and writes safely, and read its clock.

    Arguments:
        set_: the migrations that it should have, `store` or `messaging`.
        name: first word of the findings' names.
        seconds: deadline of each statement.
    """
    with _connect(url, seconds) as connection:
        yield from _check_version(connection, url, name)
        if is_pooled(connection):
            yield Finding(f"{name} pooler", "warning", "a transaction pooler, for reads and records", _POOLER)
        yield _check_migrations(connection, url, set_, name)
        if set_ == "store":
            yield _check_rights(connection, url, name)
        yield _check_durability(connection, set_, name)
        yield _check_clock(connection, name)
        yield _check_connections(connection, name)


def find_owners(url: str, seconds: float) -> Iterator[Finding]:
    """Find where the owners of mailboxes answer other hosts, at most `MAX_OWNERS` of them.

    Arguments:
        seconds: deadline of a statement.
    """
    with _connect(url, seconds) as connection:
        owners = connection.execute(_DIRECTORY["owners"].encode(), {"limit": MAX_OWNERS}).fetchall()
    for mailbox, owner, address in owners:
        yield Finding("owners", "ok", f"{mailbox}: {owner}, at {address}")
    if not owners:
        yield Finding("owners", "ok", "no process owns a mailbox and answers other hosts")


@contextmanager
def _connect(url: str, seconds: float) -> Iterator[Connection]:
    settings = {"statement_timeout": str(int(seconds * 1_000))}
    with closing(connect(url, "postroom doctor", settings)) as connection, unavailable(url):
        yield connection


def _check_version(connection: Connection, url: str, name: str) -> Iterator[Finding]:
    ((text, number, is_replica),) = connection.execute(_SQL["version"].encode()).fetchall()
    if number < MIN_VERSION:
        yield Finding(name, "failure", f"{shown(url)}: PostgreSQL {text}", "Use PostgreSQL 14 or newer.")
    else:
        yield Finding(name, "ok", f"{shown(url)}: PostgreSQL {text}")
    if is_replica:
        advice = "Name the primary in the URL, or add target_session_attrs=read-write."
        yield Finding(name, "failure", "it is a replica, which accepts no writes", advice)


def _check_migrations(connection: Connection, url: str, set_: str, name: str) -> Finding:
    try:
        check_connection(connection, url, set_)
    except UnusableServer as error:
        finding, _, advice = str(error).partition("; ")
        return Finding(f"{name} tables", "failure", finding, advice[:1].upper() + advice[1:])
    return Finding(f"{name} tables", "ok", "those of this version")


def _check_rights(connection: Connection, url: str, name: str) -> Finding:
    missing = connection.execute(_SQL["missing_rights"].encode()).fetchall()
    if not missing:
        return Finding(f"{name} rights", "ok", "reads and writes all tables")
    table, right, role = missing[0]
    more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
    advice = f"As the user that migrates, run: postroom migrate --store URL --grant-to {quote(role)}"
    return Finding(
        f"{name} rights", "failure", f"no {right} on {schema_of(url) or DEFAULT_SCHEMA}.{table}{more}", advice
    )


def _check_durability(connection: Connection, set_: str, name: str) -> Finding:
    settings: dict[str, str] = dict(connection.execute(_SQL["durability"].encode()).fetchall())
    is_off = [each for each in ("fsync", "full_page_writes") if settings.get(each) == "off"]
    if is_off:
        advice = "Set both to on: a power cut may destroy the database."
        return Finding(f"{name} durability", "failure", f"{' and '.join(is_off)}: off", advice)
    # The owner of a store sets it itself.
    if settings.get("synchronous_commit") == "off" and set_ == "messaging":
        advice = "Set it to on, unless the last commits before a crash may be lost."
        return Finding(f"{name} durability", "warning", "synchronous_commit: off", advice)
    return Finding(f"{name} durability", "ok", "every commit is synced")


def _check_clock(connection: Connection, name: str) -> Finding:
    before = time.time_ns() // 1_000
    ((theirs,),) = connection.execute(_SQL["clock"].encode()).fetchall()
    after = time.time_ns() // 1_000
    return clock_finding(f"{name} clock", before, theirs, after)


def _check_connections(connection: Connection, name: str) -> Finding:
    ((count, limit),) = connection.execute(_SQL["connections"].encode()).fetchall()
    text = f"{count:,} of {limit:,} in use"
    if count < FULL_SHARE * limit:
        return Finding(f"{name} connections", "ok", text)
    return Finding(f"{name} connections", "warning", text, "Raise max_connections, or end idle processes.")
