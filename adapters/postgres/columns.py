"""Columns in PostgreSQL's binary format, text that it can store, rows of commits, and ADBC."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import lru_cache
from itertools import chain, repeat
from struct import pack
from typing import Any, NamedTuple

from psycopg.adapt import Buffer, Dumper
from psycopg.conninfo import make_conninfo
from psycopg.pq import Format

from postroom.adapters.postgres.database import Settings, connect, is_pooled, server_parameters
from postroom.adapters.postgres.errors import shown
from postroom.adapters.sql.statements import statements
from postroom.application.mailbox.codec import compress, decompress, decompress_envelopes
from postroom.domain.commit import POSITIONS_PER_MAILBOX, Commit, IndexEntry
from postroom.domain.errors import Unavailable

_NULL = pack("!i", -1)
_SIZES = tuple(pack("!i", size) for size in range(4_096))

# PostgreSQL's text can't contain U+0000. It is escaped as two characters, and so is the escape character.
ESCAPE = "\x1a"
INDEXED_CHARS = 255
"""Length of the prefix of custom headers in their index, whose entries are limited in size."""
INDEXED_BYTES = 1_000
"""Size up to which values of the other unbounded headers are in B-tree indexes."""
_ESCAPED_NUL, _ESCAPED_ESCAPE = f"{ESCAPE}0", f"{ESCAPE}1"


class BinaryValue(bytes):
    """A value in PostgreSQL's binary format, of the type that the statement casts it to."""


class PackedDumper(Dumper):
    """Dumper that passes a `BinaryValue` value unchanged."""

    format = Format.BINARY
    oid = 0

    def dump(self, obj: bytes) -> Buffer:
        """Return the value's bytes."""
        return obj


class Kind(NamedTuple):
    """A column type: its name and oid in PostgreSQL, and the function that packs its values without sizes."""

    name: str
    oid: int
    pack: Callable[[Sequence[Any]], Sequence[bytes]]


def _pack_texts(values: Sequence[str]) -> Sequence[bytes]:
    packed = [value.encode() for value in values]
    joined = b"".join(packed)
    if b"\x00" in joined or b"\x1a" in joined:
        return [escape(value).encode() for value in values]
    return packed


_KINDS = {
    int: Kind("bigint", 20, lambda values: [pack("!q", value) for value in values]),
    str: Kind("text", 25, _pack_texts),
    bytes: Kind("bytea", 17, lambda values: values),
}
_UUID_OID = 2950
_UUID_SIZE = pack("!i", 16)


def array(type_: type, values: Sequence[Any]) -> BinaryValue:
    """Return an array of integers, texts or bytes, with None for NULL, to be cast to `kind_name[]`."""
    kind = _KINDS[type_]
    if values.count(None) == len(values):
        return BinaryValue(pack("!iiIii", 1, 1, kind.oid, len(values), 1) + _NULL * len(values))
    return _array(kind, values)


def integers(values: Sequence[int], nulls: int = 0) -> BinaryValue:
    """Return an array of integers, to be cast to `bigint[]`.

    Arguments:
        nulls: number of NULLs after them.
    """
    count = len(values)
    sized = chain.from_iterable(zip(repeat(8), values, strict=False))  # the size of each in bytes
    head = (1, nulls > 0, _KINDS[int].oid, count + nulls, 1)
    return BinaryValue(pack(f"!iiIii{'iq' * count}", *head, *sized) + _NULL * nulls)


def integer(value: int) -> BinaryValue:
    """Return an integer, to be cast to `bigint`."""
    return BinaryValue(pack("!q", value))


def uuid(value: bytes) -> BinaryValue:
    """Return a value of 16 bytes, to be cast to `uuid`."""
    return BinaryValue(value)


def uuids(values: Sequence[bytes]) -> BinaryValue:
    """Return an array of values of 16 bytes each, to be cast to `uuid[]`."""
    head = pack("!iiIii", 1, 0, _UUID_OID, len(values), 1)
    return BinaryValue(_UUID_SIZE.join((head, *values)))


def array_head(type_: type, count: int, *, has_null: bool) -> bytes:
    """Return the header of an array; each item follows as its size (-1 for NULL) and its bytes."""
    return pack("!iiIii", 1, has_null, _KINDS[type_].oid, count, 1)


def kind_name(type_: type) -> str:
    """Return the name of a type in PostgreSQL."""
    return _KINDS[type_].name


def _array(kind: Kind, values: Sequence[Any]) -> BinaryValue:
    has_null = None in values
    packed = iter(kind.pack([value for value in values if value is not None] if has_null else values))
    parts = [pack("!iiIii", 1, has_null, kind.oid, len(values), 1)]
    for value in values:
        if value is None:
            parts.append(_NULL)
        else:
            item = next(packed)
            size = len(item)
            parts += (_SIZES[size] if size < len(_SIZES) else pack("!i", size), item)
    return BinaryValue(b"".join(parts))


def unescape_row(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a row with its text unescaped."""
    if any(type(value) is str and ESCAPE in value for value in row):
        return tuple(unescape(value) if type(value) is str else value for value in row)
    return row


def escape(text: str) -> str:
    """Escape text for storage in PostgreSQL."""
    return text.replace(ESCAPE, _ESCAPED_ESCAPE).replace("\x00", _ESCAPED_NUL)


def unescape(text: str) -> str:
    """Reverse `escape`."""
    return text.replace(_ESCAPED_NUL, "\x00").replace(_ESCAPED_ESCAPE, ESCAPE)


_SQL = statements("postroom.adapters.postgres", "append.sql")


def append_statement(mailbox: int, commits: Sequence[Commit]) -> tuple[str, dict[str, BinaryValue]]:
    """Return the statement that appends commits with their entries of the index, and its values.

    Arguments:
        mailbox: the mailbox's id.
    """
    base = mailbox * POSITIONS_PER_MAILBOX
    values = {
        "id": integer(mailbox),
        "first": integer(commits[0].first),
        "places": integers([base + commit.first for commit in commits]),
        "lasts": integers([commit.last for commit in commits]),
        "epochs": integers([commit.epoch for commit in commits]),
        "ats": integers([commit.at for commit in commits]),
        "chains": array(bytes, [commit.chain for commit in commits]),
        "events": array(bytes, [compress(commit.events) for commit in commits]),
        "envelopes": array(bytes, [compress(commit.envelopes) for commit in commits]),
    }
    entries = [entry for commit in commits for entry in commit.entries]
    last_events = [(event.stream, event.last) for commit in commits for event in commit.last_events]
    last_events += [(entry.stream, entry.last) for entry in entries if entry.last is not None]
    if not entries and not last_events:
        return _SQL["append"], values
    streams = [entry.stream for entry in entries] + [stream for stream, _ in last_events]
    positions = [entry.position for entry in entries] + [last for _, last in last_events]
    versions = [entry.version for entry in entries]
    values["entry_places"] = integers([base + position for position in positions])
    values["streams"] = uuids(streams)
    if versions.count(1) == len(streams):
        return _SQL["append_first_events"], values
    values["versions"] = integers(versions, nulls=len(last_events))
    return _SQL["append_with_versions"], values


def to_commit(row: Sequence[Any]) -> Commit:
    """Return the commit of a row whose first column is its first position.

    Raises: BrokenLog when its events can't be decompressed.
    """
    first, last, epoch, at, chain, events, envelopes = row
    return Commit(first, last, epoch, at, chain, decompress(events, first), decompress_envelopes(envelopes))


def index_rows(entries: Iterable[IndexEntry]) -> Iterator[tuple[bytes, int | None, int]]:
    """Yield the rows of the index, as stream, version and position; the version of a last event is None."""
    for entry in entries:
        yield entry.stream, entry.version, entry.position
        if entry.last is not None:
            yield entry.stream, None, entry.last


def adbc_database(url: str, name: str, settings: Settings) -> Any | None:
    """Return the ADBC handle of a database, which has no connection of its own.

    Return None without the driver, and for a pooler: the driver sets up its sessions outside of transactions.

    Arguments:
        name: application name of its connections.
        settings: settings of the server for its connections.
    """
    return _database(url, name, tuple(settings.items()), os.getpid())


def adbc_connection(database: Any) -> Any:
    """Return a DB-API connection of a handle, which begins a transaction with its first statement."""
    from adbc_driver_manager import AdbcConnection
    from adbc_driver_manager.dbapi import Connection

    return Connection(_SharedHandle(database), AdbcConnection(database))  # type: ignore[arg-type]  # closable


@lru_cache(maxsize=8)
def _database(url: str, name: str, settings: tuple[tuple[str, str], ...], process: int) -> Any | None:
    """Return the handle of a process: a fork must not use its parent's."""
    try:
        from adbc_driver_postgresql import connect as open_database
    except ImportError:
        return None
    with closing(connect(url, name)) as connection:
        if is_pooled(connection):
            return None
    from adbc_driver_manager import Error

    try:
        return open_database(make_conninfo(**server_parameters(url, name, dict(settings))))
    except Error as error:
        reason = str(error).replace(url, shown(url)).partition("\n")[0]
        raise Unavailable(f"The database {shown(url)} can't be read: {reason}") from None


class _SharedHandle:
    """A database handle that a connection keeps, but does not close, because others use it."""

    def __init__(self, database: Any) -> None:
        self._database = database

    def close(self) -> None:
        """Do nothing."""
