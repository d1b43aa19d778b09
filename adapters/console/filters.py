"""Template filters: times, ages, sizes, numbers and ids."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from markupsafe import Markup, escape

from postroom.application.text import printable

US: Final = 1_000_000
SPACE: Final = "\N{NO-BREAK SPACE}"
DASH: Final = "\N{EN DASH}"
_AGES: Final = ((86_400, "d"), (3_600, "h"), (60, "min"))
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


FILTERS: Final[dict[str, Callable[..., Any]]] = {
    "age": age,
    "ident": ident,
    "moment": moment,
    "number": number,
    "size": size,
    "utc": utc,
    "verbatim": verbatim,
}
