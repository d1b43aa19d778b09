"""The subject keys port over a SQLite file of its own, apart from the store."""

import os
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from secrets import token_bytes, token_hex

from postroom.adapters.files import sync
from postroom.adapters.sql.statements import read_text, statements
from postroom.adapters.subject_keys.master_key import DATA_KEY_BYTES, PSEUDONYM_PREFIX, DataKey
from postroom.application.ports.subject_keys import MasterKey, Subject, SubjectKeys, UnknownPseudonym
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable

BUSY_TIMEOUT_SECONDS = 5.0
MODE = 0o600
_SQL = statements("postroom.adapters.subject_keys", "queries.sql")


def create_subject_keys(path: Path, master_key: MasterKey) -> None:
    """Create the file of a key store, with mode 0600, durably and all or nothing.

    Raises: InvalidRequest when the file exists, Unavailable when it can't be created.
    """
    temporary = path.with_name(f".{path.name}.{token_hex(8)}")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, MODE))
        try:
            with closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
                connection.executescript(read_text("postroom.adapters.subject_keys", "schema.sql"))
                connection.execute(_SQL["create_master_key"], {"key_id": master_key.key_id})
            sync(temporary)
            os.link(temporary, path)  # unlike a rename, fails if the file exists
        finally:
            temporary.unlink()
        sync(path.parent)
    except FileExistsError:
        raise InvalidRequest(f"The file {path} exists; a key store is never overwritten.") from None
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise Unavailable(f"The key store {path} can't be created: {reason}.") from error


class SqliteSubjectKeys(SubjectKeys):
    """Subject keys in a SQLite file; see `SubjectKeys`.

    Each call opens the file, so it may be used after a fork, and sees what other processes changed.

    Arguments:
        path: of a file that `create_subject_keys` created.
        now: wall clock, µs since 1970 UTC.
    """

    def __init__(self, path: Path, master_key: MasterKey, now: Callable[[], int]) -> None:
        self._path = path
        self._master_key = master_key
        self._now = now

    def __repr__(self) -> str:
        return f"SqliteSubjectKeys({str(self._path)!r})"

    def get_or_create(self, subjects: Collection[str]) -> Mapping[str, DataKey]:
        keys = self.get(subjects)
        if len(keys) == len(set(subjects)):
            return keys
        with self._transaction() as connection:
            return {subject: self._get_or_add(connection, subject) for subject in subjects}

    def get(self, subjects: Collection[str]) -> dict[str, DataKey]:
        with self._connection() as connection:
            keys = {subject: self._get(connection, self._master_key.index(subject)) for subject in subjects}
        return {subject: key for subject, key in keys.items() if key is not None}

    def resolve(self, pseudonyms: Collection[str]) -> Mapping[str, DataKey | None]:
        keys: dict[str, DataKey | None] = {}
        with self._connection() as connection:
            for pseudonym in pseudonyms:
                row = connection.execute(_SQL["key_of_pseudonym"], {"pseudonym": pseudonym}).fetchone()
                if row is None:
                    raise self._unknown(pseudonym)
                keys[pseudonym] = None if row[0] is None else self._unwrap(pseudonym, row[0])
        return keys

    def find(self, subject: str) -> Subject | None:
        with self._connection() as connection:
            blind_index = self._master_key.index(subject)
            row = connection.execute(_SQL["find_subject"], {"blind_index": blind_index}).fetchone()
        return None if row is None else _subject(row)

    def list_subjects(self) -> Sequence[Subject]:
        with self._connection() as connection:
            return [_subject(row) for row in connection.execute(_SQL["list_subjects"])]

    def destroy(self, pseudonym: str, now: int) -> None:
        with self._transaction() as connection:
            self._check_pseudonym(connection, pseudonym)
            connection.execute(_SQL["destroy"], {"pseudonym": pseudonym, "now": now})

    def mark_recorded(self, pseudonym: str) -> None:
        with self._transaction() as connection:
            self._check_pseudonym(connection, pseudonym)
            connection.execute(_SQL["mark_recorded"], {"pseudonym": pseudonym})

    def _get_or_add(self, connection: sqlite3.Connection, subject: str) -> DataKey:
        blind_index = self._master_key.index(subject)
        key = self._get(connection, blind_index)  # another process may have added it
        if key is not None:
            return key
        pseudonym, data_key = PSEUDONYM_PREFIX + token_hex(16), token_bytes(DATA_KEY_BYTES)
        row = {
            "pseudonym": pseudonym,
            "blind_index": blind_index,
            "data_key": self._master_key.wrap(data_key, pseudonym),
            "created_at": self._now(),
        }
        connection.execute(_SQL["add_subject"], row)
        return DataKey(pseudonym, data_key)

    def _get(self, connection: sqlite3.Connection, blind_index: bytes) -> DataKey | None:
        row = connection.execute(_SQL["key_of_subject"], {"blind_index": blind_index}).fetchone()
        return None if row is None else self._unwrap(*row)

    def _unwrap(self, pseudonym: str, data_key: bytes) -> DataKey:
        return DataKey(pseudonym, self._master_key.unwrap(data_key, pseudonym))

    def _check_pseudonym(self, connection: sqlite3.Connection, pseudonym: str) -> None:
        if connection.execute(_SQL["key_of_pseudonym"], {"pseudonym": pseudonym}).fetchone() is None:
            raise self._unknown(pseudonym)

    def _unknown(self, pseudonym: str) -> UnknownPseudonym:
        return UnknownPseudonym(pseudonym, f"The key store {self._path}")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        if not os.path.exists(self._path):
            raise NotFound(
                f"There is no key store {self._path}; restore the file, or create one with postroom erasure "
                "init."
            )
        uri = f"{self._path.absolute().as_uri()}?mode=rw"
        try:
            with closing(
                sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_SECONDS)
            ) as connection:
                connection.execute("PRAGMA secure_delete = ON")  # overwrites removed data
                connection.execute("PRAGMA synchronous = EXTRA")  # also syncs the removal of the journal
                self._check_master_key(connection)
                yield connection
        except sqlite3.Error as error:
            raise Unavailable(
                f"The key store {self._path} can't be used: {error}. Check the file and its disk."
            ) from error

    def _check_master_key(self, connection: sqlite3.Connection) -> None:
        row = connection.execute(_SQL["master_key"]).fetchone()
        key_id = None if row is None else row[0]
        if key_id != self._master_key.key_id:
            raise InvalidRequest(
                f"The keys in {self._path} are wrapped by the master key {key_id}, not by "
                f"{self._master_key.key_id}; configure that one."
            )


def _subject(row: tuple[str, int, int | None, int]) -> Subject:
    return Subject(row[0], row[1], row[2], bool(row[3]))
