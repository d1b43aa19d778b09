"""Measurements of the last minutes, in memory, and the present backlog."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from postroom.application.background import wait_at_most
from postroom.application.metrics import Histogram, Metric
from postroom.application.ports.mailbox import Mailbox
from postroom.application.query_results import Backlog
from postroom.domain.errors import PostroomError
from postroom.domain.mailbox.counts import TopicSummary

EVERY_SECONDS: Final = 5.0
SAMPLES: Final = 120
"""Number of samples that are held: ten minutes."""
MAX_TOPICS: Final = 100
BACKLOG_SECONDS: Final = 2.0
COST_SHARE: Final = 0.05
"""Share of the time that counting messages may take: it visits each message that is not settled."""
EVENTS: Final = ("sent", "delivered", "acked", "nacked")


class _Sample(NamedTuple):
    at: float
    counters: dict[str, float]
    depths: dict[str, float]


class Counted(NamedTuple):
    """The backlog and the topics of a mailbox, of the same moment.

    Arguments:
        at: seconds of the monotonic clock.
    """

    at: float
    backlog: Backlog
    topics: list[TopicSummary]


class Samples:
    """Ring of samples of a mailbox's metrics, and its counts, which all browsers share.

    Arguments:
        mailbox: permits everything; who shows its counts checks what the caller may see.
        measure: returns the metrics of the mailbox; None for none.
    """

    def __init__(self, mailbox: Mailbox, measure: Callable[[], Awaitable[Sequence[Metric]]] | None) -> None:
        self._mailbox = mailbox
        self._measure = measure
        self._ring: deque[_Sample | None] = deque(maxlen=SAMPLES)
        self._counted: Counted | None = None
        self._counted_until = 0.0
        self._lock = asyncio.Lock()

    @property
    def has_rates(self) -> bool:
        """Return whether there are measurements."""
        return self._measure is not None

    async def run(self, stopping: asyncio.Event) -> None:
        """Measure every few seconds until the service stops."""
        while self._measure is not None and not stopping.is_set():
            try:
                self._ring.append(_sample(await self._measure()))
            except (PostroomError, TimeoutError):
                self._ring.append(None)
            await wait_at_most(EVERY_SECONDS, stopping.wait())

    async def count(self) -> Counted:
        """Return the present counts, or those of a moment ago.

        Raises: Unavailable when the mailbox can't be used.
        """
        async with self._lock:
            now = time.monotonic()
            if self._counted is None or now >= self._counted_until:
                backlog, topics = await self._mailbox.get_backlog(), await self._mailbox.list_topics()
                end = time.monotonic()
                self._counted = Counted(end, backlog, topics)
                self._counted_until = end + max(BACKLOG_SECONDS, (end - now) / COST_SHARE)
            return self._counted

    def forget(self) -> None:
        """Count anew at the next request, as after a change."""
        self._counted_until = 0.0

    def rates(self, event: str) -> list[float | None]:
        """Return the messages per second between samples, oldest first; None where nothing was measured."""
        samples = list(self._ring)
        return [_rate(before, after, event) for before, after in pairwise(samples)]

    def depths(self, topic: str) -> list[float | None]:
        """Return the unsettled messages of a topic, oldest sample first; dead letters are not counted."""
        return [None if each is None else each.depths.get(topic, 0.0) for each in self._ring]


def _sample(metrics: Sequence[Metric]) -> _Sample:
    counters: dict[str, float] = {}
    depths: dict[str, float] = {}
    for metric in metrics:
        for labels, value in metric.samples:
            if isinstance(value, Histogram):
                continue
            if metric.name == "postroom_messages":
                counters[labels["event"]] = value
            elif metric.name in ("postroom_queue_depth", "postroom_inflight"):
                topic = labels["topic"]
                if topic in depths or len(depths) <= MAX_TOPICS:
                    depths[topic] = depths.get(topic, 0.0) + value
    return _Sample(time.monotonic(), counters, depths)


def _rate(before: _Sample | None, after: _Sample | None, event: str) -> float | None:
    """Return messages per second; None across a change of the owner, with which counting begins anew."""
    if before is None or after is None or event not in before.counters or event not in after.counters:
        return None
    increase = after.counters[event] - before.counters[event]
    return increase / max(0.001, after.at - before.at) if increase >= 0 else None
