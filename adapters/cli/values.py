"""Values on the command line: durations, sizes, times, `NAME=VALUE` pairs, payloads."""

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import BinaryIO

from postroom.domain.errors import InvalidRequest

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)\Z", re.ASCII)
_UNITS_BYTES = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kKMGT]i?B|B)\Z", re.ASCII)
_NUMBER = re.compile(r"-?\d{1,20}\Z", re.ASCII)


class WrongUsage(InvalidRequest):
    """An argument, option or setting is invalid; the message names it."""


def parse_integer(text: str) -> int | None:
    """Return an integer of ASCII digits, 20 at most, or None for anything else."""
    return int(text) if _NUMBER.match(text) else None


def parse_position(text: str) -> int | None:
    """Return an integer that is not negative, or None; see `parse_integer`."""
    return None if text.startswith("-") else parse_integer(text)


def parse_duration(text: str) -> int:
    """Return a duration such as `500ms`, `5s` or `7d` in ms; raise `WrongUsage` for anything else."""
    if text.strip() == "0":
        return 0
    match = _DURATION.match(text.strip())
    if match is None:
        raise WrongUsage(
            f"{text!r} is not a duration; write a number and a unit, such as 500ms, 5s, 2m, 1h or 7d."
        )
    return _whole(text, float(match[1]) * _UNITS_MS[match[2]])


def format_duration(ms: float) -> str:
    """Return a duration, rounded, in the largest unit that fits."""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000)):
        if ms >= size:
            return f"{ms / size:.3g}{unit}" if ms < 1_000 * size else f"{ms / size:.0f}{unit}"
    return f"{ms:.0f}ms"


def parse_size(text: str) -> int:
    """Return a size such as `10GB` (10^10 bytes) in bytes; raise `WrongUsage` for anything else."""
    match = _SIZE.match(text.strip())
    if match is None or match[2] not in _UNITS_BYTES:
        raise WrongUsage(
            f"{text!r} is not a size; write a number and a unit, such as 500kB, 64MB or 10GB (powers of "
            "1,000), or 64MiB or 10GiB (of 1,024)."
        )
    return _whole(text, float(match[1]) * _UNITS_BYTES[match[2]])


def _whole(text: str, value: float) -> int:
    if value >= 1 << 63:
        raise WrongUsage(f"{text[:40]!r} is too large.")
    return round(value)


def exact_duration(ms: int) -> str:
    """Return a duration in the largest unit that expresses it exactly."""
    unit, size = next(each for each in reversed(_UNITS_MS.items()) if ms % each[1] == 0)
    return f"{ms // size}{unit}"


def exact_size(size: int) -> str:
    """Return a size in the unit that expresses it exactly in the fewest characters."""
    return min((f"{size // each}{unit}" for unit, each in _UNITS_BYTES.items() if size % each == 0), key=len)


def parse_time(text: str, now: datetime) -> int:
    """Return a point in time in ms since 1970 UTC.

    Arguments:
        text: RFC 3339 (a date alone is its midnight, a time without offset is UTC), ms since 1970, or an age
            such as `2h`, counted back from `now`.

    Raises: WrongUsage for anything else.
    """
    number = parse_integer(text)
    if number is not None:
        return number
    if _DURATION.match(text):
        return int(now.timestamp() * 1_000) - parse_duration(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise WrongUsage(
            f"{text!r} is not a time; write 2026-01-31T08:00:00Z, ms since 1970, or an age such as 2h."
        ) from None
    return round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1_000)


def parse_pairs(texts: Iterable[str], option: str) -> dict[str, str]:
    """Return `NAME=VALUE` arguments as a mapping.

    Arguments:
        option: name of the option or argument, for the message.

    Raises: WrongUsage for an argument without a name, and for a repeated name.
    """
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise WrongUsage(f"{option} {text!r} is not NAME=VALUE.")
        if name in pairs:
            raise WrongUsage(f"{option} {name} is repeated; pass each name once.")
        pairs[name] = value
    return pairs


def read_words(arguments: list[str], stdin: BinaryIO) -> list[str]:
    """Return the arguments, with `-` replaced by the whitespace-separated words of standard input."""
    words: list[str] = []
    for argument in arguments:
        words += stdin.read().decode().split() if argument == "-" else [argument]
    return words


def readable(payload: bytes) -> tuple[str, bool]:
    """Return a payload as text and True, or in base64 and False if it is not UTF-8."""
    try:
        return payload.decode(), True
    except UnicodeDecodeError:
        from base64 import b64encode

        return b64encode(payload).decode(), False
