"""Pages, the results of all queries that return a part at a time, and their cursors."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Generic, Self, TypeVar

import msgspec

from postroom.domain.arguments import MAX_INT, MAX_PAGE
from postroom.domain.errors import InvalidRequest

T = TypeVar("T")


class Page(msgspec.Struct, Generic[T], frozen=True):
    """Page of the results of a query.

    Arguments:
        items: results, in the order of the query.
        next_cursor: the `cursor` with which the same query returns the next page; None on the last page.
    """

    items: tuple[T, ...]
    next_cursor: str | None = None


class PageCursor(msgspec.Struct, frozen=True, array_like=True):
    """The row after which the next page begins."""

    def encode(self) -> str:
        """Return the cursor as opaque text that is safe in a URL."""
        return urlsafe_b64encode(msgspec.msgpack.encode(self)).decode().rstrip("=")

    @classmethod
    def decode(cls, text: str) -> Self:
        """Return the cursor that `encode` wrote as `text`; raise `InvalidRequest` for any other text."""
        try:
            return msgspec.msgpack.decode(urlsafe_b64decode(text + "=" * (-len(text) % 4)), type=cls)
        except (ValueError, msgspec.MsgspecError):
            raise invalid_cursor(text) from None


def read_position(cursor: object) -> int | None:
    """Return the position that is a cursor of a log, or None without a cursor.

    Raises: InvalidRequest for any other value.
    """
    if cursor is None:
        return None
    if isinstance(cursor, str) and cursor.isascii() and cursor.isdigit() and len(cursor) <= len(str(MAX_INT)):
        position = int(cursor)
        if position <= MAX_INT:
            return position
    raise invalid_cursor(cursor)


def invalid_cursor(cursor: object) -> InvalidRequest:
    """Return the error for a cursor that no page had."""
    return InvalidRequest(f"Invalid cursor {str(cursor)[:40]!r}; use next_cursor of the previous page.")


def check_limit(limit: int) -> None:
    """Raise InvalidRequest unless a page may have so many rows."""
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidRequest(f"The limit is {limit}; give 1 to {MAX_PAGE} rows a page.")
