"""Messages partitioned into files by day and topic, with bounded memory and open files.

Folders follow the naming of Hive partitions, which Spark, Polars and DuckDB read.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import NamedTuple, Protocol

from postroom.application.ports.export import ExportedMessage
from postroom.domain.errors import InvalidRequest

BUFFER_BYTES = 64 << 20
"""Limit on the buffered envelopes and payloads."""
MESSAGE_BYTES = 2_000
"""Estimated size of a message without its envelope and payload."""
OPEN_FILES = 32
MAX_NAME_BYTES = 255
ESCAPED = frozenset("\"#%'*/:=?\\{[]^") | {chr(code) for code in (*range(1, 32), 127)}
"""Characters that Hive and Spark escape in the name of a folder."""
DAY_MS = 86_400_000
_EPOCH = date(1970, 1, 1)


class File(Protocol):
    """A file that is being written."""

    def write(self, messages: Sequence[ExportedMessage]) -> None:
        """Add messages."""

    def close(self) -> None:
        """Finish the file."""


class Part(NamedTuple):
    """A file that was written.

    Arguments:
        values: the values of its partition columns, which the file itself omits.
    """

    path: Path
    values: dict[str, str]
    messages: int


class Partitions:
    """Writer of messages, oldest first, into as few files as bounded memory allows.

    Messages are buffered until their day ends or the buffer is full. Then the largest topics are written
    first; at most `OPEN_FILES` files stay open, and the least recently used is closed first.

    Arguments:
        folder: parent of the partitions' folders, such as `day=2026-11-20/topic=github.push`.
        suffix: end of the file names, such as `.csv` in `part-0.csv`.
        by_topic: partition by day and topic; else by day only.
        open_file: creates the file at a path.
    """

    def __init__(self, folder: Path, suffix: str, by_topic: bool, open_file: Callable[[Path], File]) -> None:
        self._folder = folder
        self._suffix = suffix
        self._by_topic = by_topic
        self._open_file = open_file
        self._day = date.min
        self._buffers: dict[str, list[ExportedMessage]] = {}
        self._bytes: Counter[str] = Counter()
        self._open: dict[str, _OpenPart] = {}
        self._files: Counter[str] = Counter()
        self._parts: list[Part] = []

    def write(self, messages: Sequence[ExportedMessage]) -> None:
        """Add messages; raise InvalidRequest for a topic whose folder name would be too long."""
        for each in messages:
            day = day_of(each.message.timestamp)
            if day != self._day:
                self._finish_day()
                self._day = day
            topic = each.message.topic if self._by_topic else ""
            self._buffers.setdefault(topic, []).append(each)
            self._bytes[topic] += len(each.message.envelope_blob) + len(each.payload or b"") + MESSAGE_BYTES
        if self._bytes.total() > BUFFER_BYTES:
            self._write_largest()

    def close(self) -> list[Part]:
        """Write the buffered messages, close every file and return them all."""
        self._finish_day()
        return self._parts

    def abandon(self) -> None:
        """Close and remove every file."""
        for topic in list(self._open):
            self._close(topic)
        for part in self._parts:
            part.path.unlink(missing_ok=True)

    def _finish_day(self) -> None:
        for topic in sorted(self._buffers):
            self._flush(topic)
            self._close(topic)
        for topic in list(self._open):
            self._close(topic)
        self._files.clear()

    def _write_largest(self) -> None:
        for topic, _ in self._bytes.most_common():
            self._flush(topic)
            if self._bytes.total() <= BUFFER_BYTES // 2:
                return

    def _flush(self, topic: str) -> None:
        # Reinserted at the end: the dict is in order of last use.
        part = self._open.pop(topic, None) or self._open_part(topic)
        self._open[topic] = part
        messages = self._buffers.pop(topic)
        del self._bytes[topic]
        part.file.write(messages)
        part.messages += len(messages)

    def _open_part(self, topic: str) -> "_OpenPart":
        while len(self._open) >= OPEN_FILES:
            self._close(next(iter(self._open)))
        values = {"day": self._day.isoformat(), **({"topic": topic} if self._by_topic else {})}
        folder = self._folder.joinpath(*(_folder_name(*pair) for pair in values.items()))
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"part-{self._files[topic]}{self._suffix}"
        self._files[topic] += 1
        return _OpenPart(self._open_file(path), path, values)

    def _close(self, topic: str) -> None:
        part = self._open.pop(topic)
        self._parts.append(Part(part.path, part.values, part.messages))
        part.file.close()


class _OpenPart:
    def __init__(self, file: File, path: Path, values: dict[str, str]) -> None:
        self.file = file
        self.path = path
        self.values = values
        self.messages = 0


def day_of(timestamp: int) -> date:
    """Return the day (UTC) of a time in ms."""
    return _EPOCH + timedelta(days=timestamp // DAY_MS)


def _folder_name(column: str, value: str) -> str:
    """Return the name of a partition's folder; raise InvalidRequest when it would be too long."""
    escaped = "".join(f"%{ord(each):02X}" if each in ESCAPED else each for each in value)
    name = f"{column}={escaped}"
    if len(name.encode()) > MAX_NAME_BYTES:
        raise InvalidRequest(
            f"The {column} {value!r} is too long for the name of a folder; use --by day, or select "
            "other topics with --topic."
        )
    return name
