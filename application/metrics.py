"""Metrics: counters, gauges and histograms, the requests of servers, and the state of dependencies."""

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from postroom.application.operations.mailbox import Mailbox
from postroom.domain.errors import PostroomError
from postroom.domain.policy import SECOND_MS

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


def by_event_type(name: str, text: str, labels: Mapping[str, str], numbers: Mapping[str, int]) -> Metric:
    """Return a counter with a value for each event type."""
    return Metric(
        name,
        "counter",
        text,
        [({**labels, "event_type": each}, number) for each, number in sorted(numbers.items())],
    )


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


class SurfaceMetrics:
    """Requests of all surfaces of a process, and the metrics of the mailbox.

    Labels are bounded: methods, routes, statuses and codes are fixed.

    Arguments:
        measure: returns the metrics of the mailbox, wherever its owner is; None for none.
        cap_cache_ttl_ms: how long a verified token is not verified again; None without capabilities.
        measure_outboxes: returns the metrics of messages that transactions recorded; they don't depend on the
            owner of the mailbox, which may be down.
    """

    def __init__(
        self,
        measure: Measure | None = None,
        cap_cache_ttl_ms: int | None = None,
        measure_outboxes: Measure | None = None,
    ) -> None:
        self.measure = measure
        self._measure_outboxes = measure_outboxes
        self._cap_cache_ttl_ms = cap_cache_ttl_ms
        self._http: Counter[tuple[str, str, int]] = Counter()
        self._grpc: Counter[tuple[str, str]] = Counter()
        self._rejected: Counter[str] = Counter()

    def answered_http(self, method: str, route: str, status: int) -> None:
        """Count an answered HTTP request; the route of an unknown path is `other`."""
        name = method if method in ("GET", "HEAD", "POST", "PUT") else "other"
        self._http[name, route, status] += 1

    def answered_grpc(self, method: str, status: str) -> None:
        """Count a call over gRPC that ended, with the name of its status."""
        self._grpc[method, status] += 1

    def count_answers(self, methods: Collection[str]) -> int:
        """Return the number of calls over gRPC of these methods that succeeded."""
        return sum(self._grpc[method, "OK"] for method in methods)

    def refused(self, error: PostroomError) -> None:
        """Count a refused request, unless the owner of the mailbox has counted it."""
        if not error.is_counted:
            self._rejected[error.code] += 1

    async def collect(self) -> list[Metric]:
        """Return all metrics; while the mailbox can't be used, the metrics of the surfaces."""
        metrics: list[Metric] = []
        is_up = True
        if self.measure is not None:
            try:
                async with asyncio.timeout(MAILBOX_SECONDS):
                    metrics += await self.measure()
            except (PostroomError, TimeoutError):
                is_up = False
        if self._measure_outboxes is not None:
            metrics += await self._measure_outboxes()
        if self._cap_cache_ttl_ms is not None:
            ttl = self._cap_cache_ttl_ms / SECOND_MS
            metrics.append(
                gauge("postroom_cap_cache_ttl_seconds", "Time until a revocation takes effect, at most.", ttl)
            )
        metrics += (
            gauge("postroom_mailbox_up", "1 if the mailbox can be used.", is_up),
            Metric(
                "postroom_http_requests",
                "counter",
                "Requests over HTTP by method, route and status.",
                [
                    ({"method": method, "route": route, "status": str(status)}, number)
                    for (method, route, status), number in sorted(self._http.items())
                ],
            ),
            Metric(
                "postroom_grpc_requests",
                "counter",
                "Calls over gRPC by method and status.",
                [
                    ({"method": method, "status": status}, number)
                    for (method, status), number in sorted(self._grpc.items())
                ],
            ),
            rejected_metric(self._rejected),
        )
        return merge(metrics)
