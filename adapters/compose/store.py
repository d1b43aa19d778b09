"""Stores: the meaning of their addresses, and the keys that protect their data."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from postroom.adapters.postgres.url import is_url
from postroom.adapters.sqlite.database import Durability
from postroom.adapters.sqlite.store import SqliteStore
from postroom.adapters.sqlite.store_file import has_file
from postroom.adapters.system.clock import SystemClock
from postroom.application.erasure.erase_subject import ErasureSettings
from postroom.application.erasure.protection import MessageEncryption
from postroom.application.extras import explain_missing_extra
from postroom.application.ports.event_log import EventLog, EventLogReader
from postroom.application.ports.lease_store import Ownership
from postroom.application.ports.outbox import MessageCount, MessageOutbox
from postroom.application.ports.subject_keys import MasterKey, SubjectKeys
from postroom.domain.arguments import check_path
from postroom.domain.errors import InvalidRequest

if TYPE_CHECKING:
    from postroom.adapters.sql.log_reader import Driver
    from postroom.adapters.sql.read_model_updater import SqlReadModelUpdater
    from postroom.adapters.sql.read_models import OpenArchive, QueriedLog, SqlReadModels
    from postroom.application.ports.read_models import ContextBacklog
    from postroom.projections.log_reader import LogReader
    from postroom.projections.ports.read_model_store import FollowedLog, VerifiableStore


MEMORY = "memory:"
DATABASE_SCHEMES = ("postgresql", "postgres")
JETSTREAM_SCHEME = "nats"
SERVER_SCHEMES = {
    "http": False,
    "https": True,
    "http+unix": False,
    "grpc": False,
    "grpcs": True,
    "grpc+unix": False,
    "postroom": False,
    "postrooms": True,
}
"""Schemes of the URLs of servers, and whether they use TLS."""


class Store(Protocol):
    """A place that contains event logs, and the read models made of them.

    Opening raises Unavailable when the store can't be used, and MissingExtra when a package is not installed.
    """

    @property
    def where(self) -> str:
        """Return its name for messages, without a password."""

    def event_log(
        self, mailbox: str, *, durability: Durability = "full", can_shrink: bool = False
    ) -> EventLog:
        """Open the log of a mailbox for writing; create missing parts.

        Arguments:
            durability: `full` survives power cuts, `relaxed` only process crashes.
            can_shrink: create a file so that it can return space to the disk.
        """

    def existing_log(self, mailbox: str) -> EventLogReader:
        """Open the log of a mailbox for reading; raise NotFound if it does not exist."""

    def ownership(self) -> Ownership:
        """Return the ownership of mailboxes."""

    @property
    def identity(self) -> str:
        """Return a text that is the same for all addresses of the store on this host."""

    def socket_path(self, mailbox: str) -> Path | None:
        """Return the path of a mailbox's socket beside the store; None where there is no such place."""

    def message_outbox(self, mailbox: str) -> MessageOutbox | None:
        """Open the messages that transactions in this database recorded for a mailbox.

        Returns: None for a store in memory, in which no transaction can record messages.
        """

    def has_message_outbox(self) -> bool:
        """Return whether transactions can record messages."""

    def count_messages(self) -> list[MessageCount]:
        """Count the messages that transactions in this database recorded, by mailbox; empty without a table.

        The first `MAX_COUNTED` rows are read, so that a count costs the same however many there are.
        """

    def mailboxes(self) -> list[str]:
        """Return the names of all mailboxes, sorted; a file that does not exist has none."""

    def log_reader(self, driver: "Driver" = "auto", *, allow_gaps: bool = False) -> "LogReader":
        """Return the reader of all logs in columns; see `open_log_reader`."""

    def read_models(self, open_archive: "OpenArchive | None" = None) -> "SqlReadModels":
        """Open the read models for queries.

        Arguments:
            open_archive: opens the log archive that a version includes, for envelopes that the log lacks.
        """

    def read_model_store(self) -> "VerifiableStore":
        """Return the read models for rebuilds."""

    def read_model_updater(self) -> "SqlReadModelUpdater":
        """Open the read models for updates."""

    def followed_log(self) -> "FollowedLog":
        """Open the logs for the follower of read models outside of the store."""

    def queried_log(self, open_archive: "OpenArchive | None" = None) -> "QueriedLog":
        """Open the logs for queries on read models outside of the store; see `read_models`."""

    def save_context_backlog(self, backlog: "Sequence[ContextBacklog]") -> None:
        """Save the backlog of a context beside the read models; a later count is not overwritten."""


@explain_missing_extra()
def open_store(address: str) -> Store:
    """Return the store at an address; nothing is opened or created yet.

    Arguments:
        address: path of a SQLite file, `postgresql://...`, `nats://HOST,HOST/NAME`, or `memory:`.

    Raises: InvalidRequest for an invalid path or a malformed URL, MissingExtra when a package is not
        installed.
    """
    check_path("store", address)
    scheme = scheme_of(address)
    if scheme not in _STORES:
        raise InvalidRequest(
            f"The store begins with {scheme}://; a store is a file, memory:, postgresql://user@host/database "
            "or nats://host,host,host/NAME."
        )
    return _STORES[scheme](address)


def _memory_store(_: str) -> Store:
    from postroom.adapters.memory.store import MemoryStore  # imported late, as below

    return MemoryStore()


def _jetstream_store(address: str) -> Store:
    from postroom.adapters.jetstream.store import JetStreamStore  # nats-py is an extra

    return JetStreamStore(address)


def _postgres_store(address: str) -> Store:
    from postroom.adapters.postgres.store import PostgresStore  # psycopg is slow to import

    return PostgresStore(address)


_STORES: dict[str, Callable[[str], Store]] = {
    "": SqliteStore,
    "memory": _memory_store,
    **dict.fromkeys(DATABASE_SCHEMES, _postgres_store),
    JETSTREAM_SCHEME: _jetstream_store,
}
"""Constructors of stores by the scheme of their addresses."""


def scheme_of(address: str) -> str:
    """Return the scheme of an address; empty for a file."""
    scheme, separator, _ = address.partition("://")
    return "memory" if address == MEMORY else scheme if separator else ""


def is_on_servers(address: str) -> bool:
    """Return whether a store is in a database or in JetStream, not in a file or in memory."""
    return scheme_of(address) in (*DATABASE_SCHEMES, JETSTREAM_SCHEME)


def is_remote(address: object) -> bool:
    """Return whether an address is the URL of a server, not the address of a store."""
    return isinstance(address, str) and address.partition(":")[0].lower() in SERVER_SCHEMES


def has_store(address: str) -> bool:
    """Return whether there is a store at an address; for a store on servers, only the address is checked.

    Raises: UnusableStore when this process may not search the folder of its file.
    """
    return (
        address == MEMORY or is_on_servers(address) or (has_file(Path(address)) and Path(address).is_file())
    )


def archive_address(folder: str | Path) -> str:
    """Return the absolute path of an archive's folder, or its URL in an object store."""
    return str(folder) if "://" in str(folder) else os.path.abspath(folder)


def open_log_reader(
    store: Store,
    archive: str | None = None,
    driver: "Driver" = "auto",
    *,
    allow_gaps: bool = False,
    verify: bool = False,
) -> "LogReader":
    """Return the reader of a store's logs.

    Arguments:
        archive: folder or URL of the segments, to be read as the log's beginning.
        driver: the database driver, where there is a choice.
        allow_gaps: whether commits may be missing between others.
        verify: whether to check the archive's files, and to decode its commits instead of reading columns.

    Raises: InvalidRequest when `archive` is not text that can name a folder.
    """
    log = store.log_reader(driver, allow_gaps=allow_gaps)
    if archive is None:
        return log
    check_path("archive", archive)
    with explain_missing_extra("archive"):
        from postroom.adapters.parquet.log_reader import ArchivedLogReader

    return ArchivedLogReader(log, archive_address(archive), allow_gaps, verify)


def open_protection(settings: ErasureSettings) -> MessageEncryption:
    """Return the protection of a mailbox's messages, after a test of the key store.

    Raises: InvalidRequest for wrong settings or another master key, NotFound when the key store or the master
        key does not exist, Unavailable when they can't be used, MissingExtra without `cryptography`.
    """
    valid = settings.validate()
    keys = open_subject_keys(valid, open_master_key(valid))
    keys.get(())
    return MessageEncryption(keys, valid.topics)


def open_subject_keys(settings: ErasureSettings, master_key: MasterKey) -> SubjectKeys:
    """Return the key store; its methods raise the same errors as `SubjectKeys`.

    Raises: MissingExtra for one in PostgreSQL without the driver.
    """
    if is_url(settings.keys):
        with explain_missing_extra("postgres"):
            from postroom.adapters.subject_keys.postgres import PostgresSubjectKeys

        return PostgresSubjectKeys(settings.keys, master_key, SystemClock().wall)
    from postroom.adapters.subject_keys.sqlite import SqliteSubjectKeys

    return SqliteSubjectKeys(Path(settings.keys), master_key, SystemClock().wall)


def open_master_key(settings: ErasureSettings) -> MasterKey:
    """Return the master key; raises as `open_protection`."""
    with explain_missing_extra("erasure"):
        from postroom.adapters.subject_keys.master_key import (
            master_key_of,
            read_master_key,
            run_master_key_command,
        )

    if settings.master_key_file is not None:
        return read_master_key(Path(settings.master_key_file))
    if settings.master_key_command is not None:
        return run_master_key_command(settings.master_key_command)
    return master_key_of(os.environ, settings.master_key_variable or "")


def create_key_store(settings: ErasureSettings) -> MasterKey:
    """Create the key store, and the file of the master key unless it exists; return the master key.

    Raises: InvalidRequest when the key store exists, Unavailable when its database is not migrated; otherwise
        as `open_protection`.
    """
    with explain_missing_extra("erasure"):
        from postroom.adapters.subject_keys.master_key import create_master_key

    valid = settings.validate()
    file = valid.master_key_file
    if file is not None and not os.path.exists(file):
        master_key: MasterKey = create_master_key(Path(file))
    else:
        master_key = open_master_key(valid)
    if is_url(valid.keys):
        with explain_missing_extra("postgres"):
            from postroom.adapters.subject_keys import postgres

        postgres.create_subject_keys(valid.keys, master_key)
    else:
        from postroom.adapters.subject_keys import sqlite

        sqlite.create_subject_keys(Path(valid.keys), master_key)
    return master_key
