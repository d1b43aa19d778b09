"""Export of spans by OTLP over HTTP, in the background: a collector that hangs delays and fails no call."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from postroom.adapters.otel.tracer import SYSTEM, OtelTracer
from postroom.application.telemetry import logger
from postroom.application.version import own_version

FLUSH_SECONDS: Final = 3.0
"""Time for the last spans; then they are dropped, so that the process ends."""


@contextmanager
def exporting_tracer(endpoint: str | None) -> Iterator[OtelTracer]:
    """Yield a tracer whose spans are exported until the context ends, which flushes them within 3 s.

    OpenTelemetry's environment variables set sampler, resource, headers, time limits and sizes.

    Arguments:
        endpoint: base URL of the collector; None takes the one in the environment.
    """
    resource = Resource({"service.name": SYSTEM, "service.version": own_version()})
    provider = TracerProvider(
        resource=Resource.get_empty().merge(resource).merge(OTELResourceDetector().detect()),
        shutdown_on_exit=False,
    )
    exporter = OTLPSpanExporter(endpoint=None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield OtelTracer(provider)
    finally:
        flushing = Thread(target=provider.shutdown, name="flush of spans", daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECONDS)
        if flushing.is_alive():
            logger().warning("tracing.spans_dropped", seconds=FLUSH_SECONDS)
