"""A worker sends to its handlers what they can decode, to the mailbox of the message that is handled."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import pydantic
import pytest

from postroom import InvalidRequest, NewMessage, NotFound, ReceivedMessage, Reject, Worker, open_mailbox
from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.compose.connect import connect_remote
from tests.support.surfaces import served
from tests.support.waiting import SECONDS, until
from tests.support.worker_runs import running, send


class Order(msgspec.Struct, rename="camel"):
    order_id: str
    total: int = 0


class Customer(pydantic.BaseModel):
    name: str = pydantic.Field(alias="fullName")


@dataclass
class Point:
    x: int


PAYLOADS: list[tuple[Any, Any, bytes, str | None]] = [
    (Order, Order("o1", 3), b'{"orderId":"o1","total":3}', "application/json"),
    (Order, {"orderId": "o1"}, b'{"orderId":"o1"}', "application/json"),
    (Customer, Customer(fullName="Ada"), b'{"fullName":"Ada"}', "application/json"),
    (list[Customer], [Customer(fullName="Ada")], b'[{"fullName":"Ada"}]', "application/json"),
    (Point, Point(1), b'{"x":1}', "application/json"),
    (dict, {"a": [1]}, b'{"a":[1]}', "application/json"),
    (int | None, None, b"null", "application/json"),
    (bytes, b"\x00\xff", b"\x00\xff", None),
    (str, "é", "é".encode(), "text/plain; charset=utf-8"),
    (ReceivedMessage, b"raw", b"raw", None),
]


@pytest.mark.parametrize(("annotation", "payload", "data", "kind"), PAYLOADS)
def test_a_payload_is_encoded_as_the_handler_decodes_it(
    annotation: Any, payload: Any, data: bytes, kind: str | None
) -> None:
    worker = Worker()
    for name, batch in (("one", 1), ("many", 9)):

        def handle(content: Any) -> None: ...

        handle.__annotations__ = {"content": list[annotation] if batch > 1 else annotation}
        worker.consumer(name, batch=batch)(handle)
        message = worker.message(handle, payload)
        assert (message.topic, message.payload, message.content_type) == (name, data, kind)


@pytest.mark.parametrize(
    ("annotation", "payload"),
    [
        (Order, {"order_id": "o1"}),
        (Order, Point(1)),
        (Order, b"{}"),
        (Order, object()),
        (Customer, {"name": "Ada"}),
        (Customer, None),
        (list[Customer], [Order("o1")]),
        (int, "1"),
        (bytes, "text"),
        (bytes, None),
        (str, b"data"),
        (str, "\ud800"),
        (ReceivedMessage, {"a": 1}),
    ],
)
def test_a_payload_that_the_handler_could_not_take_is_refused(annotation: Any, payload: Any) -> None:
    worker = Worker()

    def handle(content: Any) -> None: ...

    handle.__annotations__ = {"content": annotation}
    worker.consumer("orders")(handle)
    with pytest.raises(InvalidRequest, match=r"Handler .*handle can't take a payload of type "):
        worker.message(handle, payload)


def test_options_are_those_of_the_message_and_the_topic_is_one_of_the_handler() -> None:
    worker, other = Worker(), Worker("other")

    @worker.consumer("orders.*")
    @worker.consumer("refunds")
    @worker.consumer("mail", subscription="mail")
    def handle(data: bytes, message: ReceivedMessage) -> None: ...

    @worker.consumer("orders.special")
    def handle_special(data: bytes) -> None: ...

    assert worker.message(handle, b"1").topic == "refunds"
    options: Any = {"key": "k", "unique_key": "u", "idem_key": "i", "priority": 9}
    message = worker.message(handle, b"1", topic="orders.eu", delay="1h", **options)
    assert message == NewMessage(
        "orders.eu",
        b"1",
        deliver_after_ms=3_600_000,
        sticky_key="k",
        unique_key="u",
        idem_key="i",
        priority=9,
    )
    assert worker.message(handle, b"1", delay=timedelta(seconds=2)).deliver_after_ms == 2_000
    wrong: Any
    for wrong in ("mail", "orders.special", "others", "", 7):
        with pytest.raises(InvalidRequest, match="topic"):
            worker.message(handle, b"1", topic=wrong)
    for wrong in ("-1s", "soon", 5):
        with pytest.raises(InvalidRequest, match="delay must be"):
            worker.message(handle, b"1", delay=wrong)
    for function in (handle_special, len, None):
        with pytest.raises(InvalidRequest, match="Worker other has no handler"):
            other.message(function, b"1")  # type: ignore[arg-type]

    @other.consumer("a.*")
    def pattern(data: bytes) -> None: ...

    with pytest.raises(InvalidRequest, match=r"gets messages of a\.\*; pass topic"):
        other.message(pattern, b"1")


async def test_a_handler_sends_to_the_mailbox_of_its_message_also_if_two_mailboxes_are_handled_at_once() -> (
    None
):
    def new_worker() -> tuple[Worker, list[Order]]:
        worker, mailed = Worker(), list[Order]()

        @worker.consumer("orders")
        async def charge(order: Order) -> None:
            await worker.send(mail, order)

        @worker.consumer("mail")
        def mail(order: Order) -> None:
            mailed.append(order)

        return worker, mailed

    async with open_mailbox("memory:", "a@x") as first, open_mailbox("memory:", "b@x") as second:
        workers = [new_worker(), new_worker()]
        for n, mailbox in enumerate((first, second)):
            await send(mailbox, b'{"orderId": "%d"}' % n)
        async with running(workers[0][0], first), running(workers[1][0], second):
            await until(lambda: all(mailed for _, mailed in workers), SECONDS)
        assert [[each.order_id for each in mailed] for _, mailed in workers] == [["0"], ["1"]]


async def test_outside_of_a_handler_a_send_names_its_mailbox(mailbox: OwnedMailbox) -> None:
    worker = Worker()

    @worker.consumer("orders", results=True)
    async def charge(order: Order) -> int:
        return order.total

    with pytest.raises(InvalidRequest, match="elsewhere, pass mailbox"):
        await worker.send(charge, Order("o1"))
    sent = await worker.send(charge, Order("o1"), mailbox=mailbox)
    assert (await mailbox.get_message(sent.message_id)).item.content_type == "application/json"
    assert await charge(Order("o1", 5)) == 5  # it is a function as before


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_a_call_returns_what_the_handler_returns_from_another_process(
    mailbox: OwnedMailbox, protocol: str
) -> None:
    worker = Worker()

    @worker.consumer("sums", results=True, concurrency=2)
    async def add(numbers: list[int]) -> Order:
        if not numbers:
            raise Reject("nothing to add")
        return Order("sum", sum(numbers))

    @worker.consumer("texts", results=True)
    def shout(text: str) -> str:
        return text.upper()

    @worker.consumer("data", results=True)
    def copy(data: bytes, message: ReceivedMessage) -> bytes:
        return data

    @worker.consumer("nothing", results=True)
    def forget(data: bytes) -> None: ...

    @worker.consumer("customers", results=True)
    async def find(name: str) -> Customer:
        total = await worker.call(add, [1, 2], timeout="1m")
        return Customer(fullName=f"{name} {total.total}")

    async with (
        running(worker, mailbox),
        served(mailbox, protocol) as url,
        connect_remote(url, timeout_ms=30_000) as client,
    ):
        assert await worker.call(add, [1, 2, 3], mailbox=client, timeout="1m") == Order("sum", 6)
        assert await worker.call(shout, "é", mailbox=client, timeout="1m") == "É"
        assert await worker.call(copy, b"\xff", mailbox=client, timeout="1m") == b"\xff"
        assert await worker.call(forget, b"", mailbox=client, timeout="1m") is None
        assert await worker.call(find, "Ada", mailbox=client, timeout="1m") == Customer(fullName="Ada 3")
        with pytest.raises(NotFound, match="Reject: nothing to add"):
            await worker.call(add, [], mailbox=client, timeout="1m")


async def test_a_call_ends_with_its_timeout_and_needs_a_handler_with_results(mailbox: OwnedMailbox) -> None:
    worker = Worker()

    @worker.consumer("slow", results=True)
    async def slow(data: bytes) -> None: ...

    @worker.consumer("none")
    async def none(data: bytes) -> None: ...

    with pytest.raises(TimeoutError, match="on topic slow has no result after 20 ms; it is ready"):
        await worker.call(slow, b"", mailbox=mailbox, timeout="20ms")
    with pytest.raises(TimeoutError, match="it is delayed"):
        await worker.call(slow, b"", mailbox=mailbox, timeout="0", delay="1h")
    with pytest.raises(InvalidRequest, match="register it with results=True"):
        await worker.call(none, b"", mailbox=mailbox)
    with pytest.raises(InvalidRequest, match="timeout must be"):
        await worker.call(slow, b"", mailbox=mailbox, timeout=5)  # type: ignore[call-overload]
