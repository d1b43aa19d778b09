"""Texts for people: printable characters, nouns with their numbers, and times."""

import re
from datetime import UTC, datetime

import msgspec

_UNSAFE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters, line and paragraph separators, bidirectional overrides, and lone surrogates."""


def printable(text: str, *, multiline: bool = True) -> str:
    """Return text with control characters, bidirectional overrides and lone surrogates escaped.

    Arguments:
        multiline: keep line feeds and tabs.
    """
    safe_text = _UNSAFE.sub(lambda match: _escape(match[0]), text)
    return safe_text if multiline else safe_text.replace("\n", "\\n").replace("\t", "\\t")


def visible(text: str) -> str:
    """Return text in which characters that people can't see, such as directions and tags, are escaped.

    Language models read these characters, so they can show a model text that is hidden from people. Line
    feeds and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in "\n\t" else _escape(each) for each in text)


def _escape(character: str) -> str:
    code = ord(character)
    if code > 0xFFFF:
        return f"\\U{code:08x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def from_rfc3339(text: str) -> datetime:
    """Return a time in RFC 3339: a date alone is its midnight, a time without offset is UTC.

    Raises: ValueError for anything else.
    """
    time = datetime.fromisoformat(text)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)\Z", re.ASCII)
UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def duration_ms(text: str) -> int | None:
    """Return a duration such as `500ms`, `5s`, `7d` or `0` in ms; None for anything else."""
    if text.strip() == "0":
        return 0
    match = _DURATION.match(text.strip())
    if match is None:
        return None
    value = float(match[1]) * UNITS_MS[match[2]]
    return round(min(value, 1e30))


def pluralize(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun, as in `1 event` or `2,000 events`.

    Arguments:
        plural: plural of `noun`; None adds an `s`.
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def parse_weights(value: object) -> dict[str, int] | None:
    """Return weights by key from a mapping, a JSON object, or text such as `a:3,b:2`; None for others."""
    try:
        if not isinstance(value, str):
            return msgspec.convert(value, dict[str, int])
        if value.startswith("{"):
            return msgspec.json.decode(value, type=dict[str, int])
        pairs = [pair.rpartition(":") for pair in value.split(",") if value]
        weights = {key: int(weight) for key, _, weight in pairs}
    except ValueError:
        return None
    return weights if len(weights) == len(pairs) else None


def span(us: int) -> str:
    """Return a duration in its largest unit."""
    for unit, size in (("d", 86_400_000_000), ("h", 3_600_000_000), ("min", 60_000_000), ("s", 1_000_000)):
        if us >= size:
            return f"{us / size:.3g} {unit}"
    return f"{us / 1_000:.3g} ms"
