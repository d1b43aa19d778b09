"""Handlers get what their annotations ask for."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pydantic
import pytest

from postroom import InvalidRequest, ReceivedMessage, Worker
from postroom.adapters.compose import Postroom
from tests.support.worker_runs import send, unsettled


class Order(msgspec.Struct):
    id: str
    total: int


class Invoice(pydantic.BaseModel):
    id: str
    total: int


def handlers(seen: list[Any]) -> Iterator[tuple[Callable[..., Any], bytes, Any]]:
    """Yield handlers, a payload, and what they must see of it."""

    def raw(data: bytes) -> None:
        seen.append(data)

    async def text(data: str) -> None:
        seen.append(data)

    def parsed(data: dict[str, int]) -> None:
        seen.append(data)

    async def anything(data: Any) -> None:
        seen.append(data)

    def struct(order: Order) -> None:
        seen.append(order)

    async def model(invoice: Invoice) -> None:
        seen.append(invoice)

    def delivery(message: ReceivedMessage) -> None:
        seen.append(message.payload)

    async def both(message: ReceivedMessage, order: Order) -> None:
        seen.append((message.topic, order))

    class Callable_:  # noqa: N801
        async def __call__(self, data: "bytes") -> None:
            seen.append(data)

    order = b'{"id": "a", "total": 5}'
    yield raw, b"\xff", b"\xff"
    yield text, "ü".encode(), "ü"
    yield parsed, b'{"a": 1}', {"a": 1}
    yield anything, b"[1, null]", [1, None]
    yield struct, order, Order("a", 5)
    yield model, order, Invoice(id="a", total=5)
    yield delivery, b"x", b"x"
    yield both, order, ("orders", Order("a", 5))
    yield Callable_(), b"x", b"x"


@pytest.mark.parametrize("n", range(9))
async def test_a_handler_gets_what_its_annotations_ask_for(mailbox: Postroom, n: int) -> None:
    seen: list[Any] = []
    handler, payload, expected = list(handlers(seen))[n]
    worker = Worker()
    assert worker.consumer("orders")(handler) is handler
    await send(mailbox, payload)
    assert (await worker.run(mailbox, once=True)).handled == 1
    assert seen == [expected]
    assert await unsettled(mailbox) == {}


def test_a_handler_that_no_message_can_be_passed_to_is_refused() -> None:
    worker = Worker()
    decorate = worker.consumer("orders")
    for handler, reason in (
        (lambda data: None, "annotate the parameter data"),
        (lambda: None, "must have one parameter"),
        (7, "must be a function, not int"),
        (min, "Handler min can't be used"),
        (Refused.malformed, "an annotation is invalid"),
        (Refused.keyword, "must be positional"),
        (Refused.two, "must have one parameter"),
        (Refused.many, "must be positional"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            decorate(handler)  # type: ignore[type-var]


class Refused:
    @staticmethod
    def keyword(*, data: bytes) -> None: ...

    @staticmethod
    def two(first: bytes, second: str) -> None: ...

    @staticmethod
    def many(*data: bytes) -> None: ...

    @staticmethod
    def malformed(data: "1 +") -> None: ...  # type: ignore[valid-type]  # noqa: F722 - as users write it


@pytest.mark.parametrize(
    ("topic", "options"),
    [
        ("", {}),
        ("a b", {}),
        (7, {}),
        ("orders", {"concurrency": 0}),
        ("orders", {"concurrency": True}),
        ("orders", {"timeout_ms": -1}),
        ("orders", {"visibility_ms": 1}),
        ("orders", {"middlewares": [1]}),
        ("orders", {"middlewares": None}),
    ],
)
def test_malformed_options_are_refused(topic: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Worker().consumer(topic, **options)


async def test_a_worker_without_handlers_and_a_topic_registered_twice_are_refused(mailbox: Postroom) -> None:
    worker = Worker()
    with pytest.raises(InvalidRequest, match="has no handlers"):
        await worker.run(mailbox)

    def handle(_: bytes) -> None: ...

    worker.consumer("orders")(handle)
    with pytest.raises(InvalidRequest, match="has a handler of topic orders already"):
        worker.consumer("orders")(handle)
