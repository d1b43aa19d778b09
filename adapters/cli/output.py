"""Output: tables and lines for people, JSON for machines; results on stdout, everything else on stderr."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

PIPE_WIDTH = 500
"""Columns where no terminal says how wide it is: enough never to cut an id."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Output:
    """Write what a command answers."""

    def __init__(self, as_json: bool) -> None:
        """Take whether machines read this."""
        self.as_json = as_json

    def json(self, value: Any) -> None:
        """Write one JSON document on a line of its own."""
        sys.stdout.write(msgspec.json.encode(value).decode() + "\n")

    def line(self, text: str = "") -> None:
        """Write a line for people."""
        sys.stdout.write(without_control(text) + "\n")

    def bytes(self, body: bytes) -> None:
        """Write bytes as they are."""
        sys.stdout.flush()
        sys.stdout.buffer.write(body)

    def flush(self) -> None:
        """See that all that was written has left this process."""
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Tell people something beside the result."""
        if not self.as_json:
            sys.stderr.write(without_control(text) + "\n")

    def error(self, facts: dict[str, Any]) -> None:
        """Tell what went wrong: a JSON object for machines, else one line."""
        if self.as_json:
            sys.stderr.write(msgspec.json.encode(facts).decode() + "\n")
        else:
            sys.stderr.write(f"postroom: {without_control(facts['message'])}\n")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Write a table; numbers stand to the right, None is left empty."""
        cells = [[_cell(value) for value in row] for row in rows]
        if not cells:
            self.line("(none)")
            return
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for index, name in enumerate(columns):
            numeric = all(_is_number(row[index]) for row in cells)
            table.add_column(Text(name), justify="right" if numeric else "left", overflow="fold")
        for row in cells:
            table.add_row(*map(Text, row))
        Console(file=sys.stdout, width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False).print(
            table
        )

    def facts(self, pairs: Iterable[tuple[str, object]]) -> None:
        """Write names and values, a line each; those without a value are left out."""
        present = [(name, _cell(value)) for name, value in pairs if value not in (None, "", {})]
        width = max((len(name) for name, _ in present), default=0)
        for name, value in present:
            self.line(f"{name:<{width}}  {value}")

    @contextmanager
    def progress(self, label: str, total: float | None = None) -> Iterator[Callable[[float, str], None]]:
        """Show a bar on stderr, on a terminal only, while the context lasts; yield what moves it."""
        if self.as_json or not sys.stderr.isatty():
            yield lambda done, detail: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=total, detail="")
            yield lambda done, detail: bar.update(task, completed=done, detail=detail)


def without_control(text: str) -> str:
    """Return text with control characters spelled out, so that no message can take a terminal over."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return "" if value is None else without_control(str(value))


def _is_number(text: str) -> bool:
    return not text or text.replace(",", "").isdecimal()
