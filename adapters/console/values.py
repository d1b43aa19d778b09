"""Values as pages write and read them: filters of templates, fields of forms, and times."""

import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Protocol, TypedDict

from markupsafe import Markup, escape

from postroom.application.queries.mailbox_past import to_us
from postroom.application.text import from_rfc3339, printable
from postroom.domain.errors import InvalidRequest
from postroom.domain.policy import DAY_MS, MAX_DURATION_MS

US: Final = 1_000_000
SPACE: Final = "\N{NO-BREAK SPACE}"
DASH: Final = "\N{EN DASH}"
_AGES: Final = ((86_400, "d"), (3_600, "h"), (60, "min"))
_CELL: Final = re.compile(r"<(tr|td|th)(?=[ >])")
"""Tags of rows and cells; text of users contains none, as templates escape it."""
_SIZES: Final = ("B", "kB", "MB", "GB", "TB")


def finalize(value: Any) -> Any:
    """Return a value as templates print it: text with control and bidirectional characters escaped."""
    if value is None:
        return ""
    return printable(value) if type(value) is str else value


def verbatim(value: str) -> Markup:
    """Return text unchanged, for the values of form fields only."""
    return Markup(escape(value))


def number(value: float | None) -> str:
    """Return a number with thousands separators."""
    if value is None:
        return DASH
    is_small = abs(value) < 10 and value != int(value)
    return f"{value:,.1f}" if is_small else f"{value:,.0f}"


def age(microseconds: int | None) -> str:
    """Return a duration in µs in its two largest units, with no-break spaces."""
    if microseconds is None:
        return DASH
    seconds = max(0, microseconds // US)
    for index, (length, unit) in enumerate(_AGES):
        if seconds >= length:
            whole, rest = divmod(seconds, length)
            smaller, name = (*[(size, text) for size, text in _AGES[index + 1 :]], (1, "s"))[0]
            part = rest // smaller
            return f"{whole}{SPACE}{unit} {part}{SPACE}{name}" if part else f"{whole}{SPACE}{unit}"
    return f"{seconds}{SPACE}s"


def size(value: int | None) -> str:
    """Return a number of bytes in a decimal unit."""
    if value is None:
        return DASH
    amount, index = float(value), 0
    while amount >= 1_000 and index < len(_SIZES) - 1:
        amount, index = amount / 1_000, index + 1
    return (
        f"{amount:,.0f} {_SIZES[index]}" if index == 0 or amount >= 100 else f"{amount:,.1f} {_SIZES[index]}"
    )


def utc(microseconds: int | None) -> str:
    """Return a time in µs since 1970 UTC as `2026-01-31 12:00:00.123`."""
    if microseconds is None:
        return DASH
    try:
        moment = datetime.fromtimestamp(microseconds / US, UTC)
    except (OverflowError, OSError, ValueError):
        return str(microseconds)
    return moment.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def moment(text: str) -> str:
    """Return a time given as ISO 8601 text in UTC in the format of `utc`."""
    try:
        return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    except ValueError:
        return text


def ident(text: str) -> Markup:
    """Return an id as an element that is never truncated."""
    shown = escape(printable(text, multiline=False))
    return Markup('<code class="ident">{}</code>').format(shown)


def short(text: str, length: int) -> Markup:
    """Return the beginning of a text, with the whole of it in the title."""
    shown = printable(text, multiline=False)
    if len(shown) <= length:
        return escape(shown)
    return Markup('<span title="{}">{}…</span>').format(printable(text), shown[: length - 1])


def label_cells(rows: str, headings: Sequence[Any]) -> Markup:
    """Return the rows of a table whose cells have their headings as labels, for windows with one column.

    Arguments:
        rows: HTML without nested tables.
        headings: of the columns; see the macro `table`.
    """
    parts = _CELL.split(rows)
    column = 0
    for index in range(1, len(parts), 2):
        tag = parts[index]
        if tag == "td":  # a th is the title of the row's card
            heading = headings[column] if column < len(headings) else ""
            parts[index] = f'td data-label="{escape(getattr(heading, "text", heading))}"'
        parts[index] = "<" + parts[index]
        column = 0 if tag == "tr" else column + 1
    return Markup("".join(parts))


def span(ms: float | None) -> str:
    """Return a duration in ms in its largest unit."""
    if ms is None:
        return DASH
    for length, unit in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s")):
        if ms >= length:
            return f"{ms / length:.3g}{SPACE}{unit}"
    return f"{ms:.3g}{SPACE}ms"


FILTERS: Final[dict[str, Callable[..., Any]]] = {
    "age": age,
    "ident": ident,
    "label_cells": label_cells,
    "moment": moment,
    "number": number,
    "short": short,
    "size": size,
    "span": span,
    "utc": utc,
    "verbatim": verbatim,
}


_AGE = re.compile(r"(\d{1,9})(s|m|h|d)\Z", re.ASCII)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def read_time(name: str, text: str, now: datetime) -> int:
    """Return a point in time in µs since 1970 UTC.

    Arguments:
        name: name of the field, for the error.
        text: RFC 3339 (a date alone is its midnight, a time without offset is UTC), or an age such as `2h`.

    Raises: InvalidRequest for anything else.
    """
    try:
        age = _AGE.match(text.strip())
        if age is not None:
            time = now - timedelta(**{_UNITS[age[2]]: int(age[1])})
        else:
            time = from_rfc3339(text.strip())
        return to_us(time)
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"{name} is {text[:40]!r}, which is not a time; write 2026-01-31T08:00:00Z, or an age such as 2h."
        ) from None


class Due(TypedDict, total=False):
    """Time of a delivery; see `Mailbox.reschedule_messages`."""

    deliver_after_ms: int
    at: datetime


def read_due(name: str, text: str) -> Due:
    """Return when to deliver a message: after a duration such as `2h`, or at a time, in UTC without offset.

    Raises: InvalidRequest for anything else.
    """
    try:
        return {"at": from_rfc3339(text.strip())}
    except ValueError:
        return {"deliver_after_ms": read_duration(name, text)}


def read_duration(name: str, text: str) -> int:
    """Return a duration such as `2h` in ms; raise InvalidRequest for anything else."""
    match = _AGE.match(text.strip())
    if match is None:
        raise InvalidRequest(
            f"{name} is {text[:40]!r}, which is not a duration; write a number and a unit, such as 30s, 5m, "
            "2h or 7d."
        )
    duration = timedelta(**{_UNITS[match[2]]: int(match[1])}) // timedelta(milliseconds=1)
    if duration > MAX_DURATION_MS:
        raise InvalidRequest(
            f"{name} is {text.strip()}, which is longer than {MAX_DURATION_MS // DAY_MS:,} days; write a "
            "shorter one."
        )
    return duration


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
