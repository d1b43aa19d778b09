"""Middlewares for idempotent handlers: `acknowledge(transaction(inbox(outbox(handler))))`.

Each takes a handler and returns one. Nest them in this order. Any may be omitted, but `inbox` and `outbox`
require a `transaction` around them:

- `acknowledge` acknowledges the message if the inner handler succeeds, and nacks it otherwise;
- `transaction` begins a transaction, and commits it when the handler returns;
- `inbox` inserts the message id as the first statement of that transaction; for a duplicate, the handler
  isn't called;
- `outbox` records the events that the handler returns in the same transaction, for the relay to publish.

All but `acknowledge` are middlewares of a `Worker`, too, whose requests are messages of a mailbox.

Handlers and repositories get the session or connection to write with from `current_transaction`.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from typing import Any, TypeVar

import msgspec

from postroom.application.inbox.request import read_request
from postroom.application.outbox.events import CORRELATION_ID, MESSAGE_ID
from postroom.application.ports.inbox import HandlerRequest
from postroom.application.ports.source import Source, SourceMessage
from postroom.application.received_messages import ReceivedMessage
from postroom.application.telemetry import logger
from postroom.application.tracing import correlate
from postroom.domain.errors import InvalidRequest

Handler = Callable[[HandlerRequest], Awaitable[Sequence[Any] | None]]
"""Handle an event, and return the events to record in the outbox, if any."""
Middleware = Callable[[Handler], Handler]
Begin = Callable[[], AbstractAsyncContextManager[Any]]
"""Begin a transaction that is committed when the context ends, or rolled back after an error."""
Deduplicate = Callable[[Any, HandlerRequest], Awaitable[bool]]
"""Insert a message id in a transaction, and return whether it is new."""
Record = Callable[[Any, HandlerRequest, Sequence[Any]], Awaitable[None]]
"""Record the events that a handler returned, in a transaction."""

ORDER = ("acknowledge", "transaction", "inbox", "outbox")
ADVICE = "nest them as acknowledge, transaction, inbox, outbox, handler, each once"
_STAGES = "postroom_stages"
_Next = TypeVar("_Next", bound=Callable[..., Any])


class _Scope(msgspec.Struct):
    transaction: Any


_scope: ContextVar[_Scope | None] = ContextVar("postroom_transaction", default=None)


def current_transaction() -> Any:
    """Return the transaction of the current event.

    It is a SQLAlchemy `AsyncSession` or `AsyncConnection`, or a psycopg `AsyncConnection`, depending on the
    argument of `transaction`. Don't commit it: `transaction` does so when the handler returns.

    Raises: InvalidRequest outside of `transaction`.
    """
    scope = _scope.get()
    if scope is None:
        raise InvalidRequest(f"No transaction is open; wrap the handler in `transaction`: {ADVICE}.")
    return scope.transaction


def subject_of(request: HandlerRequest | ReceivedMessage) -> str:
    """Return the subject of an event, or the topic of a mailbox's message."""
    return request.topic if isinstance(request, ReceivedMessage) else request.subject


def pipeline(*stages: Any) -> Any:
    """Return `a(b(c(handler)))` for `a, b, c, handler`.

    Arguments:
        stages: the outermost first.

    Raises: InvalidRequest if the middlewares are nested in the wrong order.
    """
    *middlewares, handler = stages
    for middleware in reversed(middlewares):
        handler = middleware(handler)
    return handler


def make_acknowledge(
    source: Source, delay_ms: Callable[[int], int]
) -> Callable[[Handler], Callable[[SourceMessage], Awaitable[None]]]:
    """Return the middleware that acknowledges messages after success and nacks them after failure.

    Arguments:
        delay_ms: returns the delay of the next delivery; called with the number of the failed one.
    """

    def acknowledge(next_: Handler) -> Callable[[SourceMessage], Awaitable[None]]:
        async def handle(message: SourceMessage) -> None:
            with correlate(message.headers.get(CORRELATION_ID) or message.headers.get(MESSAGE_ID)):
                await settle(message)

        async def settle(message: SourceMessage) -> None:
            try:
                await next_(read_request(message))
            except Exception as error:
                delay = delay_ms(message.delivered)
                logger().warning(
                    "inbox.handler_failed",
                    subject=message.subject,
                    sequence=message.sequence,
                    delivered=message.delivered,
                    delay_ms=delay,
                    error=type(error).__qualname__,  # its text may quote the payload
                )
                await source.nack([message], delay)
            else:
                await source.ack([message])

        return _add_stage("acknowledge", next_, handle)

    return acknowledge


def make_transaction(begin: Begin) -> Middleware:
    """Return the middleware that begins a transaction for each event."""

    def transaction(next_: Handler) -> Handler:
        async def handle(request: HandlerRequest) -> Sequence[Any] | None:
            if _scope.get() is not None:
                raise InvalidRequest(f"A transaction is already open; {ADVICE}.")
            async with begin() as connection:
                token = _scope.set(_Scope(connection))
                try:
                    return await next_(request)
                finally:
                    _scope.reset(token)

        return _add_stage("transaction", next_, handle)

    return transaction


def make_inbox(deduplicate: Deduplicate) -> Middleware:
    """Return the middleware that skips messages that were already processed (SDS-047 POL-047-003)."""

    def inbox(next_: Handler) -> Handler:
        async def handle(request: HandlerRequest) -> Sequence[Any] | None:
            transaction = current_transaction()
            if not request.message_id:
                raise InvalidRequest(
                    f"A message of {subject_of(request)} has no id, so the inbox can't detect duplicates; "
                    "publish it with a Nats-Msg-Id."
                )
            if not await deduplicate(transaction, request):
                logger().info("inbox.duplicate", message_id=request.message_id, subject=subject_of(request))
                return None
            return await next_(request)

        return _add_stage("inbox", next_, handle)

    return inbox


def make_outbox(record: Record) -> Middleware:
    """Return the middleware that records the events that the handler returns, and returns nothing itself."""

    def outbox(next_: Handler) -> Handler:
        async def handle(request: HandlerRequest) -> Sequence[Any] | None:
            transaction = current_transaction()
            events = await next_(request)
            if events:
                await record(transaction, request, events)
            return None

        return _add_stage("outbox", next_, handle)

    return outbox


def _add_stage(name: str, inner: Any, handler: _Next) -> _Next:
    """Check the order of nested middlewares, and record it as an attribute of the handler."""
    inner_stages: tuple[str, ...] = getattr(inner, _STAGES, ())
    misplaced = [other for other in inner_stages if ORDER.index(other) <= ORDER.index(name)]
    if misplaced:
        raise InvalidRequest(f"The middleware {name} must not be outside of {misplaced[0]}; {ADVICE}.")
    setattr(handler, _STAGES, (name, *inner_stages))
    return handler
