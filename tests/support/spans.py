"""Capture of the spans that Postroom records."""

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler
from opentelemetry.trace import format_span_id, format_trace_id

from postroom.adapters.otel.tracer import OtelTracer
from postroom.application.tracing import use_tracer


class Spans:
    """The spans that have ended."""

    def __init__(self, provider: TracerProvider, exporter: InMemorySpanExporter) -> None:
        self.tracer = provider.get_tracer("test")
        self._exporter = exporter

    def all(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    def names(self) -> list[str]:
        return [span.name for span in self.all()]

    def one(self, name: str) -> ReadableSpan:
        (span,) = (span for span in self.all() if span.name == name)
        return span


@contextmanager
def capture_spans(sampler: Sampler | None = None) -> Iterator[Spans]:
    """Record the spans of the context with the SDK of OpenTelemetry."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=sampler or ParentBased(ALWAYS_ON), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    former = use_tracer(OtelTracer(provider))
    try:
        yield Spans(provider, exporter)
    finally:
        use_tracer(former)
        provider.shutdown()


def trace_id(span: ReadableSpan) -> str:
    assert span.context is not None
    return format_trace_id(span.context.trace_id)


def span_id(span: ReadableSpan) -> str:
    assert span.context is not None
    return format_span_id(span.context.span_id)


def parent_id(span: ReadableSpan) -> str | None:
    return None if span.parent is None else format_span_id(span.parent.span_id)


def link_ids(span: ReadableSpan) -> list[str]:
    return [format_span_id(link.context.span_id) for link in span.links]
