"""Acks and delays of a source's messages, sent while later messages are stored."""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import msgspec

from postroom.application.ports.source import Source, SourceMessage
from postroom.application.telemetry import logger
from postroom.application.threads import wait_at_most
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
                logger().retry("ingest.source_unavailable", error=str(error))
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


class DeliveryToken(NamedTuple):
    """Identification of a delivery: the message, and which of its deliveries it is.

    Arguments:
        position: identifies the message among the unsettled ones.
        delivered: number of this delivery, counted from 1.
        generation: distinguishes the owners of a position, such as the assignments of a partition.
    """

    position: tuple[int, int]
    delivered: int
    generation: int


class _UnsettledMessage(msgspec.Struct):
    """A message that was delivered, and when it is delivered again."""

    message: SourceMessage
    due_at: float


class Deliveries:
    """Deliveries that were not settled; each is repeated after its ack wait or its delay.

    All times are of one monotonic clock, in seconds.

    Arguments:
        ack_wait_ms: how long a delivery may stay unsettled before the message is redelivered.
    """

    def __init__(self, ack_wait_ms: int) -> None:
        self._ack_wait = ack_wait_ms / 1_000
        self._unsettled: dict[tuple[int, int], _UnsettledMessage] = {}
        self._next_due = math.inf

    def __len__(self) -> int:
        return len(self._unsettled)

    @property
    def next_due(self) -> float:
        """Return a time before which no message is redelivered."""
        return self._next_due

    def add(self, message: SourceMessage, now: float) -> None:
        """Add a message that is delivered for the first time."""
        self._unsettled[message.token.position] = _UnsettledMessage(message, self._plan(now + self._ack_wait))

    def take_due(self, limit: int, now: float) -> list[SourceMessage]:
        """Return up to `limit` messages to deliver again, as deliveries of their own."""
        if now < self._next_due:
            return []
        due = [each for each in self._unsettled.values() if each.due_at <= now][:limit]
        for each in due:
            token = each.message.token
            delivered = token.delivered + 1
            each.message = msgspec.structs.replace(
                each.message, delivered=delivered, token=token._replace(delivered=delivered)
            )
            each.due_at = now + self._ack_wait
        self._next_due = min((each.due_at for each in self._unsettled.values()), default=math.inf)
        return [each.message for each in due]

    def settle(self, messages: Iterable[SourceMessage]) -> list[DeliveryToken]:
        """Forget acked messages, and return the tokens of those that were unsettled.

        An ack of an earlier delivery counts, because the message was stored.
        """
        tokens = []
        for message in messages:
            unsettled = self._unsettled.get(message.token.position)
            if unsettled is not None and unsettled.message.token.generation == message.token.generation:
                del self._unsettled[message.token.position]
                tokens.append(message.token)
        return tokens

    def delay(self, messages: Sequence[SourceMessage], delay_ms: int, now: float) -> None:
        """Redeliver messages after a delay; messages of earlier deliveries are skipped."""
        self._set_due(messages, now + delay_ms / 1_000)

    def extend(self, messages: Sequence[SourceMessage], now: float) -> None:
        """Restart the ack wait of deliveries; messages of earlier deliveries are skipped."""
        self._set_due(messages, now + self._ack_wait)

    def forget(self, generations: Iterable[int]) -> None:
        """Forget messages that somebody else delivers."""
        gone = set(generations)
        for position, unsettled in list(self._unsettled.items()):
            if unsettled.message.token.generation in gone:
                del self._unsettled[position]

    def _set_due(self, messages: Sequence[SourceMessage], due_at: float) -> None:
        for message in messages:
            unsettled = self._unsettled.get(message.token.position)
            if unsettled is not None and unsettled.message.token == message.token:
                unsettled.due_at = self._plan(due_at)

    def _plan(self, due_at: float) -> float:
        self._next_due = min(self._next_due, due_at)
        return due_at
