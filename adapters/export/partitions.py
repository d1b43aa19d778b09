"""Messages spread over files by day and topic, with few files open and little in memory.

Folders are named as Hive names them and Spark, Polars and DuckDB read them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import NamedTuple, Protocol

from postroom.application.ports.export import ExportedMessage
from postroom.domain.errors import InvalidRequest

HELD_BYTES = 64 << 20
"""What is held in memory before it is written, counted in envelopes and payloads."""
MESSAGE_BYTES = 2_000
"""What a message takes besides."""
OPEN_FILES = 32
MAX_NAME_BYTES = 255
ESCAPED = frozenset("\"#%'*/:=?\\{[]^") | {chr(code) for code in (*range(1, 32), 127)}
"""What Hive and Spark escape in the name of a folder."""
DAY_MS = 86_400_000
_EPOCH = date(1970, 1, 1)


class File(Protocol):
    """A file that is being written."""

    def write(self, messages: Sequence[ExportedMessage]) -> None:
        """Add messages."""

    def close(self) -> None:
        """Finish the file."""


class Part(NamedTuple):
    """Describe a file that was written.

    Arguments:
        values: by column, those that all its messages have and that are not in the file.
    """

    path: Path
    values: dict[str, str]
    messages: int


class Partitions:
    """Write messages, which come oldest first, into as few files as bounded memory allows.

    Messages gather until their day is over or memory is used up. Then those of the largest topics are
    written; their files stay open for more, unless others need one of the few that may be.

    Arguments:
        folder: in which those of the partitions are made, such as `day=2026-11-20/topic=github.push`.
        suffix: what the names of files end with, which begin with `part-0`.
        by_topic: partition by day and topic; else by day only.
        open_file: makes the file at a path.
    """

    def __init__(self, folder: Path, suffix: str, by_topic: bool, open_file: Callable[[Path], File]) -> None:
        self._folder = folder
        self._suffix = suffix
        self._by_topic = by_topic
        self._open_file = open_file
        self._day = date.min
        self._held: dict[str, list[ExportedMessage]] = {}
        self._bytes: Counter[str] = Counter()
        self._open: dict[str, _OpenPart] = {}
        self._files: Counter[str] = Counter()
        self._parts: list[Part] = []

    def write(self, messages: Sequence[ExportedMessage]) -> None:
        """Add messages; raise InvalidRequest for a topic that no folder can be named after."""
        for each in messages:
            day = day_of(each.message.timestamp)
            if day != self._day:
                self._finish_day()
                self._day = day
            topic = each.message.topic if self._by_topic else ""
            self._held.setdefault(topic, []).append(each)
            self._bytes[topic] += len(each.message.envelope_blob) + len(each.payload or b"") + MESSAGE_BYTES
        if self._bytes.total() > HELD_BYTES:
            self._write_largest()

    def close(self) -> list[Part]:
        """Write what is held, close every file and return them all."""
        self._finish_day()
        return self._parts

    def abandon(self) -> None:
        """Close and remove every file."""
        for topic in list(self._open):
            self._close(topic)
        for part in self._parts:
            part.path.unlink(missing_ok=True)

    def _finish_day(self) -> None:
        for topic in sorted(self._held):
            self._flush(topic)
            self._close(topic)
        for topic in list(self._open):
            self._close(topic)
        self._files.clear()

    def _write_largest(self) -> None:
        for topic, _ in self._bytes.most_common():
            self._flush(topic)
            if self._bytes.total() <= HELD_BYTES // 2:
                return

    def _flush(self, topic: str) -> None:
        # Taken out and put back, it is the one that was used last.
        part = self._open.pop(topic, None) or self._opened(topic)
        self._open[topic] = part
        messages = self._held.pop(topic)
        del self._bytes[topic]
        part.file.write(messages)
        part.messages += len(messages)

    def _opened(self, topic: str) -> "_OpenPart":
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
            f"The {column} {value!r} is too long for the name of a folder; partition --by day, or choose "
            "others with --topic."
        )
    return name
