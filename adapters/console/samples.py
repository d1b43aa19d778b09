"""Metrics of the last minutes, in memory, and the current backlog."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from heapq import nlargest
from itertools import pairwise
from operator import itemgetter
from typing import Final, NamedTuple

from postroom.application.metrics import Histogram, Metric
from postroom.application.operations.mailbox import Mailbox
from postroom.application.query_results import Backlog
from postroom.application.threads import wait_at_most
from postroom.domain.errors import PostroomError
from postroom.domain.mailbox.counts import TopicSummary

EVERY_SECONDS: Final = 5.0
SAMPLES: Final = 120
"""Number of samples in memory: ten minutes."""
MAX_TOPICS: Final = 100
"""Number of topics whose counts a sample keeps: it takes the topics with the most messages."""
BACKLOG_SECONDS: Final = 2.0
COST_SHARE: Final = 0.02
"""Share of the time that counting may take, as it visits each unsettled message."""
MAX_PARTS: Final = 16
EVENTS: Final = ("sent", "delivered", "acked", "nacked")


class Counts(NamedTuple):
    """The topics of a mailbox with the numbers of their messages.

    Arguments:
        backlog: facts about the mailbox, counted with the topics; it has the shards of one topic at most.
        topics: all topics, also those without messages, sorted by name.
    """

    backlog: Backlog
    topics: list[TopicSummary]


class _Sample(NamedTuple):
    at: float
    counters: dict[str, float]
    depths: dict[str, float]
    others: float | None
    topics: dict[tuple[str, str], float]


class Samples:
    """Ring buffer of a mailbox's metrics and a cache of its counts, shared by all browsers.

    Arguments:
        mailbox: the unrestricted mailbox; pages check the caller's rights before they show its counts.
        measure: returns the metrics of the mailbox; None if they are not available.
    """

    def __init__(self, mailbox: Mailbox, measure: Callable[[], Awaitable[Sequence[Metric]]] | None) -> None:
        self._mailbox = mailbox
        self._measure = measure
        self._ring: deque[_Sample | None] = deque(maxlen=SAMPLES)
        self._previous: _Sample | None = None
        self._counts: Counts | None = None
        self._counted_until = 0.0
        self._lock = asyncio.Lock()
        self._parts: dict[Hashable, str] = {}
        self.taken = 0
        """Number of the samples that were tried."""

    @property
    def has_rates(self) -> bool:
        """Return whether metrics are measured."""
        return self._measure is not None

    async def run(self, stopping: asyncio.Event) -> None:
        """Measure every few seconds until the service stops."""
        while self._measure is not None and not stopping.is_set():
            try:
                sample = _sample(await self._measure())
                self._previous = self._ring[-1] if self._ring else None
                if self._previous is not None:  # rates of topics need only the last two samples
                    self._ring[-1] = self._previous._replace(topics={})
                self._ring.append(sample)
            except (PostroomError, TimeoutError):
                self._ring.append(None)
            self.taken += 1
            self._parts.clear()
            await wait_at_most(EVERY_SECONDS, stopping.wait())

    async def count(self) -> Counts:
        """Return the topics, counted at most a few seconds ago.

        Raises: Unavailable when the mailbox can't be used.
        """
        async with self._lock:
            began = time.monotonic()
            if self._counts is None or began >= self._counted_until:
                topics = await self._mailbox.list_topics()
                backlog = await self._mailbox.get_backlog(topics[0].topic if topics else None)
                self._counts = Counts(backlog, topics)
                end = time.monotonic()
                self._counted_until = end + max(BACKLOG_SECONDS, (end - began) / COST_SHARE)
                self._parts.clear()
            return self._counts

    def forget(self) -> None:
        """Count again at the next request."""
        self._counted_until = 0.0

    def find_part(self, key: Hashable) -> str | None:
        """Return a cached part of a page, or None."""
        return self._parts.get(key)

    def store_part(self, key: Hashable, text: str) -> None:
        """Cache a part of a page for other browsers until the next sample or count."""
        if len(self._parts) < MAX_PARTS:
            self._parts[key] = text

    def rates(self, event: str) -> list[float | None]:
        """Return the messages per second between samples, oldest first; None where a sample is missing."""
        samples = list(self._ring)
        return [_rate(before, after, event) for before, after in pairwise(samples)]

    def topic_rate(self, event: str, topic: str) -> float | None:
        """Return a topic's messages per second between the last two samples, or None without two samples."""
        before, after = self._previous, self._ring[-1] if self._ring else None
        if before is None or after is None:
            return None
        increase = after.topics.get((event, topic), 0.0) - before.topics.get((event, topic), 0.0)
        return increase / max(0.001, after.at - before.at) if increase >= 0 else None

    def depths(self, topic: str) -> list[float | None]:
        """Return the numbers of a topic's unsettled messages without dead letters, oldest sample first.

        A sample has only the topics with the most messages; for other topics, the number is None.
        """
        return [None if each is None else each.depths.get(topic, each.others) for each in self._ring]


def _sample(metrics: Sequence[Metric]) -> _Sample:
    counters: dict[str, float] = {}
    depths: dict[str, float] = {}
    topics: dict[tuple[str, str], float] = {}
    for metric in metrics:
        for labels, value in metric.samples:
            if isinstance(value, Histogram):
                continue
            if metric.name == "postroom_messages":
                counters[labels["event"]] = value
            elif metric.name == "postroom_topic_messages":
                topics[labels["event"], labels["topic"]] = value
            elif metric.name in ("postroom_queue_depth", "postroom_inflight"):
                topic = labels["topic"]
                depths[topic] = depths.get(topic, 0.0) + value
    others = 0.0 if len(depths) <= MAX_TOPICS else None
    largest = nlargest(MAX_TOPICS, depths.items(), key=itemgetter(1))
    return _Sample(time.monotonic(), counters, dict(largest), others, topics)


def _rate(before: _Sample | None, after: _Sample | None, event: str) -> float | None:
    """Return messages per second, or None if the owner changed, as its counters restart at 0."""
    if before is None or after is None or event not in before.counters or event not in after.counters:
        return None
    increase = after.counters[event] - before.counters[event]
    return increase / max(0.001, after.at - before.at) if increase >= 0 else None
