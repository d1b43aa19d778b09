"""Maintenance of stores: migrate databases, and import a store into another."""

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from postroom.adapters.backup import temporary_folder, writing
from postroom.adapters.compose.store import JETSTREAM_SCHEME, has_store, open_store, scheme_of
from postroom.adapters.files import sync
from postroom.adapters.postgres.messaging.settings import MessagingSettings
from postroom.adapters.postgres.url import is_url
from postroom.adapters.sql.statements import Migration, statements
from postroom.adapters.sqlite.backup import loading
from postroom.adapters.sqlite.database import Mode, migrate, open_file
from postroom.adapters.sqlite.store_file import check_reader, is_frozen
from postroom.application.backup.former_records import FormerLog
from postroom.application.backup.manifest import copy_store
from postroom.application.extras import explain_missing_extra
from postroom.application.ports.backup import MailboxHead, RecordedRow, StoreLoader, StoreSnapshot
from postroom.application.ports.event_log import Seal, StoredSnapshot
from postroom.application.queries.verify import VerifyLog
from postroom.domain.commit import POSITIONS_PER_MAILBOX, Commit, IndexEntry
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable
from postroom.domain.names import is_mailbox

__all__ = [
    "MessagingSettings",
    "Migration",
    "migrate_keys",
    "migrate_leases",
    "migrate_messaging",
    "migrate_store",
]


def migrate_store(url: str, *, dry_run: bool = False, grant_to: Sequence[str] = ()) -> list[Migration]:
    """Bring a store, which may be a file, up to this version; see the `migrate` of SQLite and PostgreSQL.

    A file has no roles: `grant_to` is for databases. A store in JetStream has nothing to migrate.

    Arguments:
        url: of the database, or path of the file.
        dry_run: only return the migrations that are missing.
        grant_to: roles that get the rights that Postroom needs.
    """
    if is_url(url):
        return _migrate(url, "store", dry_run, grant_to)
    if scheme_of(url) == JETSTREAM_SCHEME:  # its first owner creates its streams
        return []
    return migrate(Path(os.path.realpath(url)), dry_run=dry_run)


def migrate_messaging(url: str, *, dry_run: bool = False, grant_to: Sequence[str] = ()) -> list[Migration]:
    """Bring outbox and inbox of a service's own database up to this version.

    Arguments:
        url: of the database.
        dry_run: only return the migrations that are missing.
        grant_to: roles that get the rights that Postroom needs.
    """
    return _migrate(url, "messaging", dry_run, grant_to)


def migrate_leases(url: str, *, dry_run: bool = False, grant_to: Sequence[str] = ()) -> list[Migration]:
    """Bring a lease store up to this version."""
    return _migrate(url, "leases", dry_run, grant_to)


def migrate_keys(url: str, *, dry_run: bool = False, grant_to: Sequence[str] = ()) -> list[Migration]:
    """Bring a key store of data subjects up to this version."""
    return _migrate(url, "keys", dry_run, grant_to)


def _migrate(url: str, set_: str, dry_run: bool, grant_to: Sequence[str]) -> list[Migration]:
    with explain_missing_extra("postgres"):
        from postroom.adapters.postgres.migrate import migrate as migrate_database
    return migrate_database(url, set_, dry_run=dry_run, grant_to=grant_to)


_SQL = statements("postroom.adapters.sql", "former_store.sql")
Query = Callable[[str], Iterable[tuple[Any, ...]]]
"""Returns the rows of a statement."""


class _FormerStore(StoreSnapshot):
    """The content of a store of the former format; see `StoreSnapshot`.

    Arguments:
        schema: prefix of its tables.
    """

    def __init__(self, query: Query, schema: str, *, has_outbox: bool) -> None:
        self._query = query
        self._schema = schema
        self._has_outbox = has_outbox
        self._ids = {name: int(id_) for id_, name in query(_SQL["mailboxes"].format(schema=schema))}
        self._logs: dict[str, FormerLog] = {}

    def heads(self) -> list[MailboxHead]:
        lasts = {name: next(iter(self._rows("last", name)))[0] for name in sorted(self._ids)}
        return [MailboxHead(name, 1, last or 0, "", 0, 0) for name, last in lasts.items()]

    def commits(self, mailbox: str) -> Iterator[Commit]:
        self._logs[mailbox] = FormerLog(mailbox, self._rows("records", mailbox))
        return self._logs[mailbox].commits()

    def entries(self, mailbox: str) -> Iterator[IndexEntry]:
        """Yield the index entries of the commits, which the caller must have read before."""
        return self._logs[mailbox].entries()

    def snapshots(self, mailbox: str) -> list[StoredSnapshot]:
        """Return an empty iterator: the next owner replays the log once."""
        return []

    def seal(self, mailbox: str) -> Seal | None:
        """Return the end of the commits, which the caller must have read before, if the log was sealed."""
        log = self._logs[mailbox]
        return Seal(log.last, log.chain) if log.last and list(self._rows("seal", mailbox)) else None

    def recorded_messages(self) -> Iterator[RecordedRow]:
        if self._has_outbox:
            yield from map(RecordedRow._make, self._query(_SQL["recorded_messages"]))

    def _rows(self, statement: str, mailbox: str) -> Iterable[tuple[Any, ...]]:
        base = self._ids[mailbox] * POSITIONS_PER_MAILBOX
        return self._query(
            _SQL[statement].format(schema=self._schema, base=base, top=base + POSITIONS_PER_MAILBOX)
        )


def import_store(old: str, new: str, progress: Callable[[int], None] = lambda _: None) -> list[str]:
    """Copy a store in the format without commits into a new one, and verify it; the old one is not changed.

    Arguments:
        old: a SQLite file or `postgresql://...`; no process may write it.
        new: a SQLite file that does not exist, or a `postgresql://...` that was migrated and is empty.
        progress: called with the number of events copied.

    Returns: the names of the logs.
    Raises: InvalidRequest when the old store has another format or the new one is not empty, NotFound when
        there is no old store, BrokenLog when a record was altered, Unavailable.
    """
    if scheme_of(new) == JETSTREAM_SCHEME:
        raise InvalidRequest(
            f"A store of a former format can't be imported into {open_store(new).where} at once; import it "
            "into a new file, and restore a backup of that."
        )
    if not has_store(old):
        raise NotFound(f"There is no store at {old}; name the file or the postgresql:// URL of one.")
    with explain_missing_extra(), _reading(old) as store:
        names = [head.mailbox for head in store.heads()]
        copy = partial(copy_store, store, heads=store.heads(), progress=progress)
        if is_url(new):
            from postroom.adapters.postgres.backup import loading_store

            with loading_store(new) as database:
                _check_empty(new, database.mailboxes())
                copy(database)
            _verify(new, names)
        else:
            _write_file(Path(os.path.abspath(new)), names, copy)
    return names


def _write_file(path: Path, names: list[str], copy: Callable[[StoreLoader], None]) -> None:
    if os.path.lexists(path):
        _check_empty(str(path), ["a file"])
    with writing(path), temporary_folder(path) as folder:
        file = folder / "store.db"
        with loading(file) as loader:
            copy(loader)
        _verify(str(file), names)
        sync(file)
        os.rename(file, path)
        sync(path.parent)


def _check_empty(store: str, existing: list[str]) -> None:
    if existing:
        raise InvalidRequest(
            f"The store {open_store(store).where} is not empty ({', '.join(existing)}); name a new one."
        )


def _verify(store: str, names: list[str]) -> None:
    for name in filter(is_mailbox, names):
        with closing(open_store(store).existing_log(name)) as log:
            VerifyLog(log)()


@contextmanager
def _reading(store: str) -> Iterator[_FormerStore]:
    """Read a store of the former format at one moment, while the context lasts."""
    with _reading_database(store) if is_url(store) else _reading_file(store) as (query, kind, schema):
        if ("state",) not in list(query(_SQL[f"{kind}_columns"])):
            raise InvalidRequest(
                f"The store {open_store(store).where} does not have the format of before 23 November 2026; "
                "use it as it is, or run `postroom migrate`."
            )
        has_outbox = next(iter(query(_SQL[f"{kind}_has_outbox"]))) != (0,)
        yield _FormerStore(query, schema, has_outbox=has_outbox)


_Source = tuple[Query, str, str]
"""Query, kind of the database, and prefix of the tables."""


@contextmanager
def _reading_file(path: str) -> Iterator[_Source]:
    file = Path(os.path.realpath(path))
    check_reader(file)
    mode: Mode = "ro&immutable=1" if is_frozen(file) else "ro"
    try:
        with closing(open_file(file, mode, isolation_level=None)) as connection:
            connection.execute("BEGIN")
            yield connection.execute, "sqlite", ""
    except sqlite3.Error as error:
        raise Unavailable(f"The store {file} can't be read: {error}.") from error


@contextmanager
def _reading_database(url: str) -> Iterator[_Source]:
    from postroom.adapters.postgres.database import connect
    from postroom.adapters.postgres.errors import unavailable

    with (
        closing(connect(url, "postroom import-store")) as connection,
        unavailable(url),
        connection.transaction(),
    ):
        connection.execute(_SQL["postgres_snapshot"].encode())

        def query(statement: str) -> Iterator[tuple[Any, ...]]:
            with connection.cursor(name="records") as cursor:  # a server-side cursor, as a log may be long
                cursor.execute(statement.encode())
                yield from cursor

        yield query, "postgres", "postroom."
