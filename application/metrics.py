"""Metrics: counters, gauges and histograms, independent of the format in which they are served."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

SECONDS_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of latencies; 35 ms and 20 ms are the targets of enqueue, dequeue and ack."""
OTHERS = "*"
"""Label value for what has no label of its own, such as further topics, and for the default policy."""


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
