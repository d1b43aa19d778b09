"""Which handler an event gets, what is counted, and what `EventHandlers` accept."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.adapters.memory.store import FunctionEventHandler
from postroom.application.inbox.delivery import MAX_LABELS, EventDispatcher, EventHandlers, find_handler
from postroom.application.inbox.metrics import InboxSettings
from postroom.application.ports.inbox import HandlerRequest
from postroom.domain.errors import InvalidRequest, PoisonMessage
from postroom.domain.inbox import DeliveryPolicy, RouteToDeadLetter, settle


def request(event_type: str) -> HandlerRequest:
    return HandlerRequest("1", "shop.event.a.v1", event_type, 1, None, None, None, {})


async def ignore(request: HandlerRequest) -> None:
    """Handle an event without effect."""


async def refuse(request: HandlerRequest) -> None:
    raise PoisonMessage("no total")


async def crash(request: HandlerRequest) -> None:
    raise RuntimeError("down")


@given(st.lists(st.text("ab*?", min_size=1), unique=True), st.text("ab", min_size=1))
def test_the_exact_type_comes_first_and_then_the_first_pattern(types: list[str], event_type: str) -> None:
    key = find_handler(dict.fromkeys(types), event_type)
    if event_type in types:
        assert key == event_type
    elif key is not None:
        before = types[: types.index(key)]
        assert find_handler({key: None}, event_type) == key
        assert all(find_handler({each: None}, event_type) is None for each in before)
    else:
        assert "*" not in types


async def test_calls_are_counted_by_handler_and_events_without_one_become_dead_letters() -> None:
    functions = {"order_placed": ignore, "order_*": refuse, "payment_?": crash}
    dispatcher = EventDispatcher({name: FunctionEventHandler(each) for name, each in functions.items()})
    for event_type in ("order_placed", "order_placed", "order_paid", "payment_1"):
        await dispatcher.handle(request(event_type))
    result = await dispatcher.handle(request("Order_placed"))
    assert dispatcher.outcomes == {
        "order_placed": Counter(processed=2),
        "order_*": Counter(poison=1),
        "payment_?": Counter(failed=1),
    }
    assert [sum(each.counts) for each in dispatcher.seconds.values()] == [2, 1, 1]
    assert dispatcher.unhandled == 1
    settlement = settle(result, 1, 1, DeliveryPolicy(), 0.5)
    assert isinstance(settlement, RouteToDeadLetter)
    assert (settlement.reason, "'Order_placed'" in settlement.last_error) == ("unhandled", True)


async def test_events_without_a_handler_are_ignored_if_the_setting_says_so() -> None:
    dispatcher = EventDispatcher({"a": FunctionEventHandler(crash)}, unhandled="ignore")
    assert (await dispatcher.handle(request("b"))).outcome == "processed"
    assert dispatcher.unhandled == 1


async def test_handlers_after_the_first_hundred_are_counted_together() -> None:
    names = [f"type_{n}" for n in range(MAX_LABELS + 5)]
    dispatcher = EventDispatcher(dict.fromkeys(names, FunctionEventHandler(ignore)))
    for name in names:
        await dispatcher.handle(request(name))
    assert len(dispatcher.seconds) == MAX_LABELS + 1
    assert dispatcher.outcomes["*"] == Counter(processed=5)


async def test_a_handler_that_raises_is_counted_as_failed() -> None:
    class Defect(FunctionEventHandler):
        async def handle(self, request: HandlerRequest) -> Any:
            raise RuntimeError("defect")

    dispatcher = EventDispatcher({"*": Defect(ignore)})
    with pytest.raises(RuntimeError):
        await dispatcher.handle(request("a"))
    assert dispatcher.outcomes["*"] == Counter(failed=1)


async def test_event_handlers_call_the_function_of_a_type_within_the_middlewares() -> None:
    seen: list[str] = []

    def note(next_: Any) -> Any:
        async def handle(request: HandlerRequest) -> Any:
            seen.append("middleware")
            return await next_(request)

        return handle

    handlers = EventHandlers(middlewares=[note])

    @handlers.on("order_placed")
    async def place(request: HandlerRequest) -> list[str]:
        return [request.event_type]

    handlers.on("partial")(partial(place))
    assert await handlers(request("order_placed")) == ["order_placed"]
    assert await handlers(request("partial")) == ["partial"]
    with pytest.raises(PoisonMessage, match="No handler is registered for the event type 'other'"):
        await handlers(request("other"))
    assert await EventHandlers(unhandled="ignore")(request("other")) is None
    assert seen == ["middleware", "middleware"]


def test_what_can_not_be_registered_is_refused() -> None:
    handlers = EventHandlers()
    handlers.on("a")(ignore)
    options: dict[str, Any]
    wrong: list[tuple[Any, str]] = [(ignore, "has a handler already"), (print, "coroutine"), (5, "coroutine")]
    for function, problem in wrong:
        with pytest.raises(InvalidRequest, match=problem):
            handlers.on("a")(function)
    for event_type in ("", 5):
        with pytest.raises(InvalidRequest, match="event_type"):
            handlers.on(event_type)  # type: ignore[arg-type]  # wrong on purpose
    for options in ({"unhandled": "retry"}, {"unhandled": 5}, {"middlewares": 5}, {"middlewares": [5]}):
        with pytest.raises(InvalidRequest, match=r"unhandled|middleware"):
            EventHandlers(**options)
    for arguments in ({}, {"": FunctionEventHandler(ignore)}):
        with pytest.raises(InvalidRequest, match=r"No handlers|event_type"):
            EventDispatcher(arguments)


def test_the_default_handler_of_the_settings_is_the_last() -> None:
    settings = InboxSettings(handler="http://all", handlers={"a": "http://a"})
    assert list(settings.urls.items()) == [("a", "http://a"), ("*", "http://all")]
    wrong: dict[str, Any]
    for wrong in ({}, {"handler": "http://a", "handlers": {"*": "http://b"}}, {"handlers": {"a": 5}}):
        with pytest.raises(InvalidRequest, match=r"No handler|only one|handlers\.a"):
            InboxSettings(**wrong).urls  # noqa: B018  # the property checks
