"""Conversion of columns to PostgreSQL's binary format, and of text to and from what it can store.

One `INSERT ... SELECT FROM unnest(...)` inserts any number of rows in one round trip. Packing the arrays here
takes a fifth of psycopg's time, which adapts items one by one (ADR 0010).
"""

from collections.abc import Callable, Sequence
from itertools import chain, repeat
from struct import pack
from typing import Any, NamedTuple

from psycopg.adapt import Buffer, Dumper
from psycopg.pq import Format

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
