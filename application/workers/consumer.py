"""Consumers of a worker: a handler with its options, and the topics that it receives from."""

import asyncio
import random
from collections.abc import Callable
from typing import NamedTuple

from postroom.application.operations.mailbox import Mailbox
from postroom.application.workers.handler import Handler, Middleware
from postroom.application.workers.retry import Retry
from postroom.domain.subscription import SubscriptionFilter


class Consumer(NamedTuple):
    """A handler and the topics that it consumes; times in ms.

    Arguments:
        topic: name of a topic, or a pattern.
        timeout_ms: time limit of the handler; None for none.
        has_results: whether messages are acked with what the handler returns.
        subscription: filter of the subscription whose topic it is, if it is one.
        retry: how failed deliveries are retried.
        batch: maximum number of messages of one call; a handler of batches gets lists.
    """

    topic: str
    is_pattern: bool
    handler: Handler
    middlewares: tuple[Middleware, ...]
    concurrency: int
    timeout_ms: int | None
    visibility_ms: int
    has_results: bool = False
    subscription: SubscriptionFilter | None = None
    retry: Retry = Retry()
    batch: int = 1


REFRESH_SECONDS = 1.0
REFRESH_SHARE = 20
"""A refresh may take up to 1/20 of the time, as counting a long backlog takes the mailbox long."""
MAX_SEEN = 10_000
"""Number of topics above which those without unsettled messages are forgotten."""
MAX_TOPICS = 1_000
"""Maximum number of topics of one receive."""


class Topics:
    """Topics by consumer: those seen so far with unsettled messages, for a consumer of a pattern.

    Arguments:
        consumer_of: returns the consumer of a topic, if any.
    """

    def __init__(self, mailbox: Mailbox, consumer_of: Callable[[str], Consumer | None]) -> None:
        self._mailbox = mailbox
        self._consumer_of = consumer_of
        self._by_pattern: dict[str, dict[str, None]] = {}
        self._seen: set[str] = set()
        self._refresh_at = 0.0
        self._lock = asyncio.Lock()

    async def of(self, consumer: Consumer) -> list[str]:
        """Return the topics to receive from; at most 1,000, a random choice of more.

        Raises: Unavailable when the mailbox can't be used.
        """
        if not consumer.is_pattern:
            return [consumer.topic]
        async with self._lock:
            await self._refresh()
        topics = list(self._by_pattern.get(consumer.topic, ()))
        return topics if len(topics) <= MAX_TOPICS else random.sample(topics, MAX_TOPICS)

    async def _refresh(self) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        if start < self._refresh_at:
            return
        backlog = await self._mailbox.get_backlog()
        if len(self._seen) > MAX_SEEN:
            self._seen.clear()
            self._by_pattern.clear()
        for topic in {shard.topic for shard in backlog.shards} - self._seen:
            self._seen.add(topic)
            if (consumer := self._consumer_of(topic)) is not None:
                self._by_pattern.setdefault(consumer.topic, {})[topic] = None
        now = loop.time()
        self._refresh_at = now + max(REFRESH_SECONDS, (now - start) * REFRESH_SHARE)
