"""Pages of the read models: their size, and the cursors that lead from one to the next."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Self

import msgspec

from postroom.domain.arguments import MAX_PAGE
from postroom.domain.errors import InvalidRequest

DEFAULT_LIMIT = 100


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
            raise InvalidRequest(f"Invalid cursor {text!r}; use next_cursor of the previous page.") from None


def check_limit(limit: int) -> None:
    """Raise InvalidRequest unless a page may have so many rows."""
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidRequest(f"The limit is {limit}; give 1 to {MAX_PAGE} rows a page.")
