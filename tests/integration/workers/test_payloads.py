"""Handlers get what their annotations ask for."""

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import msgspec
import pydantic
import pydantic.dataclasses
import pytest

from postroom import InvalidRequest, ReceivedMessage, Worker
from postroom.adapters.compose import OwnedMailbox
from tests.support.worker_runs import send, unsettled


class Order(msgspec.Struct):
    id: str
    total: int


class Invoice(pydantic.BaseModel):
    id: str
    total: int


@dataclasses.dataclass
class Batch:
    invoices: list[Invoice]


@pydantic.dataclasses.dataclass
class Age:
    years: typing.Annotated[int, pydantic.Field(ge=0)]


class Plain:
    """A class that neither msgspec nor pydantic knows."""


class Mixed(msgspec.Struct):
    invoice: Invoice


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

    async def models(invoices: list[Invoice]) -> None:
        seen.append(invoices)

    def perhaps(invoice: Invoice | None) -> None:
        seen.append(invoice)

    async def by_name(invoices: dict[str, Invoice]) -> None:
        seen.append(invoices)

    def nested(batch: Batch) -> None:
        seen.append(batch)

    def constrained(age: Age) -> None:
        seen.append(age)

    async def after_bound(database: str, order: Order) -> None:
        seen.append((database, order))

    def around_bound(message: ReceivedMessage, /, database: str, *, order: Order) -> None:
        seen.append((message.topic, database, order))

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
    yield models, b"[" + order + b"]", [Invoice(id="a", total=5)]
    yield perhaps, b"null", None
    yield perhaps, order, Invoice(id="a", total=5)
    yield by_name, b'{"x": ' + order + b"}", {"x": Invoice(id="a", total=5)}
    yield nested, b'{"invoices": [' + order + b"]}", Batch([Invoice(id="a", total=5)])
    yield constrained, b'{"years": 5}', Age(5)
    yield functools.partial(after_bound, "db"), order, ("db", Order("a", 5))
    yield functools.partial(after_bound, database="db"), order, ("db", Order("a", 5))
    yield functools.partial(around_bound, database="db"), order, ("orders", "db", Order("a", 5))
    yield functools.partial(Callable_()), b"x", b"x"


@pytest.mark.parametrize("n", range(19))
async def test_a_handler_gets_what_its_annotations_ask_for(mailbox: OwnedMailbox, n: int) -> None:
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
        (Refused.plain, "plain: data has a type that JSON can't be decoded to: .*Plain"),
        (Refused.mixed, "mixed: data has a type that JSON can't be decoded to: .*Mixed"),
        (Refused.two, "must have one parameter"),
        (Refused.many, "must take one argument"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            decorate(handler)  # type: ignore[type-var]


class Refused:
    @staticmethod
    def plain(data: list[Plain]) -> None: ...

    @staticmethod
    def mixed(data: Mixed) -> None: ...

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
        ("orders", {"timeout": "-1s"}),
        ("orders", {"timeout": "0"}),
        ("orders", {"timeout": 30}),
        ("orders", {"timeout": timedelta(days=40_000)}),
        ("orders", {"visibility": "1ms"}),
        ("orders", {"visibility": "31d"}),
        ("orders", {"visibility": None}),
        ("orders", {"middlewares": [1]}),
        ("orders", {"middlewares": None}),
        ("[", {}),
        ("orders.[", {}),
        ("orders *", {}),
        ("[]", {}),
    ],
)
def test_malformed_options_are_refused(topic: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Worker().consumer(topic, **options)


async def test_a_worker_without_handlers_and_a_topic_registered_twice_are_refused(
    mailbox: OwnedMailbox,
) -> None:
    worker = Worker()
    with pytest.raises(InvalidRequest, match="has no handlers"):
        await worker.run(mailbox)

    def handle(_: bytes) -> None: ...

    worker.consumer("orders")(handle)
    with pytest.raises(InvalidRequest, match="has a handler of topic orders already"):
        worker.consumer("orders")(handle)
