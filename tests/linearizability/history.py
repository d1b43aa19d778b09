"""Recorded histories: what was asked of a system, when, and what it answered."""

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import monotonic_ns
from typing import Any, NamedTuple, Self, TextIO

import msgspec


class Operation(NamedTuple):
    """An operation.

    Arguments:
        process: who asked.
        call: time before the request, ns of the machine's monotonic clock, which all processes share.
        end: time after the answer; None if its outcome is unknown: it may take effect at any later time, or
            never.
        kind: what was asked, such as `acquire`.
        input: arguments.
        output: answer; None if the outcome is unknown.
    """

    process: str
    call: int
    end: int | None
    kind: str
    input: Any
    output: Any = None

    def __str__(self) -> str:
        end = "unknown" if self.end is None else f"{self.end:,}"
        return f"{self.process} {self.kind}({self.input}) -> {self.output} [{self.call:,} to {end}]"


class Recorder:
    """Journal of one process, which survives its end: a line before each request and after each answer."""

    def __init__(self, path: Path, process: str) -> None:
        self._process = process
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._next = 0
        self._lock = threading.Lock()

    def call(self, object_: str, kind: str, input_: Any) -> int:
        """Note a request to an object, and return its number."""
        with self._lock:
            self._next += 1
            number = self._next
            self._write(["call", self._process, number, monotonic_ns(), object_, kind, input_])
        return number

    def answer(self, number: int, output: Any) -> None:
        """Note the answer to a request."""
        at = monotonic_ns()
        with self._lock:
            self._write(["answer", self._process, number, at, output])

    def close(self) -> None:
        """Close the journal."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, line: list[Any]) -> None:
        self._file.write(msgspec.json.encode(line).decode() + "\n")
        self._file.flush()


def read_histories(paths: Iterable[Path]) -> dict[str, list[Operation]]:
    """Return the operations on each object; those without an answer have an unknown outcome."""
    histories: dict[str, list[Operation]] = defaultdict(list)
    for path in paths:
        calls: dict[tuple[str, int], tuple[int, str, str, Any]] = {}
        for line in _lines(path):
            if line[0] == "call":
                _, process, number, at, object_, kind, input_ = line
                calls[process, number] = at, object_, kind, input_
            else:
                _, process, number, end, output = line
                at, object_, kind, input_ = calls.pop((process, number))
                histories[object_].append(Operation(process, at, end, kind, input_, output))
        for (process, _), (at, object_, kind, input_) in calls.items():
            histories[object_].append(Operation(process, at, None, kind, input_))
    return histories


def _lines(path: Path) -> Iterator[list[Any]]:
    """Yield the lines of a journal; the last one may be cut, as its process was killed."""
    for line in path.read_bytes().split(b"\n")[:-1]:
        yield msgspec.json.decode(line)
