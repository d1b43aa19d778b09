"""Metrics over HTTP, in the text formats of Prometheus and OpenMetrics."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from postroom.application.telemetry import Metric
from postroom.domain.errors import Unavailable

_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}


@contextmanager
def serve_metrics(
    measure: Callable[[], Iterable[Metric]], port: int, host: str = "127.0.0.1"
) -> Iterator[str]:
    """Serve metrics at `/metrics` while the context lasts, and yield the URL.

    Arguments:
        measure: returns the metrics; called for every request, in another thread.
        port: 0 for any free port.

    Raises: Unavailable when the port can't be bound.
    """
    registry = CollectorRegistry()
    registry.register(_Measurements(measure))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise Unavailable(
            f"Metrics can't be served at {host}:{port}: {error.strerror}; choose another --metrics-port."
        ) from error
    try:
        yield f"http://{host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Measurements(Collector):
    """Collector that calls a function at every scrape."""

    def __init__(self, measure: Callable[[], Iterable[Metric]]) -> None:
        self._measure = measure

    def collect(self) -> "Iterator[CounterMetricFamily | GaugeMetricFamily]":
        """Yield the metrics of one scrape."""
        for metric in self._measure():
            names = list(metric.samples[0][0]) if metric.samples else []
            family = _FAMILIES[metric.kind](metric.name, metric.help, labels=names)
            for labels, value in metric.samples:
                family.add_metric(list(labels.values()), value)
            yield family

    def describe(self) -> "Iterator[CounterMetricFamily | GaugeMetricFamily]":
        """Yield nothing, so that registration doesn't call the function; names are unique."""
        yield from ()
