"""Streams of deliveries, which callers iterate over."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self

from postroom.application.received_messages import ReceivedMessage
from postroom.application.threads import cancel_and_wait
from postroom.domain.arguments import check_int

MAX_WAIT_MS = 60_000
"""Maximum wait for a message, of a receive and of a stream."""
MAX_STREAM_MESSAGES = 256
MIN_HEARTBEAT_MS, HEARTBEAT_MS, MAX_HEARTBEAT_MS = 250, 5_000, 60_000


class MessageStream:
    """Deliveries of a mailbox as an asynchronous iterator; `Mailbox.stream_messages` opens one.

    A task receives ahead within the stream's capacity, so no delivery is lost when a caller cancels
    `__anext__` and calls it again. A delivery that times out before it is taken is left out once another one
    takes its place. That needs no clock: a server's may differ from this machine's.

    Arguments:
        batches: deliveries as they come; empty batches are heartbeats.
        max_messages: maximum number of unsettled messages at a time.
        wait_ms: the iteration ends after this time without a message; None is never.
    """

    def __init__(
        self, batches: AsyncIterator[Sequence[ReceivedMessage]], max_messages: int, wait_ms: int | None
    ) -> None:
        self._batches = batches
        self._max_messages = max_messages
        self._wait_seconds = None if wait_ms is None else wait_ms / 1_000
        self._ready: dict[bytes, ReceivedMessage] = {}
        """Newest delivery by message, in the order of their arrival."""
        self._changed = asyncio.Event()
        self._failure: Exception | None = None
        self._is_over = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._receive())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ready.clear()
        self._end()
        if self._task is not None:
            await cancel_and_wait(self._task)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ReceivedMessage:
        """Return the next message.

        Raises: StopAsyncIteration after `wait_ms` without a message, or when the stream is closed; the error
            that ended it.
        """
        try:
            async with asyncio.timeout(self._wait_seconds):
                while True:
                    self._changed.clear()
                    for message in self._ready:
                        return self._ready.pop(message)
                    if self._failure is not None:
                        raise self._failure
                    if self._is_over:
                        raise StopAsyncIteration
                    await self._changed.wait()
        except TimeoutError:
            raise StopAsyncIteration from None

    async def _receive(self) -> None:
        try:
            async for messages in self._batches:
                for message in messages:
                    self._add(message)
        except Exception as error:
            self._failure = error
        finally:
            self._end()

    def _add(self, message: ReceivedMessage) -> None:
        """Keep a delivery until it is taken, and leave out those that have timed out because it came."""
        self._ready.pop(message.receipt.message, None)
        self._ready[message.receipt.message] = message
        if len(self._ready) > self._max_messages:
            del self._ready[next(iter(self._ready))]
        self._changed.set()

    def _end(self) -> None:
        self._is_over = True
        self._changed.set()


def check_stream(max_messages: int, heartbeat_ms: int, wait_ms: int | None) -> None:
    """Check the arguments of a stream, or raise InvalidRequest."""
    check_int("max_messages", max_messages, 1, MAX_STREAM_MESSAGES)
    check_int("heartbeat_ms", heartbeat_ms, MIN_HEARTBEAT_MS, MAX_HEARTBEAT_MS)
    if wait_ms is not None:
        check_int("wait_ms", wait_ms, 1, MAX_WAIT_MS)
