"""Values of form fields and URL parameters."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final, Protocol

from postroom.adapters.console.times import read_time
from postroom.domain.errors import InvalidRequest

MS: Final = 1_000
MAX_DIGITS: Final = 18


class Fields(Protocol):
    """Fields of a form or parameters of a link."""

    def getlist(self, key: str, /) -> Iterable[object]:
        """Return all values of a field."""


def text_of(fields: Fields, name: str) -> str:
    """Return the text values of a field, one per line."""
    return "\n".join(value for value in fields.getlist(name) if isinstance(value, str))


def split_lines(text: str) -> tuple[str, ...]:
    """Return the lines of a text that are not blank, stripped."""
    return tuple(line for each in text.splitlines() if (line := each.strip()))


def split_pairs(name: str, text: str) -> dict[str, str]:
    """Return a mapping of the lines of a text, each of the form `NAME=VALUE`.

    Raises: InvalidRequest for a malformed line and for a name that occurs twice.
    """
    pairs: dict[str, str] = {}
    for line in split_lines(text):
        key, equals, value = line.partition("=")
        if not equals or not key:
            raise InvalidRequest(f"{name} has the line {line[:80]!r}; write NAME=VALUE.")
        if key in pairs:
            raise InvalidRequest(f"{name} has {key[:80]!r} twice.")
        pairs[key] = value
    return pairs


def parse_number(name: str, text: str) -> int | None:
    """Return a whole number, or None for blank text; raise InvalidRequest for other text."""
    digits = text.strip()
    if not digits:
        return None
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= MAX_DIGITS):
        raise InvalidRequest(f"{name} is {digits[:40]!r}; write a whole number.")
    return int(digits)


def parse_time(name: str, text: str) -> int | None:
    """Return a time in µs since 1970 UTC, or None for blank text; see `read_time`."""
    return read_time(name, text, datetime.now(UTC)) if text.strip() else None


def write_time(us: int | None) -> str:
    """Return a time as text that `parse_time` accepts."""
    return "" if us is None else datetime.fromtimestamp(us / 1e6, UTC).isoformat().replace("+00:00", "Z")
