"""Metrics in the text formats of Prometheus and OpenMetrics."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from postroom.application.metrics import Histogram, Metric

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


def write_metrics(metrics: Iterable[Metric], accept: str = "") -> tuple[bytes, str]:
    """Return metrics as text, and its content type.

    Arguments:
        accept: the request's `Accept`, which may ask for OpenMetrics.
    """
    registry = CollectorRegistry()
    registry.register(_Metrics(metrics))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _Metrics(Collector):
    """Collector of metrics that were measured before."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Family]:
        """Yield the metrics."""
        for metric in self._metrics:
            yield _family(metric)

    def describe(self) -> Iterator[Family]:
        """Yield nothing, so that registration does not collect; names are unique."""
        yield from ()


def _family(metric: Metric) -> Family:
    names = list(metric.samples[0][0]) if metric.samples else []
    if metric.kind == "histogram":
        histograms = HistogramMetricFamily(metric.name, metric.help, labels=names)
        for labels, value in metric.samples:
            assert isinstance(value, Histogram)
            histograms.add_metric(list(labels.values()), _buckets(value), value.sum)
        return histograms
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=names)
    for labels, value in metric.samples:
        assert not isinstance(value, Histogram)
        family.add_metric(list(labels.values()), value)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return the cumulative counts by upper bound."""
    total, buckets = 0, []
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        total += count
        buckets.append((floatToGoString(bound), float(total)))  # type: ignore[no-untyped-call]  # no stubs
    return buckets
