"""`EventHandlers`: registration of functions that handle events, by event type."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from postroom.application.inbox.dispatcher import (
    Unhandled,
    check_event_type,
    check_unhandled,
    find_handler,
    no_handler,
)
from postroom.application.inbox.middleware import Handler, Middleware, pipeline
from postroom.application.ports.event_handler import HandlerRequest
from postroom.domain.arguments import check_items
from postroom.domain.errors import InvalidRequest, PoisonMessage

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
        """Call the function of an event's type, and return what it returns.

        Raises: PoisonMessage if it has none and such events become dead letters.
        """
        key = find_handler(self._functions, request.event_type)
        if key is not None:
            return await self._functions[key](request)
        if self._unhandled == "ignore":
            return None
        raise PoisonMessage(no_handler(request.event_type))
