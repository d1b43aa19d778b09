"""Standard input and output as a connection, whose reads and writes can be cancelled."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from postroom.application.telemetry import logger
from postroom.application.threads import DaemonExecutor

MAX_LINE_BYTES: Final = 4 << 20
PART_BYTES: Final = 64 << 10


class Lines:
    """Asynchronous iterator of the lines of a file, up to its end or to a line that is too long.

    It reads in a thread that ends with the process: a read of a pipe can't be cancelled.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._rest = b""
        self._executor = DaemonExecutor(1, "mcp-input")

    def __aiter__(self) -> "Lines":
        return self

    async def __anext__(self) -> str:
        """Return the next line."""
        while b"\n" not in self._rest:
            part = await asyncio.get_running_loop().run_in_executor(self._executor, self._read)
            self._rest += part
            if not part:
                raise StopAsyncIteration
            if len(self._rest) > MAX_LINE_BYTES:
                logger().warning("mcp.message_too_long", limit=MAX_LINE_BYTES)
                raise StopAsyncIteration
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode(errors="replace")

    def _read(self) -> bytes:
        try:
            return os.read(self._file, PART_BYTES)
        except OSError:  # the terminal was closed
            return b""


class Writer:
    """Asynchronous writer of a file; after the reader has gone, it drops output."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._executor = DaemonExecutor(1, "mcp-output")

    async def write(self, text: str) -> None:
        """Write text."""
        await asyncio.get_running_loop().run_in_executor(self._executor, self._write, text.encode())

    async def flush(self) -> None:
        """Do nothing: writes are not buffered."""

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        with suppress(OSError):  # the reader is gone, and will close the input, too
            while view:
                view = view[os.write(self._file, view) :]


@contextmanager
def standard_streams() -> Iterator[tuple[Lines, Writer]]:
    """Yield standard input and output; meanwhile what else the process prints goes to standard error."""
    received, sent = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    try:
        yield Lines(received), Writer(sent)
    finally:
        os.dup2(received, 0)
        os.dup2(sent, 1)
