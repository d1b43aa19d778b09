"""Dispatch of events to handlers by type: the exact type, else the first pattern that matches (ADR 0092)."""

from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from time import perf_counter
from typing import Literal, get_args

from postroom.application.metrics import OTHERS, Histogram, new_histogram
from postroom.application.ports.event_handler import EventHandler, HandlerRequest
from postroom.application.telemetry import logger
from postroom.domain.arguments import check_text
from postroom.domain.errors import InvalidRequest
from postroom.domain.inbox import PROCESSED, HandlerResult, Outcome

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
    """Return the setting; raise InvalidRequest if it is another than those of `Unhandled`."""
    if check_text("unhandled", unhandled, 1) not in get_args(Unhandled):
        choices = " or ".join(get_args(Unhandled))
        raise InvalidRequest(f"unhandled must be {choices}; it was {unhandled!r}.")
    return unhandled
