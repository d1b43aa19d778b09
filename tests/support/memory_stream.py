"""A stream of a broker in memory; it passes the publisher conformance suite."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from postroom.application.ports.outbox import PublishAck
from postroom.domain.errors import InvalidRequest, Unavailable

NAME, SUBJECTS = "SEA_EVENTS", "sea.event."
MAX_BYTES = 1_048_576

Behaviour = Callable[[str, bytes], Awaitable[None]]


class MemoryStream:
    """A stream at `sea.event.>` and its publisher; it deduplicates for ever.

    Arguments:
        behave: is awaited before a message is stored; may raise what a publisher raises.
    """

    def __init__(self, behave: Behaviour | None = None) -> None:
        self.behave = behave
        self.messages: list[tuple[str, bytes, Mapping[str, str]]] = []
        self.published: list[bytes] = []
        self._ids: dict[str, int] = {}
        self._is_stalled = False
        self._is_down = asyncio.Event()

    @property
    def payloads(self) -> list[bytes]:
        return [payload for _, payload, _ in self.messages]

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> PublishAck:
        _check(subject, payload, headers)
        if self._is_down.is_set():
            raise Unavailable(f"The broker is down, so {subject} was not published.")
        self.published.append(payload)
        if self.behave is not None:
            await self.behave(subject, payload)
        await asyncio.sleep(0)
        if self._is_stalled:
            await self._is_down.wait()
            raise Unavailable(f"The broker died before it answered for {subject}.")
        id_ = headers.get("Nats-Msg-Id", "")
        if id_ in self._ids:
            return PublishAck(NAME, self._ids[id_], duplicate=True)
        self.messages.append((subject, payload, headers))
        if id_:
            self._ids[id_] = len(self.messages)
        return PublishAck(NAME, len(self.messages), duplicate=False)

    def stall(self) -> None:
        """Answer nobody from now on."""
        self._is_stalled = True

    def crash(self) -> None:
        """Fail what is in flight, and everything until `restart`."""
        self._is_down.set()

    def restart(self) -> None:
        self._is_stalled = False
        self._is_down.clear()

    async def close(self) -> None:
        self._is_down.set()


def _check(subject: str, payload: bytes, headers: Mapping[str, str]) -> None:
    if any(part in ("", "*", ">") for part in subject.split(".")) or any(c.isspace() for c in subject):
        raise InvalidRequest(f"{subject!r} is not a subject to publish to.")
    if not subject.startswith(SUBJECTS):
        raise InvalidRequest(f"No stream has the subject {subject}; run postroom streams apply.")
    if any(c.isspace() for name in headers for c in name) or any("\n" in value for value in headers.values()):
        raise InvalidRequest(f"A header of a message for {subject} would break the protocol.")
    size = len(payload) + sum(len(name) + len(value) for name, value in headers.items())
    if size > MAX_BYTES:
        raise InvalidRequest(f"A message for {subject} has {size:,} bytes with its headers.")
