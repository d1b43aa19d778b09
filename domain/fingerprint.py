"""Fingerprints: dead letters with the same kind of failure have the same fingerprint."""

import re

from blake3 import blake3

_VARIABLE = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"  # UUIDs
    r"|0x[0-9a-f]+"
    r"|\b(?=[a-f]*[0-9])[0-9a-f]{8,}\b"  # hashes and ids in hex, but not words such as "defaced"
    r"|\d+(?:\.\d+)*",
    re.IGNORECASE,
)
_SPACE = re.compile(r"\s+")


def fingerprint(reason: str, error: str | None) -> str:
    """Return a stable hash of a failure, the same for errors that differ only in numbers, UUIDs or hex ids.

    Arguments:
        reason: why the message was dead-lettered, such as `max_attempts`.
        error: the last error as the consumer reported it.

    Returns: 16 hex digits.
    """
    return blake3(f"{reason}\n{normalize(error or '')}".encode()).hexdigest(8)


def normalize(error: str) -> str:
    """Return an error's text in lower case, with single spaces, and `#` for every number, UUID and hex id."""
    return _SPACE.sub(" ", _VARIABLE.sub("#", error)).strip().lower()
