"""Bodies of requests, within the bounds of the server."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from postroom.adapters.http_server.body_budget import BodyBudget
from postroom.adapters.http_server.problems import UnsupportedMediaType
from postroom.adapters.http_server.settings import HttpSettings
from postroom.domain.errors import FrameTooLarge

DISCARD_FRAMES: Final = 4
"""Frames of a chunked body that is too large which are discarded, so that its sender sees the answer."""


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


class Bodies:
    """Reader of bodies: each has at most the frame limit, and all at a time have a budget."""

    def __init__(self, limits: HttpSettings) -> None:
        self._frame_bytes = limits.frame_bytes
        self._budget = BodyBudget(limits.buffer_bytes)

    @contextmanager
    def hold(self) -> Iterator[Callable[[int], None]]:
        """Hold the bytes of a request until the context ends; see `BodyBudget.hold`."""
        with self._budget.hold() as take:
            yield take

    async def read(self, headers: dict[bytes, bytes], receive: Any, hold: Callable[[int], None]) -> bytes:
        """Return a body; one that is too large is never held in memory.

        Raises: FrameTooLarge, before anything is read of a body whose declared length is too large;
            UnsupportedMediaType for a content coding; Unavailable when the budget is used up; ClientGone.
        """
        limit, size, pieces = self._frame_bytes, 0, []
        if int(headers.get(b"content-length", b"0")) > limit:  # the parser accepts digits only
            raise self._too_large()
        coding = headers.get(b"content-encoding", b"identity").strip().lower()
        if coding not in (b"", b"identity"):
            raise UnsupportedMediaType(
                f"The body has the Content-Encoding {coding.decode('latin-1')!r}; send it without one."
            )
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            size += len(message["body"])
            if size <= limit:
                hold(len(message["body"]))
                pieces.append(message["body"])
            else:
                pieces.clear()
            if not message["more_body"] or size > DISCARD_FRAMES * limit:
                break
        if size > limit:
            raise self._too_large()
        return b"".join(pieces)

    def _too_large(self) -> FrameTooLarge:
        return FrameTooLarge(
            f"The body exceeds the frame limit of {self._frame_bytes} bytes; send a reference to the data."
        )
