"""Tracing: spans of messaging operations, and the trace context that calls and messages carry.

Without OpenTelemetry nothing is recorded, but the context of a caller is still passed on.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from typing import Final, Literal, NamedTuple, Protocol

from postroom.application.trace_context import TraceContext

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
    """Context in which the caller's trace context is passed on."""

    def __init__(self, parent: TraceContext) -> None:
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
        return _NO_CONTEXT if parent is None else _Continuation(parent)

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
