"""Output: tables and lines for people, JSON for machines; results on stdout, everything else on stderr."""

import codecs
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from postroom.adapters.cli.tables import GAP, cell_len, labeled, render
from postroom.application.printable import printable

FALLBACK_SIZE = (80, 24)
"""Columns and lines if stdout is not a terminal and COLUMNS is not set."""
MAX_LABEL = 24
"""Columns of the names of facts beside which values begin; longer names move their value."""


def prepare_streams() -> None:
    """Make the standard streams fit to write any text to, however the process was started.

    Closed streams discard what is written, and characters that the encoding of a stream lacks are escaped as
    in JSON, so that documents of JSON stay valid.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # Its descriptor would be that of the next file to be opened, such as the store.
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

    def error(self, facts: dict[str, Any]) -> None:
        """Write an error: a JSON object for machines, else one line."""
        if self.as_json:
            sys.stderr.write(_encode(facts) + "\n")
        else:
            sys.stderr.write(f"postroom: {printable(facts['message'], multiline=False)}\n")

    def table(
        self, columns: Sequence[str], rows: Iterable[Sequence[object]], *, only_wide: Iterable[str] = ()
    ) -> None:
        """Write a table that fits the terminal; see `postroom.adapters.cli.tables` for kinds of cells.

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
