"""Live parts of pages: server-sent events with the changes since the last event."""

import re
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import msgspec
from starlette.responses import Response, StreamingResponse

from postroom.adapters.console.page import Page
from postroom.application.threads import wait_at_most
from postroom.domain.errors import Forbidden, PostroomError, Saturated, Unauthenticated

MAX_STREAMS: Final = 64
MAX_STREAMS_OF_BEARER: Final = 8
"""The same per capability, as the console renders each page of a topic-limited token separately."""
CHECK_SECONDS: Final = 15.0
"""Time after which a live part that pauses for longer sends a comment, if its session lasts."""
SAME: Final = ": same\n\n"
"""The comment in place of an event that would change nothing; it keeps the connection alive."""
_PIECE: Final = re.compile(r"<!--\[-->(.*?)<!--\]-->", re.DOTALL)
"""An element that changes by itself, with the attribute `data-p`; escaped text has no such markers."""
_GZIP: Final = zlib.MAX_WBITS | 16


class LivePart:
    """The live part of a page, as the console last sent it to one browser."""

    def __init__(self) -> None:
        self._frame = ""
        self._pieces: list[str] = []

    def event(self, text: str) -> str:
        """Return the event that makes a browser show `text`.

        The event has the whole text (`live`) if something outside of the pieces changed, else the changed
        pieces with their numbers (`change`). It is `SAME` if nothing changed.
        """
        pieces, frame = _PIECE.findall(text), _PIECE.sub("", text)
        if frame != self._frame or len(pieces) != len(self._pieces):
            self._frame, self._pieces = frame, pieces
            return event("live", text)
        changes = [
            (number, after)
            for number, (before, after) in enumerate(zip(self._pieces, pieces, strict=True))
            if before != after
        ]
        self._pieces = pieces
        return event("change", msgspec.json.encode(changes).decode()) if changes else SAME


def event(name: str, text: str, id_: int | None = None) -> str:
    """Return a server-sent event.

    Arguments:
        id_: id that a browser sends when it connects again, to say what it has seen.
    """
    lines = "".join(f"data: {line}\n" for line in text.splitlines() or [""])
    seen = "" if id_ is None else f"id: {id_}\n"
    return f"{seen}event: {name}\n{lines}\n"


async def live_events(
    page: Page, next_event: Callable[[], Awaitable[str]], pause: Callable[[], float]
) -> AsyncIterator[str]:
    """Yield the events of a live part, until the service stops or the session ends.

    Arguments:
        next_event: returns the next event; called after the session of the page was opened again.
        pause: returns the seconds until the following event.
    """
    stopping, left = page.service.stopping, 0.0
    while not stopping.is_set():
        if page.console.find(page.request, touch=False) is not page.browser:
            yield event("end", "The session has ended.")
            return
        try:
            page.session = await page.service.open_session(page.browser.token)
            text = SAME if left else await next_event()
        except (Unauthenticated, Forbidden) as error:
            yield event("end", str(error))
            return
        except PostroomError as error:
            yield event("problem", str(error))
        else:
            yield text
        left = left or pause()
        wait = min(left, CHECK_SECONDS)
        await wait_at_most(wait, stopping.wait())
        left -= wait
    yield event("end", "The service is stopping.")


def no_stream() -> Response:
    """Return the answer after which a browser asks for no more updates."""
    return Response(status_code=204)


def check_streams(page: Page) -> None:
    """Raise Saturated if too many live parts are open, of all browsers or of the caller's capability."""
    streams = page.console.streams
    if streams.total() >= MAX_STREAMS or streams[page.browser.bearer] >= MAX_STREAMS_OF_BEARER:
        raise Saturated("Too many live pages are open; close some, or reload this one.", 10_000)


class LiveResponse(StreamingResponse):
    """A stream of events that is counted while it is open, compressed if the browser accepts that.

    Raises: Saturated if too many are open; a handler returns it without waiting for anything else, so that
        none is opened between the check and the count.
    """

    def __init__(self, page: Page, content: AsyncIterator[str]) -> None:
        check_streams(page)
        headers = {"x-accel-buffering": "no"}
        parts: AsyncIterator[str | bytes] = content
        if "gzip" in page.request.headers.get("accept-encoding", ""):
            parts, headers["content-encoding"] = _compress(content), "gzip"
        super().__init__(parts, media_type="text/event-stream", headers=headers)
        self._page = page

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the events."""
        streams, browser = self._page.console.streams, self._page.browser
        streams[bearer := browser.bearer] += 1
        browser.streams += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            streams[bearer] -= 1
            streams += Counter()  # removes zero counts
            browser.streams -= 1


async def _compress(content: AsyncIterator[str]) -> AsyncIterator[bytes]:
    """Yield each text compressed, in a part that a browser can read at once."""
    compressor = zlib.compressobj(wbits=_GZIP)
    async for text in content:
        yield compressor.compress(text.encode()) + compressor.flush(zlib.Z_SYNC_FLUSH)
