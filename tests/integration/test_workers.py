"""Workers handle the messages of a mailbox: once each when all is well, again after a failure."""

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pydantic
import pytest

from postroom import (
    InvalidRequest,
    MailboxClosed,
    NewEvent,
    NewMessage,
    ReceivedMessage,
    TopicPolicy,
    Worker,
    connect,
    current_transaction,
    inbox,
    open_mailbox,
    outbox,
    transaction,
)
from postroom.adapters.compose import Postroom
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.workers import consumer_run
from postroom.domain.errors import Unavailable
from tests.support.waiting import until

WAIT_SECONDS = 240
FAST = TopicPolicy(max_attempts=2, backoff_base_ms=1, backoff_max_ms=1)
PATIENT = TopicPolicy(max_attempts=1_000, backoff_base_ms=1, backoff_max_ms=1)
"""For visibility timeouts so short that a busy machine exceeds them many times."""


class Order(msgspec.Struct):
    id: str
    total: int


class Invoice(pydantic.BaseModel):
    id: str
    total: int


@pytest.fixture
async def mailbox() -> AsyncIterator[Postroom]:
    async with open_mailbox("memory:", default_policy=FAST) as opened:
        yield opened


async def send(mailbox: Postroom, *payloads: bytes, topic: str = "orders") -> None:
    await mailbox.send_batch([NewMessage(topic=topic, payload=payload) for payload in payloads])


async def unsettled(mailbox: Postroom) -> dict[str, int]:
    """Return the numbers of messages that are not settled."""
    shards = (await mailbox.get_backlog()).shards
    names = ("ready", "in_flight", "delayed", "dead")
    counts = {name: sum(getattr(shard, name) for shard in shards) for name in names}
    return {name: count for name, count in counts.items() if count}


@asynccontextmanager
async def running(worker: Worker, mailbox: Postroom, **options: Any) -> AsyncIterator["asyncio.Task[Any]"]:
    """Run a worker until the context ends, and see that it stops."""
    task = asyncio.create_task(worker.run(mailbox, **options))
    try:
        yield task
    finally:
        worker.stop()
        async with asyncio.timeout(WAIT_SECONDS):
            await task


# -- payloads ---


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


# -- settling ---


async def test_a_message_whose_handler_raises_is_retried_and_then_dead_lettered_with_the_error(
    mailbox: Postroom,
) -> None:
    worker, attempts = Worker(), []

    @worker.consumer("orders", concurrency=3)
    async def handle(message: ReceivedMessage) -> None:
        attempts.append((message.payload, message.attempt))
        if message.payload == b"bad" or message.attempt == 1:
            raise ValueError(f"no {message.payload.decode()}")

    await send(mailbox, b"bad", b"good")
    async with running(worker, mailbox) as task:
        await until(lambda: len(attempts) == 4, WAIT_SECONDS)
    assert sorted(attempts) == [(b"bad", 1), (b"bad", 2), (b"good", 1), (b"good", 2)]
    assert (task.result().handled, task.result().failed) == (1, 3)
    assert await unsettled(mailbox) == {"dead": 1}
    (dead,) = await mailbox.list_dead_letters()
    assert dead.last_error == "ValueError: no bad"


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class NoException(BaseException):
    """As pytest, trio and gevent derive theirs."""


@pytest.mark.parametrize(
    "error",
    [SystemExit, asyncio.CancelledError, StopIteration, TimeoutError, KeyError, NoText, NoException],
)
@pytest.mark.parametrize("is_async", [True, False])
async def test_no_exception_of_a_handler_ends_the_worker(
    mailbox: Postroom, error: type[BaseException], is_async: bool
) -> None:
    worker = Worker()

    async def handle_async(data: bytes) -> None:
        if data == b"bad":
            raise error if error is not StopIteration else RuntimeError

    def handle(data: bytes) -> None:
        if data == b"bad":
            raise error

    worker.consumer("orders")(handle_async if is_async else handle)
    await send(mailbox, b"bad", b"good")
    counts = await worker.run(mailbox, once=True)
    assert (counts.handled, counts.failed >= 1) == (1, True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit])
async def test_a_thread_that_raises_what_ends_a_loop_fails_only_its_delivery(
    mailbox: Postroom, error: type[BaseException]
) -> None:
    worker = Worker()

    @worker.consumer("orders")
    def handle(data: bytes) -> None:
        if data == b"bad":
            raise error

    await send(mailbox, b"bad", b"good")
    assert (await worker.run(mailbox, once=True)).handled == 1


async def test_an_error_whose_text_is_no_utf_8_is_kept(mailbox: Postroom) -> None:
    worker = Worker()

    @worker.consumer("orders")
    async def handle(_: bytes) -> None:
        raise ValueError("\ud800")

    await send(mailbox, b"bad")
    async with running(worker, mailbox):
        while not (dead := await mailbox.list_dead_letters()):
            await asyncio.sleep(0.01)
    assert dead[0].last_error == "ValueError: \\ud800"


async def test_a_coroutine_function_that_a_decorator_wraps_is_awaited(mailbox: Postroom) -> None:
    worker, seen = Worker(), list[bytes]()

    async def handle(data: bytes) -> None:
        await asyncio.sleep(0)
        seen.append(data)

    @worker.consumer("orders")
    @functools.wraps(handle)
    def wrapper(data: bytes) -> Any:
        return handle(data)

    await send(mailbox, b"1")
    assert (await worker.run(mailbox, once=True)).handled == 1
    assert seen == [b"1"]


async def test_a_handler_that_is_a_generator_fails_because_nothing_runs_it(mailbox: Postroom) -> None:
    worker = Worker()

    @worker.consumer("sync")
    def generator(data: bytes) -> Iterator[bytes]:
        yield data

    @worker.consumer("async")
    async def asynchronous(data: bytes) -> AsyncIterator[bytes]:
        yield data

    await send(mailbox, b"1", topic="sync")
    await send(mailbox, b"1", topic="async")
    counts = await worker.run(mailbox, once=True)
    assert (counts.handled, counts.failed >= 2) == (0, True)


async def test_a_payload_that_can_not_be_decoded_fails_its_delivery(mailbox: Postroom) -> None:
    worker = Worker()

    @worker.consumer("orders")
    def handle(order: Order) -> None: ...

    await send(mailbox, b'{"id": "a"}', b'{"id": "a", "total": 1}')
    async with running(worker, mailbox):
        async with asyncio.timeout(WAIT_SECONDS):
            while await unsettled(mailbox) != {"dead": 1}:
                await asyncio.sleep(0.01)
    (dead,) = await mailbox.list_dead_letters()
    assert "missing required field `total`" in str(dead.last_error)


async def test_a_handler_that_exceeds_its_time_limit_fails_its_delivery(mailbox: Postroom) -> None:
    worker = Worker()

    @worker.consumer("orders", timeout_ms=20)
    async def handle(_: bytes) -> None:
        await asyncio.Event().wait()

    await send(mailbox, b"slow")
    async with running(worker, mailbox):
        await until(lambda: len(mailbox.engine.mailbox.topics["orders"].dead) == 1, WAIT_SECONDS)
    (dead,) = await mailbox.list_dead_letters()
    assert dead.last_error == "the handler exceeded 20 ms"


async def test_a_thread_whose_handler_exceeded_its_time_limit_gets_no_other_message_until_it_returns(
    mailbox: Postroom,
) -> None:
    worker, release, attempts = Worker(), threading.Event(), []

    @worker.consumer("orders", timeout_ms=20)
    def handle(message: ReceivedMessage) -> None:
        attempts.append(message.attempt)
        release.wait(WAIT_SECONDS)

    await send(mailbox, b"slow")
    async with running(worker, mailbox) as task:
        async with asyncio.timeout(WAIT_SECONDS):
            while await unsettled(mailbox) != {"in_flight": 1} or attempts != [1]:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert attempts == [1]
        release.set()
        await until(lambda: attempts == [1, 2], WAIT_SECONDS)
    assert (task.result().handled, task.result().failed) == (1, 1)


async def test_a_delivery_is_extended_while_its_handler_runs(mailbox: Postroom) -> None:
    worker, attempts = Worker(), []

    @worker.consumer("orders", visibility_ms=250)
    async def handle(message: ReceivedMessage) -> None:
        attempts.append(message.attempt)
        await asyncio.sleep(1)

    await send(mailbox, b"1", b"2")
    assert (await worker.run(mailbox, once=True)).handled == 2
    assert attempts == [1, 1]


async def test_no_more_handlers_run_at_once_than_the_concurrency(mailbox: Postroom) -> None:
    worker, now, most = Worker(), 0, 0

    @worker.consumer("orders", concurrency=7)
    async def handle(_: bytes) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1

    await send(mailbox, *[b"x"] * 100)
    assert (await worker.run(mailbox, once=True)).handled == 100
    assert most == 7
    assert await unsettled(mailbox) == {}


# -- topics ---


async def test_a_pattern_matches_topics_present_and_future_and_exact_names_come_first(
    mailbox: Postroom,
) -> None:
    worker, seen = Worker(), []

    @worker.consumer("orders.*")
    def any_order(message: ReceivedMessage) -> None:
        seen.append(("any", message.topic))

    @worker.consumer("orders.paid")
    def paid(message: ReceivedMessage) -> None:
        seen.append(("paid", message.topic))

    for topic in ("orders.placed", "orders.paid", "invoices"):
        await send(mailbox, b"1", topic=topic)
    async with running(worker, mailbox):
        await until(lambda: len(seen) == 2, WAIT_SECONDS)
        await send(mailbox, b"1", topic="orders.shipped")
        await until(lambda: len(seen) == 3, WAIT_SECONDS)
    assert sorted(seen) == [("any", "orders.placed"), ("any", "orders.shipped"), ("paid", "orders.paid")]
    assert await unsettled(mailbox) == {"ready": 1}


# -- middlewares ---


async def test_middlewares_surround_the_handler_those_of_the_worker_outside(mailbox: Postroom) -> None:
    seen: list[str] = []

    def middleware(name: str) -> Callable[[Any], Any]:
        def wrap(next_: Any) -> Any:
            async def handle(message: ReceivedMessage) -> None:
                seen.append(f"{name} {message.payload.decode()}")
                await next_(message)
                seen.append(f"{name} end")

            return handle

        return wrap

    worker = Worker(middlewares=[middleware("outer")])

    @worker.consumer("orders", middlewares=[middleware("middle"), middleware("inner")])
    def handle(data: bytes) -> None:
        seen.append("handler")

    await send(mailbox, b"1")
    await worker.run(mailbox, once=True)
    assert seen == ["outer 1", "middle 1", "inner 1", "handler", "inner end", "middle end", "outer end"]


async def test_the_middlewares_of_the_inbox_make_a_handler_take_effect_once(
    mailbox: Postroom, messaging_database: str
) -> None:
    with psycopg.connect(messaging_database) as connection:
        connection.execute("CREATE TABLE orders (id text)")
    begin = transaction(lambda: psycopg.AsyncConnection.connect(messaging_database))
    worker = Worker(middlewares=[begin, inbox(), outbox()])

    @worker.consumer("orders")
    async def place(message: ReceivedMessage, id_: str) -> list[NewEvent]:
        await current_transaction().execute("INSERT INTO orders VALUES (%s)", (id_,))
        if message.attempt == 1 and id_ == "late":
            raise ValueError("later")
        return [NewEvent(aggregate_type="order", aggregate_id=id_, event_type="placed", payload={})]

    await send(mailbox, b"early", b"late")
    async with running(worker, mailbox) as task:
        async with asyncio.timeout(WAIT_SECONDS):
            while await unsettled(mailbox):
                await asyncio.sleep(0.01)
    assert (task.result().handled, task.result().failed) == (2, 1)
    redelivered = NewMessage(topic="orders", payload=b"early", message_id="twice")
    call: Any = worker._consumers["orders"].handler.call
    handle: Any = begin(inbox()(call))
    await mailbox.send_message(redelivered)
    (message,) = await mailbox.receive_messages("orders")
    for _ in range(2):
        await handle(message)
    with psycopg.connect(messaging_database) as connection:
        orders = connection.execute("SELECT id FROM orders ORDER BY id").fetchall()
        events = connection.execute("SELECT aggregate_id FROM outbox_events ORDER BY 1").fetchall()
    assert orders == [("early",), ("early",), ("late",)]
    assert events == [("early",), ("late",)]


# -- stopping and failing ---


async def test_stopping_lets_handlers_finish(mailbox: Postroom) -> None:
    worker, started = Worker(), asyncio.Event()

    @worker.consumer("orders", concurrency=2)
    async def handle(_: bytes) -> None:
        started.set()
        await asyncio.sleep(0.3)

    await send(mailbox, b"1", b"2")
    async with running(worker, mailbox) as task:
        await started.wait()
    assert task.result().handled == 2
    assert await unsettled(mailbox) == {}


@pytest.mark.parametrize("is_async", [True, False])
async def test_handlers_that_do_not_finish_in_time_are_cancelled_and_their_messages_delivered_again(
    mailbox: Postroom, is_async: bool
) -> None:
    worker, started, release = Worker(), threading.Event(), threading.Event()

    async def handle_async(_: bytes) -> None:
        started.set()
        await asyncio.Event().wait()

    def handle(_: bytes) -> None:
        started.set()
        release.wait(WAIT_SECONDS)

    worker.consumer("orders")(handle_async if is_async else handle)
    await send(mailbox, b"1")
    async with running(worker, mailbox, stop_ms=100):
        await until(started.is_set, WAIT_SECONDS)
    release.set()
    (message,) = await mailbox.receive_messages("orders")
    assert message.attempt == 2


async def test_a_handler_that_ignores_its_cancellation_does_not_keep_the_worker_from_stopping(
    mailbox: Postroom, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_run, "CANCEL_SECONDS", 0.1)
    worker, started, release = Worker(), asyncio.Event(), asyncio.Event()

    @worker.consumer("orders")
    async def handle(_: bytes) -> None:
        started.set()
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()

    await send(mailbox, b"1", b"2")
    async with running(worker, mailbox, stop_ms=100):
        await started.wait()
    release.set()
    received = await mailbox.receive_messages("orders", max_messages=2)
    assert [each.payload for each in received] == [b"1", b"2"]


async def test_a_cancelled_worker_returns_its_messages_at_once(mailbox: Postroom) -> None:
    worker, started = Worker(), asyncio.Event()

    @worker.consumer("orders")
    async def handle(_: bytes) -> None:
        started.set()
        await asyncio.Event().wait()

    await send(mailbox, b"1")
    task = asyncio.create_task(worker.run(mailbox))
    await started.wait()
    with pytest.raises(InvalidRequest, match="is running"):
        await worker.run(mailbox)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    (message,) = await mailbox.receive_messages("orders")
    assert message.attempt == 2


async def test_an_ack_that_is_refused_altogether_does_not_stop_the_worker(
    mailbox: Postroom, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, seen = Worker(), []

    @worker.consumer("orders", visibility_ms=250)
    async def handle(data: bytes) -> None:
        seen.append(data)

    ack, refusals = mailbox.ack_messages, [InvalidRequest("no"), ZeroDivisionError()]

    async def refuse(receipts: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return await ack(receipts)

    monkeypatch.setattr(mailbox, "ack_messages", refuse)
    await mailbox.set_topic_policy("orders", PATIENT)
    await send(mailbox, b"1", b"2")
    async with running(worker, mailbox):
        async with asyncio.timeout(WAIT_SECONDS):
            while await unsettled(mailbox):
                await asyncio.sleep(0.01)
    assert set(seen) == {b"1", b"2"}


async def test_an_outage_of_the_mailbox_is_waited_for(
    mailbox: Postroom, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, seen = Worker(), []

    @worker.consumer("orders")
    async def handle(data: bytes) -> None:
        seen.append(data)

    submit, failures = MailboxEngine.submit, 6

    async def flaky(self: MailboxEngine, commands: Any) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise Unavailable("The store is down.")
        return await submit(self, commands)

    await send(mailbox, b"1")
    monkeypatch.setattr(MailboxEngine, "submit", flaky)
    async with running(worker, mailbox):
        await until(lambda: seen == [b"1"], WAIT_SECONDS)
    assert failures == 0
    assert await unsettled(mailbox) == {}


async def test_a_worker_whose_mailbox_is_closed_ends_with_an_error_that_says_so(tmp_path: Path) -> None:
    worker, seen = Worker(), []

    @worker.consumer("orders")
    async def handle(data: bytes) -> None:
        seen.append(data)

    for address in ("memory:", str(tmp_path / "orders.db")):
        seen.clear()
        async with connect(address) as mailbox:
            await mailbox.send_message(NewMessage(topic="orders", payload=b"1"))
            task = asyncio.create_task(worker.run(mailbox))
            await until(lambda: seen, WAIT_SECONDS)
        async with asyncio.timeout(WAIT_SECONDS):
            with pytest.raises(MailboxClosed, match="is closed"):
                await task


async def test_a_worker_runs_only_with_a_mailbox_that_is_open() -> None:
    worker = Worker()

    @worker.consumer("orders")
    async def handle(data: bytes) -> None: ...

    for nonsense in ("orders.db", None, connect("memory:")):
        with pytest.raises(InvalidRequest, match="runs with a mailbox that is open"):
            await worker.run(nonsense)  # type: ignore[arg-type]


async def test_a_worker_can_run_again_and_many_messages_are_each_handled_once(mailbox: Postroom) -> None:
    worker, seen = Worker(), []

    @worker.consumer("orders", concurrency=16)
    async def handle(data: bytes) -> None:
        seen.append(data)

    payloads = [b"%d" % n for n in range(3_000)]
    for first in range(0, 3_000, 1_000):
        await send(mailbox, *payloads[first : first + 1_000])
        await worker.run(mailbox, once=True)
    assert sorted(seen) == sorted(payloads)
    assert await unsettled(mailbox) == {}
