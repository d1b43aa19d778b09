"""Checks of the values that callers pass: their type, range and length.

Types are checked exactly, because an instance of a subclass may not read back unchanged from a store: a
driver may store `True` as 1, and an enum member by its name.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from postroom.domain.errors import InvalidRequest

T = TypeVar("T")

MAX_INT = (1 << 63) - 1
"""Largest integer that the event logs can store."""
MAX_TEXT_CHARS = 255
"""Characters of a name or key, unless stated otherwise."""
MAX_PAGE = 1_000
"""Items of a page at most."""


def check_type(name: str, value: object, expected: type[T]) -> T:
    """Return `value`, which must be exactly of type `expected`, not of a subclass.

    Arguments:
        name: name of the argument, for the error.

    Raises: InvalidRequest naming the argument and its type.
    """
    if type(value) is not expected:
        raise InvalidRequest(f"{name} must be of type {expected.__name__}, not {type(value).__name__}.")
    return value


def check_int(name: str, value: object, minimum: int = 0, maximum: int = MAX_INT) -> int:
    """Return `value`, which must be an int from `minimum` to `maximum`; see `check_type`."""
    if type(value) is not int:
        return check_type(name, value, int)
    if not minimum <= value <= maximum:
        limit = f"at least {minimum}" if value < minimum else f"at most {maximum}"
        raise InvalidRequest(f"{name} must be {limit}; it was {_format_number(value)}.")
    return value


def check_text(name: str, value: object, minimum: int = 0, maximum: int = MAX_TEXT_CHARS) -> str:
    """Return `value`, which must be a str of `minimum` to `maximum` characters that UTF-8 can encode."""
    if type(value) is not str:
        return check_type(name, value, str)
    if not minimum <= len(value) <= maximum:
        limit = f"at least {minimum}" if len(value) < minimum else f"at most {maximum}"
        unit = "character" if limit.endswith(" 1") else "characters"
        raise InvalidRequest(f"{name} must have {limit} {unit}; it had {len(value)}.")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{name} contains the surrogate U+{ord(value[error.start]):04X} at index {error.start}, "
                "which UTF-8 can't encode."
            ) from None
    return value


def check_any_text(name: str, value: object) -> str:
    """Return `value`, which must be a str of any length that UTF-8 can encode."""
    return check_text(name, value, 0, MAX_INT)


def check_optional_text(name: str, value: object) -> str | None:
    """Return `value`, which must be None or a str of up to 255 characters that UTF-8 can encode."""
    return None if value is None else check_text(name, value)


def check_choice(name: str, value: object, choices: Sequence[str]) -> str:
    """Return `value`, which must be one of `choices`."""
    text = check_type(name, value, str)
    if text not in choices:
        raise InvalidRequest(f"{name} must be one of {', '.join(choices)}.")
    return text


def check_path(name: str, value: object) -> str:
    """Return `value`, which must be text that can name a file."""
    path = check_text(name, value, 1, MAX_INT)
    if "\0" in path:
        raise InvalidRequest(f"{name} must not contain a NUL character.")
    return path


def check_items(name: str, values: object) -> list[object]:
    """Return the items of an iterable other than text, bytes and mappings."""
    if type(values) is list:  # nearly always; a check against an abstract class takes long
        return list(values)
    if isinstance(values, str | bytes | bytearray | Mapping) or not isinstance(values, Iterable):
        raise InvalidRequest(f"{name} must be a list, not of type {type(values).__name__}.")
    return list(values)


def check_ids(name: str, values: object) -> list[str]:
    """Return the ids of an iterable, at most as many as a page has items."""
    items = check_items(name, values)
    if len(items) > MAX_PAGE:
        raise InvalidRequest(f"{name} must have at most {MAX_PAGE} items; it had {len(items)}.")
    return [check_text("The message id", each, 1) for each in items]


def _format_number(number: int) -> str:
    """Return a number as text, or its size if it is too large to print (Python: at most 4,300 digits)."""
    return str(number) if number.bit_length() <= 64 else f"a number of {number.bit_length()} bits"
