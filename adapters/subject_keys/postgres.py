"""The subject keys port over a PostgreSQL database, shared by owners on any number of hosts."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from functools import partial
from secrets import token_bytes, token_hex
from typing import Any
from weakref import finalize

import psycopg

from postroom.adapters.postgres.database import Connection, closing_on_failure, connect, deadline
from postroom.adapters.postgres.errors import shown, unavailable
from postroom.adapters.postgres.migrate import check_connection
from postroom.adapters.postgres.reconnecting import Reconnecting
from postroom.adapters.sql.statements import statements
from postroom.adapters.subject_keys.master_key import DATA_KEY_BYTES, PSEUDONYM_PREFIX, DataKey
from postroom.application.ports.subject_keys import MasterKey, Subject, SubjectKeys, UnknownPseudonym
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable

TIMEOUT_SECONDS = 5.0
"""Time limit of a call, the wait for a lock included."""
REWRITE_TIMEOUT_SECONDS = 65.0
"""Time limit of destroying a key, which rewrites the table; longer than the server's own."""
PAUSE_SECONDS = 2.0
"""Time for which calls fail at once after an unanswered call: else they would queue for the connection."""
_SETTINGS = {
    # Each statement must see the rows that a rewrite committed while it waited for the table.
    "default_transaction_isolation": "read committed",
    "lock_timeout": "4s",
    "statement_timeout": "60s",
    "idle_session_timeout": "0",
    "jit": "off",
}
_SQL = statements("postroom.adapters.subject_keys", "postgres.sql")


def create_subject_keys(url: str, master_key: MasterKey) -> None:
    """Make an empty key store of a migrated database.

    Raises: InvalidRequest when the database has a key store, Unavailable when it can't be used or is not
        migrated.
    """
    with closing(_open(url)) as connection, unavailable(url):
        created = connection.execute(_SQL["create_master_key"], {"key_id": master_key.key_id}).rowcount
    if not created:
        raise InvalidRequest(f"The database {shown(url)} has a key store, which is never overwritten.")


class PostgresSubjectKeys(SubjectKeys):
    """Subject keys in the schema `postroom_keys` of a PostgreSQL database; see `SubjectKeys`.

    A call fails within `TIMEOUT_SECONDS` also when the server is paused, and is repeated once when the
    connection was lost. The connection is closed when the object is collected.

    Arguments:
        url: of a database that `create_subject_keys` initialised; opened at the first use.
        now: wall clock, µs since 1970 UTC.
    """

    def __init__(self, url: str, master_key: MasterKey, now: Callable[[], int]) -> None:
        self._url = url
        self._master_key = master_key
        self._now = now
        self._database = Reconnecting(partial(_connect, url, master_key))
        finalize(self, self._database.close)
        self._paused_until = 0.0

    def __repr__(self) -> str:
        return f"PostgresSubjectKeys({shown(self._url)!r})"

    def get_or_create(self, subjects: Collection[str]) -> Mapping[str, DataKey]:
        names = list(dict.fromkeys(subjects))
        keys = self.get(names)
        while len(keys) < len(names):  # repeat if a key was destroyed since
            self._add([name for name in names if name not in keys])
            keys = self.get(names)
        return {name: keys[name] for name in names}

    def get(self, subjects: Collection[str]) -> dict[str, DataKey]:
        indexes = {self._master_key.index(subject): subject for subject in subjects}
        rows = self._fetch("keys_of_subjects", indexes=list(indexes))
        return {indexes[index]: self._unwrap(pseudonym, key) for index, pseudonym, key in rows}

    def resolve(self, pseudonyms: Collection[str]) -> Mapping[str, DataKey | None]:
        storable = [each for each in pseudonyms if "\0" not in each]  # true of all that this store created
        rows = dict(self._fetch("keys_of_pseudonyms", pseudonyms=storable))
        for pseudonym in pseudonyms:
            if pseudonym not in rows:
                raise self._unknown(pseudonym)
        return {each: None if rows[each] is None else self._unwrap(each, rows[each]) for each in pseudonyms}

    def find(self, subject: str) -> Subject | None:
        rows = self._fetch("find_subject", blind_index=self._master_key.index(subject))
        return Subject(*rows[0]) if rows else None

    def list_subjects(self) -> Sequence[Subject]:
        return [Subject(*row) for row in self._fetch("list_subjects")]

    def destroy(self, pseudonym: str, now: int) -> None:
        self._rewrite(pseudonym, now)

    def mark_recorded(self, pseudonym: str) -> None:
        self._rewrite(pseudonym, None)

    def _add(self, subjects: Sequence[str]) -> None:
        pseudonyms = [PSEUDONYM_PREFIX + token_hex(16) for _ in subjects]
        data_keys = [self._master_key.wrap(token_bytes(DATA_KEY_BYTES), each) for each in pseudonyms]
        indexes = [self._master_key.index(subject) for subject in subjects]
        values = {"pseudonyms": pseudonyms, "indexes": indexes, "data_keys": data_keys}
        self._execute(TIMEOUT_SECONDS, "add_subjects", values | {"now": self._now()})

    def _rewrite(self, pseudonym: str, destroyed_at: int | None) -> None:
        values = {"pseudonym": pseudonym, "destroyed_at": destroyed_at}
        if "\0" in pseudonym or self._execute(REWRITE_TIMEOUT_SECONDS, "rewrite", values).fetchone() == (
            False,
        ):
            raise self._unknown(pseudonym)

    def _unwrap(self, pseudonym: str, data_key: bytes) -> DataKey:
        return DataKey(pseudonym, self._master_key.unwrap(data_key, pseudonym))

    def _unknown(self, pseudonym: str) -> UnknownPseudonym:
        return UnknownPseudonym(pseudonym, f"The key store {shown(self._url)}")

    def _fetch(self, statement: str, **values: Any) -> list[tuple[Any, ...]]:
        return self._execute(TIMEOUT_SECONDS, statement, values).fetchall()

    def _execute(self, seconds: float, statement: str, values: dict[str, Any]) -> psycopg.Cursor[Any]:
        started = time.monotonic()
        if started < self._paused_until:
            raise Unavailable(f"The database {shown(self._url)} does not answer; check the server.")
        try:
            with unavailable(self._url):
                return self._database.run(partial(self._execute_in, seconds, statement, values))
        except Unavailable:
            if time.monotonic() - started > PAUSE_SECONDS:
                self._paused_until = time.monotonic() + PAUSE_SECONDS
            raise

    def _execute_in(
        self, seconds: float, statement: str, values: dict[str, Any], connection: Connection
    ) -> psycopg.Cursor[Any]:
        with deadline(connection, self._url, seconds):
            return connection.execute(_SQL[statement], values, binary=True)


def _connect(url: str, master_key: MasterKey) -> Connection:
    connection = _open(url)
    with closing_on_failure(connection), unavailable(url):
        with deadline(connection, url, TIMEOUT_SECONDS):
            row = connection.execute(_SQL["master_key"]).fetchone()
        if row is None:
            raise NotFound(
                f"The database {shown(url)} has no key store; restore it, or create one with postroom "
                "erasure init."
            )
        if row[0] != master_key.key_id:
            raise InvalidRequest(
                f"The keys in {shown(url)} are wrapped by the master key {row[0]}, not by "
                f"{master_key.key_id}; configure that one."
            )
    return connection


def _open(url: str) -> Connection:
    # Wait for durable commits, even if the server does not by default.
    connection = connect(url, "postroom, keys of subjects", _SETTINGS, sync="local")
    with closing_on_failure(connection), unavailable(url), deadline(connection, url, TIMEOUT_SECONDS):
        check_connection(connection, url, "keys")
    return connection
