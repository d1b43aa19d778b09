"""Middlewares that make a handler's effect happen once: `acknowledge(transaction(inbox(outbox(handler))))`.

Each takes a handler and returns one. They stand in this order; any may be left out, but `inbox` and `outbox`
need a `transaction` around them:

- `acknowledge` settles the delivery when all within has succeeded, and asks for it again when not;
- `transaction` opens a transaction, and commits it when the handler returns;
- `inbox` notes the message as the first statement of that transaction; one that was noted before is a
  duplicate, for which the handler isn't called;
- `outbox` records what the handler returns in the same transaction, for the relay to publish.

Handlers stay unaware: repositories ask `current_transaction` for the session or connection to write with.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from typing import Any, TypeVar

import msgspec

from postroom.application.inbox.request import read_request
from postroom.application.ports.event_handler import HandlerRequest
from postroom.application.ports.source import Source, SourceMessage
from postroom.application.telemetry import logger
from postroom.domain.errors import InvalidRequest

Handler = Callable[[HandlerRequest], Awaitable[Sequence[Any] | None]]
"""Deal with an event, and return the events to record in the outbox, if any."""
Middleware = Callable[[Handler], Handler]
Begin = Callable[[], AbstractAsyncContextManager[Any]]
"""Open a transaction that commits when the context ends well and is rolled back when it doesn't."""
Deduplicate = Callable[[Any, HandlerRequest], Awaitable[bool]]
"""Note a message in a transaction, and tell whether it is new."""
Record = Callable[[Any, HandlerRequest, Sequence[Any]], Awaitable[None]]
"""Record the events that a handler returned, in a transaction."""

ORDER = ("acknowledge", "transaction", "inbox", "outbox")
ADVICE = "stand them in the order acknowledge, transaction, inbox, outbox, handler, each once"
_STAGES = "postroom_stages"
_Next = TypeVar("_Next", bound=Callable[..., Any])


class _Scope(msgspec.Struct):
    transaction: Any


_scope: ContextVar[_Scope | None] = ContextVar("postroom_transaction", default=None)


def current_transaction() -> Any:
    """Return the transaction in which the event at hand is dealt with.

    That is a SQLAlchemy `AsyncSession` or `AsyncConnection`, or a psycopg `AsyncConnection`, whichever
    `transaction` was given. Don't commit it: that is done when the handler has returned.

    Raises: InvalidRequest outside of `transaction`.
    """
    scope = _scope.get()
    if scope is None:
        raise InvalidRequest(f"There is no transaction here; wrap the handler in `transaction`: {ADVICE}.")
    return scope.transaction


def pipeline(*stages: Any) -> Any:
    """Return `a(b(c(handler)))` for `a, b, c, handler`: middlewares as they are read, the handler last.

    Raises: InvalidRequest when they stand in a wrong order.
    """
    *middlewares, handler = stages
    for middleware in reversed(middlewares):
        handler = middleware(handler)
    return handler


def make_acknowledge(
    source: Source, delay_ms: Callable[[int], int]
) -> Callable[[Handler], Callable[[SourceMessage], Awaitable[None]]]:
    """Make the middleware that settles deliveries: acked after success, asked for again after a failure.

    Arguments:
        delay_ms: how long to wait for the next delivery, given which one has failed, counted from 1.
    """

    def acknowledge(next_: Handler) -> Callable[[SourceMessage], Awaitable[None]]:
        async def handle(message: SourceMessage) -> None:
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
                    error=repr(error),
                )
                await source.nak([message], delay)
            else:
                await source.ack([message])

        return _staged("acknowledge", next_, handle)

    return acknowledge


def make_transaction(begin: Begin) -> Middleware:
    """Make the middleware that deals with each event in a transaction of its own."""

    def transaction(next_: Handler) -> Handler:
        async def handle(request: HandlerRequest) -> Sequence[Any] | None:
            if _scope.get() is not None:
                raise InvalidRequest(f"There is a transaction here already; {ADVICE}.")
            async with begin() as opened:
                token = _scope.set(_Scope(opened))
                try:
                    return await next_(request)
                finally:
                    _scope.reset(token)

        return _staged("transaction", next_, handle)

    return transaction


def make_inbox(deduplicate: Deduplicate) -> Middleware:
    """Make the middleware that leaves out events which were dealt with before (SDS-047 POL-047-003)."""

    def inbox(next_: Handler) -> Handler:
        async def handle(request: HandlerRequest) -> Sequence[Any] | None:
            transaction = current_transaction()
            if not request.message_id:
                raise InvalidRequest(
                    f"A message of {request.subject} has no id, so the inbox can't tell whether it came "
                    "before; publish it with a Nats-Msg-Id."
                )
            if not await deduplicate(transaction, request):
                logger().info("inbox.duplicate", message_id=request.message_id, subject=request.subject)
                return None
            return await next_(request)

        return _staged("inbox", next_, handle)

    return inbox


def make_outbox(record: Record) -> Middleware:
    """Make the middleware that records what the handler returns, and returns nothing itself."""

    def outbox(next_: Handler) -> Handler:
        async def handle(request: HandlerRequest) -> Sequence[Any] | None:
            transaction = current_transaction()
            events = await next_(request)
            if events:
                await record(transaction, request, events)
            return None

        return _staged("outbox", next_, handle)

    return outbox


def _staged(name: str, inner: Any, handler: _Next) -> _Next:
    """Note which middlewares a handler is made of, after seeing that this one may stand around the others."""
    within: tuple[str, ...] = getattr(inner, _STAGES, ())
    misplaced = [other for other in within if ORDER.index(other) <= ORDER.index(name)]
    if misplaced:
        raise InvalidRequest(f"The middleware {name} stands outside of {misplaced[0]}; {ADVICE}.")
    setattr(handler, _STAGES, (name, *within))
    return handler
