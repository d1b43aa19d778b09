"""Traces and correlation ids of calls (W3C Trace Context)."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, Protocol
from urllib.parse import quote, unquote

import msgspec
import uuid_utils

from postroom.domain.outbox import MAX_BAGGAGE_CHARS, MAX_STATE_CHARS

SAMPLED: Final = 1
"""Trace flag: the caller records the trace."""
MAX_BAGGAGE_ENTRIES: Final = 64
_NONE: Final[Mapping[str, str]] = MappingProxyType({})
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)
_TRACE_ID, _SPAN_ID = re.compile("[0-9a-f]{32}"), re.compile("[0-9a-f]{16}")


class TraceContext(msgspec.Struct, frozen=True):
    """Position in a trace, valid as W3C defines it.

    Arguments:
        trace_id, span_id: lower-case hexadecimal, 32 and 16 digits.
        trace_flags: 1 if the caller records the trace.
        trace_state: what tracing systems add for themselves (`tracestate`).
        baggage: application's entries by name.
    """

    trace_id: str
    span_id: str
    trace_flags: int = SAMPLED
    trace_state: str = ""
    baggage: Mapping[str, str] = _NONE

    @property
    def traceparent(self) -> str:
        """Return it as the header of that name, without state and baggage."""
        return f"00-{self.trace_id}-{self.span_id}-{self.trace_flags & 0xFF:02x}"

    def headers(self) -> dict[str, str]:
        """Return it as the headers `traceparent`, `tracestate` and `baggage`."""
        headers = {"traceparent": self.traceparent}
        if self.trace_state:
            headers["tracestate"] = self.trace_state
        if self.baggage:
            headers["baggage"] = ",".join(f"{name}={quote(value)}" for name, value in self.baggage.items())
        return headers


def make_context(
    trace_id: str | None,
    span_id: str | None,
    trace_flags: int = SAMPLED,
    trace_state: str = "",
    baggage: Mapping[str, str] = _NONE,
) -> TraceContext | None:
    """Return a context; None unless both ids are valid."""
    if not trace_id or not span_id or not _TRACE_ID.fullmatch(trace_id) or not _SPAN_ID.fullmatch(span_id):
        return None
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, trace_flags & 0xFF, trace_state, baggage)


def read_context(
    traceparent: str | None, tracestate: str | None = None, baggage: str | None = None
) -> TraceContext | None:
    """Return the context of a caller's headers; None without a valid `traceparent`.

    A state or baggage that is malformed or too large is left out.
    """
    match = _TRACEPARENT.fullmatch(traceparent.strip()) if traceparent else None
    if match is None or (match[0].startswith("00") and match[4]):
        return None
    state = tracestate.strip() if tracestate else ""
    is_valid = len(state) <= MAX_STATE_CHARS and state.isascii() and state.isprintable()
    return make_context(
        match[1], match[2], int(match[3], 16), state if is_valid else "", _read_baggage(baggage or "")
    )


def context_of(headers: Mapping[str, str]) -> TraceContext | None:
    """Return the context of a message's headers, or of a call's whose names are in lower case."""
    if (traceparent := headers.get("traceparent")) is None:
        return None
    return read_context(traceparent, headers.get("tracestate"), headers.get("baggage"))


def _read_baggage(text: str) -> Mapping[str, str]:
    if not text or len(text) > MAX_BAGGAGE_CHARS:
        return _NONE
    entries: dict[str, str] = {}
    for member in text.split(","):
        name, is_pair, value = member.partition(";")[0].partition("=")
        if not is_pair or not _NAME.fullmatch(name.strip()):
            return _NONE
        entries[name.strip()] = unquote(value.strip())
    return entries if len(entries) <= MAX_BAGGAGE_ENTRIES else _NONE


Kind = Literal["producer", "consumer", "client", "server"]


class MessagingOperation(NamedTuple):
    """Messaging operation, by the semantic conventions of OpenTelemetry.

    Arguments:
        name: `messaging.operation.name`, and first word of the span's name.
        type: `messaging.operation.type`.
    """

    name: str
    type: str
    kind: Kind


SEND: Final = MessagingOperation("send", "send", "producer")
REMOTE_SEND: Final = MessagingOperation("send", "send", "client")
"""A send by a client; the server's is the one that the message refers to."""
RELAY: Final = MessagingOperation("relay", "send", "client")
PUBLISH: Final = MessagingOperation("publish", "send", "producer")
RECEIVE: Final = MessagingOperation("receive", "receive", "client")
PROCESS: Final = MessagingOperation("process", "process", "consumer")
INGEST: Final = MessagingOperation("ingest", "process", "consumer")
ACK: Final = MessagingOperation("ack", "settle", "client")
NACK: Final = MessagingOperation("nack", "settle", "client")
EXTEND: Final = MessagingOperation("extend", "settle", "client")
REDRIVE: Final = MessagingOperation("redrive", "redrive", "client")


class Span(Protocol):
    """A span that is being recorded, or not."""

    def rename(self, name: str) -> None:
        """Set its name."""

    def set(self, attribute: str, value: str | int) -> None:
        """Set an attribute; never a payload, token, principal or header value."""

    def fail(self, error_type: str) -> None:
        """Mark it as failed, without an exception."""


class Tracer(Protocol):
    """Recorder of spans."""

    def span(
        self,
        operation: MessagingOperation,
        destinations: Iterable[str] = (),
        *,
        message_id: str | None = None,
        count: int | None = None,
        parent: TraceContext | None = None,
        links: Iterable[TraceContext | None] = (),
    ) -> AbstractContextManager[Span]:
        """Record an operation for as long as the context lasts; an error within it fails the span.

        Arguments:
            destinations: topics or subjects of its messages; of several, none is recorded.
            count: number of messages of an operation on many.
            parent: the caller; None takes the span of the context, if any.
            links: contexts of its messages, read only if the span is recorded.
        """

    def record(
        self,
        operation: MessagingOperation,
        destinations: Iterable[str],
        started_ns: int,
        *,
        count: int,
        links: Iterable[TraceContext | None],
    ) -> None:
        """Record an operation that ends now.

        Arguments:
            started_ns: when it began, ns since 1970 UTC.
        """

    def serve(self, name: str, system: str, parent: TraceContext | None) -> AbstractContextManager[Span]:
        """Record a request to a server for as long as the context lasts.

        Arguments:
            system: `http` or `grpc`.
        """

    def current(self) -> TraceContext | None:
        """Return the context to hand to messages and calls; None outside of any trace."""


class _NoSpan:
    """A span that nothing records."""

    def rename(self, name: str) -> None:
        """Do nothing."""

    def set(self, attribute: str, value: str | int) -> None:
        """Do nothing."""

    def fail(self, error_type: str) -> None:
        """Do nothing."""


_NO_SPAN: Final[Span] = _NoSpan()
_NO_CONTEXT: Final = nullcontext(_NO_SPAN)
_caller: ContextVar[TraceContext | None] = ContextVar("postroom_trace_context", default=None)


class _Continuation:
    """Context in which the caller's trace context is passed on, or none."""

    def __init__(self, parent: TraceContext | None) -> None:
        self._parent = parent
        self._token: Token[TraceContext | None] | None = None

    def __enter__(self) -> Span:
        self._token = _caller.set(self._parent)
        return _NO_SPAN

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _caller.reset(self._token)


class NullTracer:
    """Tracer that records nothing, and passes the caller's context on."""

    def span(
        self,
        operation: MessagingOperation,
        destinations: Iterable[str] = (),
        *,
        message_id: str | None = None,
        count: int | None = None,
        parent: TraceContext | None = None,
        links: Iterable[TraceContext | None] = (),
    ) -> AbstractContextManager[Span]:
        """Pass on the parent; see `Tracer.span`."""
        return _NO_CONTEXT if parent is None else _Continuation(parent)

    def record(
        self,
        operation: MessagingOperation,
        destinations: Iterable[str],
        started_ns: int,
        *,
        count: int,
        links: Iterable[TraceContext | None],
    ) -> None:
        """Do nothing; see `Tracer.record`."""

    def serve(self, name: str, system: str, parent: TraceContext | None) -> AbstractContextManager[Span]:
        """Pass on the parent; see `Tracer.serve`."""
        # A request that waited for another one of its connection is begun in the context of that one.
        return _NO_CONTEXT if parent is None and _caller.get() is None else _Continuation(parent)

    def current(self) -> TraceContext | None:
        """Return the caller's context; see `Tracer.current`."""
        return _caller.get()


NO_TRACER: Final[Tracer] = NullTracer()
_tracer: Tracer = NO_TRACER


def tracer() -> Tracer:
    """Return the tracer of this process."""
    return _tracer


def use_tracer(new: Tracer) -> Tracer:
    """Replace the tracer of this process, and return the former one."""
    global _tracer
    former, _tracer = _tracer, new
    return former


def outgoing_headers() -> dict[str, str]:
    """Return the headers with which a call passes the trace context on; empty outside of any trace."""
    context = _tracer.current()
    return {} if context is None else context.headers()


MAX_CORR_ID_CHARS: Final = 128
_CORR_ID: Final = re.compile(f"[!-~]{{1,{MAX_CORR_ID_CHARS}}}")
_corr_id: ContextVar[str | None] = ContextVar("postroom_corr_id", default=None)


def current_corr_id() -> str | None:
    """Return the correlation id of the call or message that is being processed; None outside of any."""
    return _corr_id.get()


def is_corr_id(text: str) -> bool:
    """Return whether a text may be a correlation id: 1 to 128 visible ASCII characters."""
    return _CORR_ID.fullmatch(text) is not None


@contextmanager
def correlate(corr_id: str | None = None) -> Iterator[str]:
    """Process one call or message under a correlation id, for as long as the context lasts.

    Arguments:
        corr_id: the caller's; without one, or one that is no correlation id, a UUIDv7 is generated.

    Yields: the correlation id in force (svc-mailbox P-8).
    """
    token = _corr_id.set(None)
    try:
        yield correlate_task(corr_id)
    finally:
        _corr_id.reset(token)


def correlate_task(corr_id: str | None = None) -> str:
    """Process what the current task does from now on under a correlation id; see `correlate`.

    Returns: the correlation id in force.
    """
    if corr_id is None or not is_corr_id(corr_id):
        corr_id = str(uuid_utils.uuid7())
    _corr_id.set(corr_id)
    return corr_id
