"""Strict JSON: what msgspec's decoder lets through and the contract does not."""

import json
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from postroom.domain.errors import InvalidRequest

T = TypeVar("T")

MAX_DETAIL_CHARS = 300
"""Maximum length of the decoder's message, which may quote a name of any length from the body."""


def decode(body: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    """Return a JSON body as the decoder's type.

    Raises: InvalidRequest when it is not JSON, has fields that are unknown, missing, duplicate, of a wrong
        type or out of range, or text with NUL characters.
    """
    try:
        value = decoder.decode(body)
        # The decoder has checked structure and depth, so this pass can't recurse far.
        _CHECKER.decode(body.decode())
    except InvalidRequest:
        raise
    except (ValueError, RecursionError, MemoryError) as error:
        raise InvalidRequest(f"The body is invalid: {describe(error)}.") from None
    return value


def describe(error: Exception) -> str:
    """Return the error of a decoder as one line of bounded length, without a full stop."""
    detail = (str(error) or type(error).__name__)[:MAX_DETAIL_CHARS].rstrip(".")
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in detail)


def _check_object(pairs: Sequence[tuple[str, Any]]) -> None:
    """Check the members of an object; its value is not needed."""
    names = set()
    for name, value in pairs:
        if name in names:
            raise InvalidRequest(f"The body is invalid: the name {name[:80]!r} occurs twice in an object.")
        names.add(name)
        _check_text(name)
        for text in value if type(value) is list else (value,):
            if type(text) is str:
                _check_text(text)


def _check_text(text: str) -> None:
    if "\0" in text:
        raise InvalidRequest("The body is invalid: text contains a NUL character.")


_CHECKER = json.JSONDecoder(object_pairs_hook=_check_object)
