"""Metrics: counters, gauges and histograms; the metrics of an owned mailbox; the state of dependencies."""

import asyncio
import math
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import msgspec

from postroom.application.operations.mailbox import Mailbox
from postroom.application.ports.event_log import Accepted, Answer
from postroom.domain.errors import PostroomError
from postroom.domain.mailbox.commands import Ack, Nack, Receive, Send
from postroom.domain.message import Message
from postroom.domain.policy import SATURATED_RETRY_MS

SECONDS_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of latencies; 35 ms and 20 ms are the targets of enqueue, dequeue and ack."""
OTHERS = "*"
"""Label value for things without their own label, such as further topics, and for the default policy."""


class Histogram(msgspec.Struct):
    """Distribution of observed values.

    Arguments:
        bounds: inclusive upper bounds of the buckets, ascending; a last bucket has no bound.
        counts: number of values in each bucket.
        sum: of the values.
    """

    bounds: Sequence[float]
    counts: list[int]
    sum: float = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


def new_histogram(bounds: Sequence[float] = SECONDS_BOUNDS) -> Histogram:
    """Return an empty histogram; the bounds are of latencies in seconds unless others are given."""
    return Histogram(bounds, [0] * (len(bounds) + 1))


class Metric(msgspec.Struct, frozen=True):
    """Metric with its samples; see OpenMetrics.

    Arguments:
        name: without the suffix `_total` of a counter.
        kind: a counter only increases; a gauge may also decrease.
        samples: pairs of labels and value.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: Sequence[tuple[Mapping[str, str], float | Histogram]]


Measure = Callable[[], Awaitable[Sequence[Metric]]]
"""Returns the current metrics; raises a PostroomError if they can't be read."""


def counter(name: str, text: str, value: float) -> Metric:
    """Return a counter without labels."""
    return Metric(name, "counter", text, [({}, value)])


def gauge(name: str, text: str, value: float) -> Metric:
    """Return a gauge without labels."""
    return Metric(name, "gauge", text, [({}, value)])


def histogram(name: str, text: str, value: Histogram) -> Metric:
    """Return a histogram without labels."""
    return Metric(name, "histogram", text, [({}, value)])


def count_label(counts: Counter[str], label: str, max_labels: int) -> None:
    """Count a value of a label; values after the first `max_labels` count as `OTHERS`."""
    counts[label if label in counts or len(counts) < max_labels else OTHERS] += 1


def rejected_metric(numbers: Mapping[str, int]) -> Metric:
    """Return the counter of refusals by code (svc-mailbox I-10)."""
    return Metric(
        "postroom_rejected",
        "counter",
        "Commands that the mailbox refused, and requests refused before they reached it, by code.",
        [({"reason": code}, number) for code, number in sorted(numbers.items())],
    )


def merge(metrics: Iterable[Metric]) -> list[Metric]:
    """Return one metric for each name; values with the same labels are added up."""
    merged: dict[str, Metric] = {}
    for metric in metrics:
        other = merged.get(metric.name)
        merged[metric.name] = metric if other is None else _add(other, metric)
    return list(merged.values())


def label(name: str, sources: Mapping[str, Iterable[Metric]]) -> list[Metric]:
    """Return the metrics of several sources, one for each name, with a label for the source.

    Arguments:
        name: of the label.
        sources: metrics by the value of the label.
    """
    labelled: dict[str, Metric] = {}
    for value, metrics in sources.items():
        for metric in metrics:
            before = labelled[metric.name].samples if metric.name in labelled else ()
            samples = [*before, *(({name: value, **labels}, each) for labels, each in metric.samples)]
            labelled[metric.name] = Metric(metric.name, metric.kind, metric.help, samples)
    return list(labelled.values())


def _add(first: Metric, second: Metric) -> Metric:
    values: dict[tuple[tuple[str, str], ...], float] = {}
    for labels, value in (*first.samples, *second.samples):
        assert not isinstance(value, Histogram), f"{first.name} is measured twice"
        key = tuple(labels.items())
        values[key] = values.get(key, 0) + value
    samples = [(dict(key), value) for key, value in values.items()]
    return Metric(first.name, first.kind, first.help, samples)


PROGRESS_SECONDS = 60.0
"""Time without a pass of a loop after which it counts as stuck."""
BACKLOG_SECONDS = 3.0
"""Time in which a database must answer."""
MAILBOX_SECONDS = 3.0
"""Time in which the owner of a mailbox must answer."""


class Monitor(NamedTuple):
    """Metrics and readiness of a long-running command (svc-mailbox I-10).

    Arguments:
        collect: returns the metrics.
        find_missing: returns the names of required things that can't be used; empty if it is ready.
    """

    collect: Callable[[], Coroutine[Any, Any, Sequence[Metric]]]
    find_missing: Callable[[], Coroutine[Any, Any, list[str]]]


class Progress:
    """Outcome of the latest pass of a loop.

    A loop that never ends a pass, for example because a broker accepts requests and does not answer, makes
    no progress and so is not ready.

    Arguments:
        seconds: time that a pass may take.
    """

    def __init__(
        self, seconds: float = PROGRESS_SECONDS, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = seconds
        self._monotonic = monotonic
        self._is_failed = False
        self._at = monotonic()

    def succeeded(self) -> None:
        """Record a pass that succeeded."""
        self._is_failed = False
        self._at = self._monotonic()

    def failed(self) -> None:
        """Record a pass that failed."""
        self._is_failed = True

    @property
    def is_made(self) -> bool:
        """Return whether the latest pass succeeded, and ended in time."""
        return not self._is_failed and self._monotonic() - self._at <= self._seconds


def mailbox_monitor(mailbox: Mailbox, collect: Callable[[], Coroutine[Any, Any, list[Metric]]]) -> Monitor:
    """Return the monitor of a command that needs a mailbox."""

    async def find_missing() -> list[str]:
        return [] if await is_answering(mailbox) else ["mailbox"]

    return Monitor(collect, find_missing)


async def is_answering(mailbox: Mailbox) -> bool:
    """Return whether the owner of a mailbox answers in time."""
    try:
        async with asyncio.timeout(MAILBOX_SECONDS):
            await mailbox.get_topic_policy("any")  # reads the state in memory
    except (PostroomError, TimeoutError):
        return False
    return True


BATCH_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000)
MAX_DEPTH = 1_024
"""Reorder depth at which counting stops."""
MAX_TOPICS = 1_024
"""Number of topics that are counted by name, by event."""
MAX_SHARDS = 1_024
"""Maximum number of shards whose latest deliveries are remembered."""


_shard_of = attrgetter("topic", "shard")
_ACCEPTED: frozenset[type] = frozenset((Accepted, int, list))
"""Types of the answers to commands that were not refused."""
_EVENTS: dict[type, str] = {Send: "sent", Receive: "delivered", Ack: "acked", Nack: "nacked"}


class ReorderDepth:
    """Number of messages by which deliveries are out of the order of their shard (svc-mailbox C-5, G-9).

    The depth of a delivery is the number of messages of its shard that were sent later and delivered before.
    A message whose delay was asked for, by its sender or by a nack, is not out of order, and neither is one
    that was redriven. A message counts if it was delivered late because its consumer, or the answer to its
    consumer, was lost.
    """

    def __init__(self) -> None:
        self.maximum: dict[int, int] = {}
        """Largest depth so far by shard number."""
        self._delivered: dict[tuple[str, int], list[int]] = {}
        """Ascending positions of the latest messages that were delivered, by shard."""

    def delivered(self, messages: Iterable[Message]) -> None:
        """Note deliveries."""
        for key, group in groupby(messages, _shard_of):
            positions = self._delivered.get(key)
            if positions is None:
                positions = self._first_of(key)
            latest = positions[-1] if positions else 0
            for message in group:
                if message.position > latest:
                    latest = message.position
                    positions.append(latest)
                else:
                    self._delivered_late(message, positions)
            if len(positions) > 2 * MAX_DEPTH:
                del positions[:-MAX_DEPTH]

    def _delivered_late(self, message: Message, positions: list[int]) -> None:
        if message.reason in ("nacked", "released") or message.redriven or message.ready_at > message.sent_at:
            return
        depth = min(len(positions) - bisect_right(positions, message.position), MAX_DEPTH)
        if depth > self.maximum[message.shard]:
            self.maximum[message.shard] = depth

    def _first_of(self, key: tuple[str, int]) -> list[int]:
        if len(self._delivered) >= MAX_SHARDS:
            del self._delivered[next(iter(self._delivered))]
        self.maximum.setdefault(key[1], 0)
        return self._delivered.setdefault(key, [])


class MailboxMetrics:
    """Latencies, refusals, batches and reordering of a mailbox, since this process owns it."""

    def __init__(self) -> None:
        self._enqueue = new_histogram()
        self._dequeue = new_histogram()
        self._ack = new_histogram()
        self._latencies: dict[type, Histogram] = {
            Send: self._enqueue,
            Receive: self._dequeue,
            Ack: self._ack,
        }
        self._rejected: Counter[str] = Counter()
        self._messages: dict[type, int] = dict.fromkeys(_EVENTS, 0)
        self._topics: dict[str, Counter[str]] = {event: Counter() for event in _EVENTS.values()}
        self.batch = new_histogram(BATCH_BOUNDS)
        self.commit = new_histogram()
        self.reorder = ReorderDepth()

    def count(self, kind: type, answers: list[Answer], seconds: float) -> None:
        """Count the answers to commands of one kind, after a latency in seconds."""
        latency = self._latencies.get(kind)
        if latency is not None and (latency is not self._dequeue or answers[0]):  # it delivered something
            latency.observe(seconds)
        refusals = 0
        if not _ACCEPTED.issuperset(map(type, answers)):
            for answer in answers:
                if isinstance(answer, PostroomError):
                    self.count_refusal(answer)
                    refusals += 1
        if kind is Receive:
            self._messages[kind] += sum(len(each) for each in answers if isinstance(each, list))
        elif kind in self._messages:
            self._messages[kind] += len(answers) - refusals

    def count_topics(self, **events: Mapping[str, int]) -> None:
        """Count the messages of commits that are durable, by topic; see `postroom_messages`."""
        for event, topics in events.items():
            counted = self._topics[event]
            for topic, count in topics.items():
                # Topics come and go; the first ones keep their own label.
                is_named = topic in counted or len(counted) < MAX_TOPICS
                counted[topic if is_named else OTHERS] += count

    def collect(self) -> list[Metric]:
        """Return the metrics."""
        return [
            Metric(
                "postroom_messages",
                "counter",
                "Messages by what happened to them: sent, delivered, acked or nacked.",
                [({"event": event}, self._messages[kind]) for kind, event in _EVENTS.items()],
            ),
            Metric(
                "postroom_topic_messages",
                "counter",
                "Messages of a topic by what happened to them: sent, delivered, acked or nacked.",
                [
                    ({"event": event, "topic": topic}, count)
                    for event, topics in self._topics.items()
                    for topic, count in sorted(topics.items())
                ],
            ),
            histogram("postroom_enqueue_seconds", "Time until sends were durable.", self._enqueue),
            histogram(
                "postroom_dequeue_seconds",
                "Time until deliveries were durable, without the wait for messages.",
                self._dequeue,
            ),
            histogram("postroom_ack_seconds", "Time until acks were durable.", self._ack),
            histogram("postroom_commit_seconds", "Duration of appends to the log.", self.commit),
            histogram("postroom_commit_records", "Log records of an append.", self.batch),
            rejected_metric(self._rejected),
            Metric(
                "postroom_reorder_depth_max",
                "gauge",
                "Largest number of messages, sent later to the same shard, that were delivered before one.",
                [({"shard": str(shard)}, depth) for shard, depth in sorted(self.reorder.maximum.items())],
            ),
        ]

    def count_refusal(self, error: PostroomError) -> None:
        """Count a refusal by its code."""
        self._rejected[error.code] += 1
        error.is_counted = True


WINDOW_SECONDS = 5.0
MIN_RETRY_MS, MAX_RETRY_MS = 100, 60_000


class DrainRate:
    """Rate at which a queue is drained, averaged exponentially over the latest seconds.

    Refused callers are counted as if they queued outside: the tenth is told to wait for ten departures.
    """

    def __init__(self) -> None:
        self._departures = 0.0
        self._refused = 0
        self._at_us = 0

    def record_drain(self, count: int, now_us: int) -> None:
        """Count items that left the queue."""
        self._decay(now_us)
        self._departures += count
        self._refused = max(0, self._refused - count)

    def retry_ms(self, count: int, now_us: int) -> int:
        """Return when a caller whose `count` items are refused should retry, 100 ms to 60 s from now.

        It is 1 s if nothing was drained lately.
        """
        self._decay(now_us)
        self._refused += count
        per_second = self._departures / WINDOW_SECONDS
        if per_second < 1 / WINDOW_SECONDS:
            return SATURATED_RETRY_MS
        return min(max(int(1_000 * self._refused / per_second), MIN_RETRY_MS), MAX_RETRY_MS)

    def _decay(self, now_us: int) -> None:
        elapsed = max(0, now_us - self._at_us) / 1_000_000
        self._departures *= math.exp(-elapsed / WINDOW_SECONDS)
        self._at_us = max(self._at_us, now_us)
        if elapsed > MAX_RETRY_MS / 1_000:
            self._refused = 0
