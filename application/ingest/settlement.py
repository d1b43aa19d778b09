"""Acks and delays of messages, which the source receives while later messages are stored."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

from postroom.application.background import wait_at_most
from postroom.application.ports.source import Source, SourceMessage
from postroom.application.telemetry import logger
from postroom.domain.errors import Unavailable
from postroom.domain.policy import OutageBackoff, backoff_ms

DEFER_MS = 60_000
"""Delay until the redelivery of a message that can't be stored and has no dead-letter subject."""
BACKOFF = OutageBackoff(100, 5_000)


class Stopped(Exception):  # not an error
    """The ingester was stopped during an outage; the source redelivers its messages."""


class Settlement:
    """Answers to a source: all messages that are stored while it receives acks are acked together.

    Arguments:
        stopping: ends retries.
        jitter: returns uniform random numbers in [0, 1).
    """

    def __init__(
        self, source: Source, stopping: asyncio.Event, jitter: Callable[[], float] = random.random
    ) -> None:
        self._source = source
        self._stopping = stopping
        self._jitter = jitter
        self._stored: list[SourceMessage] = []
        self._deferred: list[SourceMessage] = []
        self._unanswered = 0
        self._has_ended = False
        self._news = asyncio.Event()

    @property
    def is_idle(self) -> bool:
        """Return whether the source has received every answer."""
        return not self._unanswered

    def ack(self, messages: Sequence[SourceMessage]) -> None:
        """Ack messages that are stored."""
        self._add(self._stored, messages)

    def defer(self, message: SourceMessage) -> None:
        """Request the redelivery of a message after a minute."""
        self._add(self._deferred, [message])

    def end(self) -> None:
        """Make `run` return when the source has received every answer."""
        self._has_ended = True
        self._news.set()

    async def run(self) -> None:
        """Answer the source until `end` is called.

        Raises:
            Stopped: the source can't be reached, and the ingester was stopped.
            NotFound, InvalidRequest: the source was removed.
        """
        while True:
            self._news.clear()
            stored, self._stored = self._stored, []
            deferred, self._deferred = self._deferred, []
            if deferred:
                await self.retry(partial(self._source.nack, deferred, DEFER_MS))
            if stored:
                await self.retry(partial(self._source.ack, stored))
            self._unanswered -= len(deferred) + len(stored)
            if not self._unanswered:
                if self._has_ended:
                    return
                await self._news.wait()

    async def return_at_once(self, messages: Sequence[SourceMessage]) -> None:
        """Request the redelivery of messages that are not stored, if the source can be reached."""
        with suppress(Unavailable):
            await self._source.nack(messages, 0)

    async def extend(self, messages: Sequence[SourceMessage]) -> None:
        """Restart the ack wait of messages, if the source can be reached."""
        with suppress(Unavailable):
            await self._source.extend(messages)

    async def retry(
        self, action: Callable[[], Awaitable[None]], in_progress: Sequence[SourceMessage] = ()
    ) -> None:
        """Retry an action until the source is available; raises Stopped.

        Arguments:
            in_progress: messages whose ack wait is restarted before each retry.
        """
        failures = 0
        while True:
            try:
                return await action()
            except Unavailable as error:
                failures += 1
                logger().warning("ingest.source_unavailable", error=str(error))
                await self.pause(self.backoff_ms(failures), in_progress)

    async def pause(self, ms: int, in_progress: Sequence[SourceMessage]) -> None:
        """Wait, and restart the ack wait of these messages; raises Stopped when stopped."""
        if self._stopping.is_set():
            raise Stopped
        if in_progress:
            await self.extend(in_progress)
        await wait_at_most(ms / 1_000, self._stopping.wait())

    def backoff_ms(self, failures: int) -> int:
        """Return the pause after a number of failures in succession."""
        return backoff_ms(BACKOFF, failures, self._jitter())

    def _add(self, queue: list[SourceMessage], messages: Sequence[SourceMessage]) -> None:
        queue += messages
        self._unanswered += len(messages)
        self._news.set()
