"""Cause, example and remedy of each error code, as commands, servers and the documentation show them."""

from collections.abc import Mapping
from functools import cache
from pkgutil import get_data

import msgspec

from postroom.domain.errors import NotFound
from postroom.domain.names import describe_choices

HTTP_FOLDER = "/v1/errors/"
"""Path below which a server over HTTP has the page of each code."""


class ErrorEntry(msgspec.Struct, frozen=True):
    """What a code means; texts are sentences on one line.

    Arguments:
        title: the meaning in a few words.
        cause: when the error is raised, and what it has changed.
        example: a text that Postroom writes.
        remedy: what to do.
        see: pages below `docs/`, with anchors.
    """

    title: str
    cause: str
    example: str
    remedy: str
    see: tuple[str, ...] = ()


@cache
def error_entries() -> Mapping[str, ErrorEntry]:
    """Return the entries by code, in the order of the documentation."""
    import tomllib  # slow to import, and errors are rarely explained

    content = tomllib.loads((get_data(__package__, "error_entries.toml") or b"").decode())
    entries = msgspec.convert(content, dict[str, ErrorEntry])
    return {code: _on_one_line(entry) for code, entry in entries.items()}


def _on_one_line(entry: ErrorEntry) -> ErrorEntry:
    texts = {name: " ".join(getattr(entry, name).split()) for name in ("cause", "example", "remedy")}
    return msgspec.structs.replace(entry, **texts)


def find_error_entry(code: str) -> tuple[str, ErrorEntry]:
    """Return a code as it is spelled, and its entry.

    Arguments:
        code: in any case, with or without the prefix `E_`.

    Raises: NotFound naming the closest codes.
    """
    entries = error_entries()
    for spelling in (code.upper(), f"E_{code.upper()}"):
        if spelling in entries:
            return spelling, entries[spelling]
    raise NotFound(f"There is no error code {code[:80]}; {describe_choices(code.upper(), entries)}")


def write_error_entry(code: str, entry: ErrorEntry) -> str:
    """Return an entry as plain text, a paragraph for each part."""
    parts = (f"Cause: {entry.cause}", f"Example: {entry.example}", f"Remedy: {entry.remedy}")
    return "\n\n".join((f"{code}: {entry.title}", *parts)) + "\n"
