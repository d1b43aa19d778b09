"""Delivery of a message to its handler; the response is recorded in the inbox or the dead letters."""

import asyncio
import inspect
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from time import perf_counter
from typing import Any, Literal, TypeVar, get_args
from uuid import UUID

import msgspec

from postroom.application.cloudevents import event_id
from postroom.application.inbox.dead_letters import DeadLetterPublisher
from postroom.application.inbox.middleware import Handler, Middleware, pipeline
from postroom.application.inbox.request import Unreadable, inbox_id, read_cloud_event, read_request
from postroom.application.metrics import OTHERS, Histogram, new_histogram
from postroom.application.outbox.events import MESSAGE_ID
from postroom.application.ports.event_log import Clock
from postroom.application.ports.inbox import EventHandler, HandlerRequest, InboxRepository
from postroom.application.ports.source import SourceMessage
from postroom.application.telemetry import logger, summarize
from postroom.domain.arguments import check_items, check_text
from postroom.domain.errors import InvalidRequest, PoisonMessage, PostroomError
from postroom.domain.inbox import (
    PROCESSED,
    Acknowledge,
    DeliveryPolicy,
    HandlerResult,
    InboxMessage,
    Outcome,
    Redeliver,
    RouteToDeadLetter,
    Settlement,
    give_up,
    settle,
)


class InboxDelivery:
    """Delivery of single messages to a handler, with the outcome recorded in inbox and dead letters.

    Arguments:
        stream: messages without an id are identified by their sequence in this stream.
        busy_ms: how long another worker's delivery of a message, while in progress, prevents one here.
    """

    def __init__(
        self,
        inbox: InboxRepository,
        handler: EventHandler,
        dead_letters: DeadLetterPublisher,
        clock: Clock,
        policy: DeliveryPolicy,
        *,
        stream: str,
        busy_ms: int = 0,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._inbox = inbox
        self._handler = handler
        self._dead_letters = dead_letters
        self._clock = clock
        self._policy = policy
        self._stream = stream
        self._busy_ms = busy_ms
        self._jitter = jitter
        self._unrecorded: set[UUID] = set()

    def message_id(self, message: SourceMessage) -> UUID:
        """Return the id of a message in the inbox."""
        return identify(message, self._stream)

    async def deliver(self, message: SourceMessage) -> Settlement:
        """Pass a message to the handler, and return how to settle it.

        When this returns `RouteToDeadLetter`, the dead letter has already been published.

        Raises:
            DuplicateInboxMessage: the message is settled already; acknowledge it.
            PostroomError: the inbox or the dead-letter subject can't be used; ask for redelivery.
        """
        message_id = self.message_id(message)
        # The inbox still regards a delivery that ended here without a record as in progress.
        busy_ms = 0 if message_id in self._unrecorded else self._busy_ms
        self._unrecorded.discard(message_id)
        state = await self._inbox.insert(message_id, message.subject, self._clock.wall(), busy_ms=busy_ms)
        self._unrecorded.add(message_id)
        settlement = give_up(state, self._policy) or settle(
            await call_handler(self._handler, message, message_id),
            state.attempts,
            message.delivered,
            self._policy,
            self._jitter(),
        )
        await self._record(message, state, settlement)
        self._unrecorded.discard(message_id)
        return settlement

    async def dead_letter(self, message: SourceMessage, error: PostroomError) -> None:
        """Dead-letter a message on its last delivery, without a record in the inbox, which is unavailable."""
        settlement = RouteToDeadLetter("max_deliver", str(error))
        await self._publish(message, self.message_id(message), settlement, message.delivered)

    async def _record(self, message: SourceMessage, state: InboxMessage, settlement: Settlement) -> None:
        message_id, now = state.message_id, self._now(state)
        match settlement:
            case Acknowledge():
                await self._inbox.mark_processed(message_id, now)
            case RouteToDeadLetter(reason, error):
                # Published first: if this process is killed in between, the message is delivered again.
                await self._publish(message, message_id, settlement, state.attempts)
                await self._inbox.mark_dead_lettered(message_id, f"{reason}: {error}", now)
            case Redeliver():
                await self._inbox.record_error(message_id, settlement.last_error, now)

    async def _publish(
        self, message: SourceMessage, message_id: UUID, settlement: RouteToDeadLetter, attempts: int
    ) -> None:
        await self._dead_letters.publish(message, str(message_id), settlement, attempts, self._clock.wall())
        logger().warning(
            "inbox.dead_lettered",
            message_id=str(message_id),
            subject=message.subject,
            reason=settlement.reason,  # the last error, which may quote the payload, is in the dead letter
            attempts=attempts,
        )

    def _now(self, message: InboxMessage) -> int:
        # Another worker, whose clock is ahead, may have received it first.
        return max(self._clock.wall(), message.received_at)


async def call_handler(handler: EventHandler, message: SourceMessage, message_id: UUID) -> HandlerResult:
    """Pass a message to its handler and return the result.

    Arguments:
        message_id: used in the request if the message has no id.
    """
    try:
        request = read_request(message)
    except Unreadable as error:
        return HandlerResult("unreadable", str(error))
    if not request.message_id:
        request = msgspec.structs.replace(request, message_id=str(message_id))
    try:
        return await handler.handle(request)
    except (Exception, GeneratorExit, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        logger().exception("inbox.handler_defect", message_id=request.message_id)
        return HandlerResult("failed", summarize(error))


def identify(message: SourceMessage, stream: str) -> UUID:
    """Return the inbox id of a message: of its `Nats-Msg-Id`, or the source and id of a CloudEvent.

    Without a valid one, it is derived from the message's sequence.
    """
    try:
        id_ = message.headers.get(MESSAGE_ID)
        if not id_ and (event := read_cloud_event(message)) is not None:
            id_ = event_id(event.attributes["source"], event.attributes["id"])
        return inbox_id(id_ or f"{stream}/{message.sequence}")
    except Unreadable:
        return inbox_id(f"{stream}/{message.sequence}")


Unhandled = Literal["dead-letter", "ignore"]
"""What happens to an event whose type has no handler."""
MAX_LABELS = 100
"""Handlers with metrics of their own; those after them are counted together."""


class EventDispatcher:
    """Handler that passes each event to the handler of its type, and measures the calls of each.

    Arguments:
        handlers: by event type, or by pattern with `*`, `?` or `[...]`.

    Raises: InvalidRequest without handlers, or for an invalid event type or `unhandled`.
    """

    def __init__(self, handlers: Mapping[str, EventHandler], *, unhandled: Unhandled = "dead-letter") -> None:
        if not handlers:
            raise InvalidRequest("No handlers are registered; register one, for the event type * if for all.")
        self._handlers = {check_event_type(each): handler for each, handler in handlers.items()}
        self._unhandled = check_unhandled(unhandled)
        self._labels = {each: each if n < MAX_LABELS else OTHERS for n, each in enumerate(handlers)}
        self.seconds: dict[str, Histogram] = {label: new_histogram() for label in self._labels.values()}
        """Duration of calls, by event type or pattern of the handler."""
        self.outcomes: dict[str, Counter[Outcome]] = {label: Counter() for label in self.seconds}
        """Outcomes of calls, by event type or pattern of the handler."""
        self.unhandled = 0
        """Number of events whose type has no handler."""

    async def handle(self, request: HandlerRequest) -> HandlerResult:
        """Handle an event with the handler of its type; see `EventHandler`."""
        key = find_handler(self._handlers, request.event_type)
        if key is None:
            self.unhandled += 1
            return self._without_handler(request)
        label = self._labels[key]
        outcome: Outcome = "failed"
        start = perf_counter()
        try:
            result = await self._handlers[key].handle(request)
            outcome = result.outcome
            return result
        finally:
            self.seconds[label].observe(perf_counter() - start)
            self.outcomes[label][outcome] += 1

    async def close(self) -> None:
        """Close the handlers; closing twice is fine."""
        for handler in self._handlers.values():
            await handler.close()

    def _without_handler(self, request: HandlerRequest) -> HandlerResult:
        if self._unhandled == "ignore":
            logger().info("inbox.ignored", message_id=request.message_id, subject=request.subject)
            return PROCESSED
        return HandlerResult("unhandled", no_handler(request.event_type))


def find_handler(handlers: Mapping[str, object], event_type: str) -> str | None:
    """Return the key of an event type's handler: itself, else the first pattern that matches, else None."""
    if event_type in handlers:
        return event_type
    return next((pattern for pattern in handlers if fnmatchcase(event_type, pattern)), None)


def no_handler(event_type: str) -> str:
    """Return the reason why an event can't be handled."""
    return f"No handler is registered for the event type {event_type[:200]!r}; register one, and redrive it."


def check_event_type(event_type: object) -> str:
    """Return an event type or pattern; raise InvalidRequest if it is not text."""
    return check_text("event_type", event_type, 1)


def check_unhandled(unhandled: Unhandled) -> Unhandled:
    """Return the setting; raise InvalidRequest if it is not a value of `Unhandled`."""
    if check_text("unhandled", unhandled, 1) not in get_args(Unhandled):
        choices = " or ".join(get_args(Unhandled))
        raise InvalidRequest(f"unhandled must be {choices}; it was {unhandled!r}.")
    return unhandled


_Function = TypeVar("_Function", bound=Callable[..., Any])


class EventHandlers:
    """Functions that handle events by event type; `postroom inbox consume --handlers module:name` runs them.

        handlers = EventHandlers(middlewares=[transaction(engine), inbox(), outbox()])

        @handlers.on("order_placed")
        async def place(request: HandlerRequest) -> None: ...

    It is a handler itself: a service may call it with a request, or end a `pipeline` with it.

    Arguments:
        middlewares: functions that take a handler and return one, the outermost first.
        unhandled: what happens to an event whose type has no function: `dead-letter` or `ignore`.

    Raises: InvalidRequest for an argument of a wrong type.
    """

    def __init__(
        self, *, middlewares: Sequence[Middleware] = (), unhandled: Unhandled = "dead-letter"
    ) -> None:
        self._middlewares = check_items("middlewares", middlewares)
        for middleware in self._middlewares:
            if not callable(middleware):
                raise InvalidRequest(f"A middleware must be a function, not {type(middleware).__name__}.")
        self._unhandled = check_unhandled(unhandled)
        self._functions: dict[str, Handler] = {}

    @property
    def functions(self) -> Mapping[str, Handler]:
        """Return the functions by event type or pattern, within their middlewares."""
        return self._functions

    @property
    def unhandled(self) -> Unhandled:
        """Return the result for an event whose type has no function."""
        return self._unhandled

    def on(self, event_type: str) -> Callable[[_Function], _Function]:
        """Register the decorated coroutine function as the handler of events.

        Returning means processed. `PoisonMessage` makes the event a dead letter, and after any other error it
        is delivered again.

        Arguments:
            event_type: a type, or a pattern with `*`, `?` or `[...]`. An event whose type several match goes
                to the function of its exact type, else to the first that was registered.

        Raises: InvalidRequest for an event type that is malformed or registered twice, and for a function
            that is no coroutine function.
        """
        check_event_type(event_type)

        def register(function: _Function) -> _Function:
            name = getattr(function, "__qualname__", type(function).__qualname__)
            if not any(map(inspect.iscoroutinefunction, (function, type(function).__call__))):
                raise InvalidRequest(
                    f"Handler {name} of {event_type} must be a coroutine function, written as async def."
                )
            if event_type in self._functions:
                raise InvalidRequest(f"The event type {event_type} has a handler already.")
            self._functions[event_type] = pipeline(*self._middlewares, function)
            return function

        return register

    async def __call__(self, request: HandlerRequest) -> Sequence[Any] | None:
        """Call the function of an event's type, and return its result.

        Raises: PoisonMessage if it has none and such events become dead letters.
        """
        key = find_handler(self._functions, request.event_type)
        if key is not None:
            return await self._functions[key](request)
        if self._unhandled == "ignore":
            return None
        raise PoisonMessage(no_handler(request.event_type))
