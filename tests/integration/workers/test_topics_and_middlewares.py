"""Handlers are found by topic, and surrounded by middlewares."""

import asyncio
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from postroom import (
    Forbidden,
    InvalidRequest,
    NewEvent,
    NewMessage,
    ReceivedMessage,
    RetryLater,
    SettingsChanges,
    Worker,
    current_transaction,
    inbox,
    outbox,
    transaction,
)
from postroom.adapters.compose import OwnedMailbox
from postroom.domain.capability.rights import Right
from tests.support.access import controlled_mailbox, mailbox_of
from tests.support.waiting import SECONDS, until
from tests.support.worker_runs import running, send, unsettled

# -- topics ---


async def test_a_pattern_matches_topics_present_and_future_and_exact_names_come_first(
    mailbox: OwnedMailbox,
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
        await until(lambda: len(seen) == 2, SECONDS)
        await send(mailbox, b"1", topic="orders.shipped")
        await until(lambda: len(seen) == 3, SECONDS)
    assert sorted(seen) == [("any", "orders.placed"), ("any", "orders.shipped"), ("paid", "orders.paid")]
    assert await unsettled(mailbox) == {"ready": 1}


def ordered_worker(seen: list[tuple[bytes, int]]) -> Worker:
    worker = Worker("shop")

    @worker.consumer("steps", ordered_keys=True, concurrency=8)
    async def handle(message: ReceivedMessage) -> None:
        seen.append((message.payload, message.attempt))
        if message.payload == b"1" and message.attempt == 1:
            raise RetryLater("0s")

    return worker


async def test_a_worker_orders_the_keys_of_a_topic_for_all_consumers_and_once(mailbox: OwnedMailbox) -> None:
    for number in range(3):
        await mailbox.send_message(NewMessage("steps", b"%d" % number, sticky_key="a"))
    seen: list[tuple[bytes, int]] = []
    await ordered_worker(seen).run(mailbox, once=True)
    assert seen == [(b"0", 1), (b"1", 1), (b"1", 2), (b"2", 1)]
    settings = await mailbox.get_settings()
    assert dict(settings.topics) == {"steps": {"ordered_keys": True}}
    await ordered_worker(seen).run(mailbox, once=True)
    assert await mailbox.get_settings() == settings


async def test_a_section_of_the_settings_that_orders_no_keys_wins_over_a_worker(
    mailbox: OwnedMailbox,
) -> None:
    await mailbox.set_settings(SettingsChanges(topics={"step*": {"ordered_keys": False}}))
    with pytest.raises(InvalidRequest) as refused:
        await ordered_worker([]).run(mailbox, once=True)
    assert str(refused.value) == (
        f"Section step* of the settings of mailbox {mailbox.name} sets ordered_keys to false, but worker "
        "shop handles topic steps with ordered_keys; change either."
    )
    await mailbox.set_settings(SettingsChanges(topics={"step*": {"ordered_keys": True}}))
    await ordered_worker([]).run(mailbox, once=True)


async def test_a_token_that_may_not_set_a_policy_is_told_the_command() -> None:
    async with controlled_mailbox() as place:
        limited = await mailbox_of(place, topics=["steps"], operations=(Right.RECV, Right.ACK, Right.NACK))
        with pytest.raises(Forbidden) as refused:
            await ordered_worker([]).run(limited, once=True)
    assert str(refused.value) == (
        f"The token of worker shop lacks `admin` of mailbox {place.mailbox.name} to set ordered_keys; leave "
        "it out of the consumer, and run `postroom topic policy steps ordered_keys=true`."
    )


@pytest.mark.parametrize(
    ("topic", "ordered_keys", "said"),
    [("steps.*", True, "is a pattern"), ("steps", 1, "ordered_keys"), ("steps", None, "ordered_keys")],
)
def test_keys_are_ordered_of_one_topic_only(topic: str, ordered_keys: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        Worker().consumer(topic, ordered_keys=ordered_keys)


# -- middlewares ---


async def test_middlewares_surround_the_handler_those_of_the_worker_outside(mailbox: OwnedMailbox) -> None:
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
    mailbox: OwnedMailbox, messaging_database: str
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
        async with asyncio.timeout(SECONDS):
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
