"""Spans recorded by OpenTelemetry, with its semantic conventions for messaging."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Final

from opentelemetry import baggage, context, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from postroom.application.tracing import PROCESS, MessagingOperation, TraceContext, Tracer

SYSTEM: Final = "postroom"
MAX_LINKS: Final = 128
"""Links of a span, as many as OpenTelemetry keeps by default."""
Attributes = dict[str, str | int]
_KINDS: Final = {
    "producer": SpanKind.PRODUCER,
    "consumer": SpanKind.CONSUMER,
    "client": SpanKind.CLIENT,
    "server": SpanKind.SERVER,
}


class OtelTracer(Tracer):
    """`Tracer` over OpenTelemetry.

    Arguments:
        provider: None takes the one of the application.
    """

    def __init__(self, provider: trace.TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer(SYSTEM, tracer_provider=provider)

    @contextmanager
    def span(
        self,
        operation: MessagingOperation,
        destinations: Iterable[str] = (),
        *,
        message_id: str | None = None,
        count: int | None = None,
        parent: TraceContext | None = None,
        links: Iterable[TraceContext | None] = (),
    ) -> "Iterator[OtelSpan]":
        name, attributes = _describe(operation, destinations, count)
        if message_id is not None:
            attributes["messaging.message.id"] = message_id
        around = None if parent is None else _to_context(parent)
        if operation is PROCESS and parent is not None:
            links = (parent,)
        span = self._tracer.start_span(
            name, around, _KINDS[operation.kind], attributes, _links(links), record_exception=False
        )
        with _within(span, around) as opened:
            yield opened

    def record(
        self,
        operation: MessagingOperation,
        destinations: Iterable[str],
        started_ns: int,
        *,
        count: int,
        links: Iterable[TraceContext | None],
    ) -> None:
        name, attributes = _describe(operation, destinations, count)
        self._tracer.start_span(
            name, None, _KINDS[operation.kind], attributes, _links(links), started_ns
        ).end()

    @contextmanager
    def serve(self, name: str, system: str, parent: TraceContext | None) -> "Iterator[OtelSpan]":
        around = Context() if parent is None else _to_context(parent)
        attributes: Attributes = {"rpc.system": system, "rpc.method": name} if system == "grpc" else {}
        span = self._tracer.start_span(name, around, SpanKind.SERVER, attributes, record_exception=False)
        with _within(span, around) as opened:
            yield opened

    def current(self) -> TraceContext | None:
        span = trace.get_current_span().get_span_context()
        if not span.is_valid:
            return None
        return TraceContext(
            trace.format_trace_id(span.trace_id),
            trace.format_span_id(span.span_id),
            int(span.trace_flags),
            span.trace_state.to_header() if span.trace_state else "",
            {name: str(value) for name, value in baggage.get_all().items()},
        )


class OtelSpan:
    """`Span` of OpenTelemetry."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self._has_failed = False

    def rename(self, name: str) -> None:
        """Set its name."""
        self._span.update_name(name)

    def set(self, attribute: str, value: str | int) -> None:
        """Set an attribute."""
        self._span.set_attribute(attribute, value)

    def fail(self, error_type: str) -> None:
        """Mark it as failed; the first failure stands."""
        if self._has_failed:
            return
        self._has_failed = True
        self._span.set_attribute("error.type", error_type)
        self._span.set_status(Status(StatusCode.ERROR))


@contextmanager
def _within(span: trace.Span, around: Context | None) -> Iterator[OtelSpan]:
    """Make a span current, and end it; it records only the type of an error, whose text may be a payload."""
    token = context.attach(trace.set_span_in_context(span, around))
    opened = OtelSpan(span)
    try:
        yield opened
    except Exception as error:
        opened.fail(str(getattr(error, "code", None) or type(error).__qualname__))
        raise
    finally:
        context.detach(token)
        span.end()


def _describe(
    operation: MessagingOperation, destinations: Iterable[str], count: int | None
) -> tuple[str, Attributes]:
    """Return the name and the attributes of a span."""
    attributes: Attributes = {
        "messaging.system": SYSTEM,
        "messaging.operation.name": operation.name,
        "messaging.operation.type": operation.type,
    }
    name, several = operation.name, {*destinations}
    if len(several) == 1:
        (destination,) = several
        name = f"{name} {destination}"
        attributes["messaging.destination.name"] = destination
    if count is not None:
        attributes["messaging.batch.message_count"] = count
    return name, attributes


def _links(contexts: Iterable[TraceContext | None]) -> list[Link]:
    return [Link(_span_context(each)) for each in islice(filter(None, contexts), MAX_LINKS)]


def _to_context(parent: TraceContext) -> Context:
    around = trace.set_span_in_context(trace.NonRecordingSpan(_span_context(parent)), Context())
    for name, value in parent.baggage.items():
        around = baggage.set_baggage(name, value, around)
    return around


def _span_context(each: TraceContext) -> SpanContext:
    return SpanContext(
        int(each.trace_id, 16),
        int(each.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(each.trace_flags),
        trace_state=TraceState.from_header([each.trace_state]) if each.trace_state else None,
    )
