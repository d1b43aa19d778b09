"""A transport that sends what is written in one turn of the event loop together."""

import asyncio
from typing import Any

MAX_BYTES = 64 << 10
END_SECONDS = 1.0


class WriteBuffer:
    """Transport that sends the head and the body of an answer by one system call.

    uvicorn writes them one after the other, and a write to a socket costs more than all else that it does for
    an answer. From `MAX_BYTES` on nothing is held back, so that a client that does not read is noticed.

    Arguments:
        seconds: time for the client to read the rest when the connection is closed.

    Attributes:
        lingers: the client is still sending a request, so `close` does as `end`.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._transport = transport
        self._loop = loop
        self._seconds = seconds
        self._aborting: asyncio.TimerHandle | None = None
        self._pieces: list[bytes] = []
        self._size = 0
        self._has_ended = False
        self.lingers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send bytes at the end of this turn of the loop at the latest."""
        if self._has_ended:
            return
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces.append(data)
        self._size += len(data)
        if self._size >= MAX_BYTES:
            self._flush()

    def close(self) -> None:
        """Send what was written, and close; a client that does not read it keeps no connection."""
        if self.lingers:
            self.end()
            return
        self._flush()
        self._transport.close()
        if self._aborting is None:
            self._aborting = self._loop.call_later(self._seconds, self._transport.abort)

    def end(self) -> None:
        """Send what was written, and close when the client has, or after 1 s.

        What the client still sends is to be ignored. Bytes that reach a closed socket reset the connection,
        and then the client might not see the answer (RFC 9112, 9.6).
        """
        if self.is_closing():
            return
        self._flush()
        self._has_ended = True
        if self._transport.can_write_eof():  # TLS has no such half-close
            self._transport.write_eof()
        self._transport.resume_reading()
        if self._aborting is None:
            self._aborting = self._loop.call_later(END_SECONDS, self._transport.abort)

    def lost(self) -> None:
        """Forget the connection, which is closed."""
        if self._aborting is not None:
            self._aborting.cancel()

    def is_closing(self) -> bool:
        """Return whether nothing more is to be read or written."""
        return self._has_ended or self._transport.is_closing()

    def abort(self) -> None:
        """Close without sending."""
        self._pieces.clear()
        self._transport.abort()

    def _flush(self) -> None:
        if self._pieces:
            data = b"".join(self._pieces)
            self._pieces.clear()
            self._size = 0
            if not self._transport.is_closing():  # the client may have gone since
                self._transport.write(data)
