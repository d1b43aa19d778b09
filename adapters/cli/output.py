"""Output: tables and lines for people, JSON for machines; results on stdout, everything else on stderr."""

import codecs
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from shlex import quote
from typing import Any, TypeVar

import msgspec

from postroom.application.text import printable

T = TypeVar("T")
GAP = "  "
MIN_WIDTH = 4
"""Minimum width of a shortened column."""
READABLE_WIDTH = 8
"""Width that shortened columns keep because ids move to lines of their own."""
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

    Ids that leave too little room for the other columns are on lines of their own above their rows.

    Arguments:
        width: maximum length of a line, exceeded only by an id that is longer; None for full values.
    """
    cells = [[_cell(value, width is None) for value in row] for row in rows]
    values = [[row[index] for row in rows if row[index] is not None] for index in range(len(columns))]
    full_widths = [max(map(cell_len, column)) for column in zip(columns, *cells, strict=True)]
    above = [] if width is None else _above(full_widths, values, width)
    side_by_side = [index for index in range(len(columns)) if index not in above]
    widths = [full_widths[index] for index in side_by_side]
    if width is not None:
        widths = _fit(widths, [_can_shrink(values[index]) for index in side_by_side], width)
    numeric = [bool(values[n]) and all(isinstance(value, int) for value in values[n]) for n in side_by_side]
    yield from (columns[index] for index in above)
    yield _line([columns[index] for index in side_by_side], widths, numeric)
    yield GAP.join("─" * each for each in widths)
    for source, row in zip(rows, cells, strict=True):
        yield from (row[index] for index in above if row[index])
        yield from _lines([source[n] for n in side_by_side], [row[n] for n in side_by_side], widths, numeric)


def labeled(label: str, value: object, width: int | None) -> Iterator[str]:
    """Yield the lines of a label and its value: ids stay whole, and other text is wrapped beside the label.

    Arguments:
        width: maximum length of a line, exceeded only by an id that is longer; None for one line.
    """
    label, text = printable(label, multiline=False), _cell(value, full=True)
    if width is None or cell_len(label + text) <= width:
        yield (label + text).rstrip()
        return
    room = width - cell_len(label)
    if isinstance(value, Id) or room < READABLE_WIDTH:
        yield from _wrap(label.rstrip(), width)
        label, room = "", width
    lines = [text] if isinstance(value, Id) else _wrap(text, room)
    for number, line in enumerate(filter(None, lines)):
        yield " " * cell_len(label) + line if number else label + line


def cell_len(text: str) -> int:
    """Return the number of columns of a terminal that text takes."""
    if text.isascii():
        return len(text)
    from rich import cells  # takes long to load

    return cells.cell_len(text)


def _above(full_widths: Sequence[int], values: Sequence[Sequence[object]], width: int) -> list[int]:
    """Return the columns of ids, the widest first, that leave too little room for the others."""
    needed = [
        min(each, READABLE_WIDTH) if _can_shrink(column) else each
        for each, column in zip(full_widths, values, strict=True)
    ]
    above: list[int] = []
    ids = [n for n, column in enumerate(values) if column and all(isinstance(each, Id) for each in column)]
    for index in sorted(ids, key=lambda index: -full_widths[index]):
        side_by_side = [each for n, each in enumerate(needed) if n not in above]
        if len(side_by_side) == 1 or sum(side_by_side) + len(GAP) * (len(side_by_side) - 1) <= width:
            break
        above.append(index)
    return sorted(above)


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
    if cell_len(text) <= width:
        return text
    from rich.cells import set_cell_size

    return set_cell_size(text, width - 1) + "…"


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


FALLBACK_SIZE = (80, 24)
"""Columns and lines if stdout is not a terminal and COLUMNS is not set."""
MAX_LABEL = 24
"""Maximum width of the column of names in `facts`; a longer name moves its value to the right."""
SELF_EXPLANATORY = ("E_DEFECT", "E_INTERRUPTED", "E_IO", "E_NOT_FOUND", "E_SCHEMA", "E_USAGE")
"""Codes of errors whose text is complete; the command line does not refer to `postroom explain` for them."""


def prepare_streams() -> None:
    """Prepare the standard streams for any text, however the process was started.

    Writes to a closed stream are discarded. Characters that a stream's encoding lacks are escaped as in JSON,
    so that JSON output stays valid.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # Otherwise the next file to be opened, such as the store, would get its descriptor.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - open until the exit
    codecs.register_error("escape_as_in_json", _escape)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="escape_as_in_json")


def _escape(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


class Output:
    """Output of one command.

    Arguments:
        as_json: write JSON.
        wide: show tables with all columns and full values, regardless of the terminal's width.
    """

    def __init__(self, as_json: bool, *, wide: bool = False) -> None:
        self.as_json = as_json
        self.wide = wide

    def json(self, value: Any) -> None:
        """Write one JSON document as a line."""
        sys.stdout.write(_encode(value) + "\n")

    def line(self, text: str = "") -> None:
        """Write a line for people; line breaks in it are escaped."""
        sys.stdout.write(printable(text, multiline=False) + "\n")

    def result(self, value: Any, *lines: str) -> None:
        """Write a result: a JSON document for machines, lines for people."""
        if self.as_json:
            self.json(value)
        else:
            for line in lines:
                self.line(line)

    def payload(self, text: str, is_text: bool) -> None:
        """Write a payload for people: text without its last line feed, or base64."""
        sys.stdout.write((printable(text.removesuffix("\n")) if is_text else f"base64:{text}") + "\n")

    def bytes(self, body: bytes) -> None:
        """Write bytes as they are."""
        sys.stdout.flush()
        sys.stdout.buffer.write(body)

    def flush(self) -> None:
        """Flush stdout."""
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Write a note for people to stderr."""
        if not self.as_json:
            sys.stderr.write(printable(text) + "\n")

    def note_more(self, cursor: str | None) -> None:
        """Tell people how to get the next page of records, if there is one."""
        if cursor is not None:
            self.note(f"There is more; continue with --cursor {quote(cursor)}.")

    def error(self, facts: dict[str, Any]) -> None:
        """Write an error: a JSON object for machines, else one line; a terminal also gets the code."""
        if self.as_json:
            sys.stderr.write(_encode(facts) + "\n")
        else:
            sys.stderr.write(f"postroom: {printable(facts['message'], multiline=False)}\n")
            if sys.stderr.isatty() and facts["code"] not in SELF_EXPLANATORY:
                sys.stderr.write(f"`postroom explain {facts['code']}` says more.\n")

    def table(
        self, columns: Sequence[str], rows: Iterable[Sequence[object]], *, only_wide: Iterable[str] = ()
    ) -> None:
        """Write a table that fits the terminal; a cell may be an `Id`, `Prose` or `Time`.

        Arguments:
            only_wide: columns that only `--wide` shows.
        """
        rows = list(rows)
        if not rows:
            self.line("(none)")
            return
        visible = [index for index, name in enumerate(columns) if self.wide or name not in {*only_wide}]
        shown = [[row[n] for n in visible] for row in rows]
        for line in render([columns[n] for n in visible], shown, self._width):
            self.line(line)

    def records(
        self,
        document: Any,
        columns: Sequence[str],
        records: Iterable[T],
        row: Callable[[T], Sequence[object]],
        *,
        only_wide: Iterable[str] = (),
    ) -> None:
        """Write a JSON document for machines, its records as a table for people; see `table`."""
        if self.as_json:
            self.json(document)
        else:
            self.table(columns, map(row, records), only_wide=only_wide)

    def facts(self, pairs: Iterable[tuple[str, object]]) -> None:
        """Write names and values, one pair a line; pairs without a value are omitted.

        Values that don't fit the terminal are wrapped, and ids are written whole on lines of their own.
        """
        non_empty = [
            (printable(name, multiline=False), value) for name, value in pairs if value not in (None, "", {})
        ]
        widest = min(max((cell_len(name) for name, _ in non_empty), default=0), MAX_LABEL)
        for name, value in non_empty:
            self._write(name + " " * max(widest - cell_len(name), 0) + GAP, value)

    def prose(self, text: str, label: str = "") -> None:
        """Write sentences, wrapped to the terminal's width beside a label such as a number or an indent."""
        self._write(label, text)

    def _write(self, label: str, value: object) -> None:
        for line in labeled(label, value, self._width):
            self.line(line)

    @property
    def _width(self) -> int | None:
        """Return the maximum length of a line, or None for any."""
        return None if self.wide else shutil.get_terminal_size(FALLBACK_SIZE).columns

    def confirm(self, question: str, refusal: Exception) -> bool:
        """Ask on stderr, and return whether the answer is yes; raise `refusal` if nobody can be asked."""
        if self.as_json or not sys.stdin.isatty():
            raise refusal
        import typer

        return typer.confirm(question, err=True)

    @contextmanager
    def progress(self, label: str, total: float | None = None) -> Iterator[Callable[[float, str], None]]:
        """Show a progress bar on stderr if it is a terminal; yield the function that updates it."""
        if self.as_json or not sys.stderr.isatty():
            yield lambda done, detail: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[detail]}", markup=False),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=total, detail="")
            yield lambda done, detail: bar.update(task, completed=done, detail=detail)


def _encode(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # a lone surrogate, as in the name of a file that is not valid UTF-8
        return json.dumps(msgspec.to_builtins(value))
