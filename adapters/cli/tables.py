"""Tables for terminals: ids stay whole, times are shown as ages, other text is shortened to fit."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from rich.cells import cell_len, set_cell_size

from postroom.application.printable import printable

GAP = "  "
MIN_WIDTH = 4
"""Minimum width of a shortened column."""
_AGES = (("y", 365 * 86_400), ("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))


class Id(str):
    """Text that is never shortened, such as a message's id."""

    __slots__ = ()


class Prose(str):
    """Text that is wrapped if it does not fit."""

    __slots__ = ()


class Time:
    """A point in time, shown as an age, or in full with `--wide`.

    Arguments:
        at: a datetime, RFC 3339, or µs since 1970 UTC.
        as_of: the time from which the age is counted; None for the current time.
    """

    def __init__(self, at: datetime | str | int, as_of: datetime | str | int | None = None) -> None:
        self.at = _datetime(at)
        self.as_of = datetime.now(UTC) if as_of is None else _datetime(as_of)

    def __str__(self) -> str:
        text = self.at.isoformat(timespec="microseconds" if self.at.microsecond else "seconds")
        return text.replace("+00:00", "Z")

    @property
    def age(self) -> str:
        """Return how long ago it was, as in `5m`, or `in 5m` for the future."""
        seconds = int((self.as_of - self.at).total_seconds())
        unit, size = next((each for each in _AGES if abs(seconds) >= each[1]), _AGES[-1])
        text = f"{abs(seconds) // size}{unit}"
        return f"in {text}" if seconds < 0 else text


def time_or_text(text: str) -> "Time | str":
    """Return a `Time` for RFC 3339 text, and any other text unchanged."""
    try:
        return Time(text)
    except ValueError:
        return text


def render(columns: Sequence[str], rows: Sequence[Sequence[object]], width: int | None) -> Iterator[str]:
    """Yield the lines of a table; numbers are right-aligned, None is an empty cell.

    Arguments:
        width: maximum length of a line, exceeded only if the ids need more; None for full values.
    """
    cells = [[_cell(value, width is None) for value in row] for row in rows]
    values = [[row[index] for row in rows if row[index] is not None] for index in range(len(columns))]
    full_widths = [max(map(cell_len, column)) for column in zip(columns, *cells, strict=True)]
    widths = full_widths if width is None else _fit(full_widths, [*map(_can_shrink, values)], width)
    numeric = [bool(column) and all(isinstance(value, int) for value in column) for column in values]
    yield _line(columns, widths, numeric)
    yield GAP.join("─" * each for each in widths)
    for source, row in zip(rows, cells, strict=True):
        yield from _lines(source, row, widths, numeric)


def _lines(
    source: Sequence[object], row: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]
) -> Iterator[str]:
    wrapped_cells = [
        _wrap(text, width) if isinstance(value, Prose) else [text]
        for value, text, width in zip(source, row, widths, strict=True)
    ]
    for number in range(max(map(len, wrapped_cells))):
        yield _line([each[number] if number < len(each) else "" for each in wrapped_cells], widths, numeric)


def _line(texts: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    aligned_cells = zip(
        (_shorten(*each) for each in zip(texts, widths, strict=True)), widths, numeric, strict=True
    )
    return GAP.join(
        " " * (width - cell_len(text)) + text if right else text + " " * (width - cell_len(text))
        for text, width, right in aligned_cells
    ).rstrip()


def _cell(value: object, full: bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Time) and not full:
        return value.age
    return "" if value is None else printable(str(value), multiline=False)


def _can_shrink(values: Sequence[object]) -> bool:
    return not values or not all(isinstance(value, Id | Time | int) for value in values)


def _fit(full_widths: Sequence[int], shrinkable: Sequence[bool], width: int) -> list[int]:
    """Return column widths that fit; the widest shrinkable column is shortened first."""
    room = width - len(GAP) * (len(full_widths) - 1)
    widths = [min(each, width) if can else each for each, can in zip(full_widths, shrinkable, strict=True)]
    while sum(widths) > room:
        widest = max((each for each, can in zip(widths, shrinkable, strict=True) if can), default=0)
        if widest <= MIN_WIDTH:
            break
        widths[next(n for n, can in enumerate(shrinkable) if can and widths[n] == widest)] -= 1
    return widths


def _shorten(text: str, width: int) -> str:
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def _wrap(text: str, width: int) -> list[str]:
    """Return text as lines of at most `width` columns, broken at spaces where possible."""
    lines = [""]
    for word in text.split(" "):
        line = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(line) <= width:
            lines[-1] = line
            continue
        lines.append("")
        for character in word:
            if cell_len(lines[-1] + character) > width:
                lines.append("")
            lines[-1] += character
    return lines if lines[0] else lines[1:]


def _datetime(at: datetime | str | int) -> datetime:
    if isinstance(at, int):
        return datetime.fromtimestamp(at / 1_000_000, UTC)
    time = datetime.fromisoformat(at) if isinstance(at, str) else at
    return time if time.tzinfo else time.replace(tzinfo=UTC)
