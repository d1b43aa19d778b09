"""Handlers that get several messages: in a batch, or one after the other of an ordered key."""

import asyncio
from collections import Counter
from typing import Any

import msgspec
import pytest

from postroom import InvalidRequest, NewMessage, PoisonMessage, ReceivedMessage, Worker
from postroom.adapters.compose import OwnedMailbox
from tests.support.waiting import SECONDS, until_answer
from tests.support.worker_runs import running, send, unsettled


class Order(msgspec.Struct):
    id: str
    total: int


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_handler_of_batches_gets_lists_and_each_of_their_messages_is_settled(
    mailbox: OwnedMailbox, is_async: bool
) -> None:
    worker, batches = Worker(), list[list[str]]()

    def store(orders: list[Order], messages: list[ReceivedMessage]) -> list[Exception | None]:
        assert [message.json()["id"] for message in messages] == [order.id for order in orders]
        batches.append([order.id for order in orders])
        return [
            ValueError("once") if order.id == "o3" and message.attempt == 1 else None
            for order, message in zip(orders, messages, strict=True)
        ]

    async def store_async(orders: list[Order], messages: list[ReceivedMessage]) -> list[Exception | None]:
        return store(orders, messages)

    worker.consumer("orders", batch=4, concurrency=2)(store_async if is_async else store)
    valid = [msgspec.json.encode(Order(f"o{number}", number)) for number in range(10)]
    await send(mailbox, *valid[:5], b"no order", *valid[5:])

    async def is_done() -> bool:
        return await unsettled(mailbox) == {"dead": 1}

    async with running(worker, mailbox) as task:
        await until_answer(is_done)
    assert max(map(len, batches)) <= 4
    assert max(map(len, batches)) > 1
    handled = Counter(each for batch in batches for each in batch)
    assert handled == {f"o{number}": 2 if number == 3 else 1 for number in range(10)}
    assert (task.result().handled, task.result().failed) == (10, 3)


@pytest.mark.parametrize("fails", ["raises", "returns too few", "returns no list", "hangs", "exits", "ends"])
async def test_a_batch_that_fails_is_retried_as_a_whole(mailbox: OwnedMailbox, fails: str) -> None:
    worker, batches = Worker(), list[list[bytes]]()

    @worker.consumer("orders", batch=100, timeout="200ms")
    async def handle(payloads: list[bytes]) -> Any:
        batches.append(sorted(payloads))
        if len(batches) > 1:
            return None
        if fails == "hangs":
            await asyncio.sleep(60)
        if fails in ("raises", "exits", "ends"):
            raise {"raises": ValueError("no"), "exits": SystemExit(), "ends": GeneratorExit()}[fails]
        return [None] if fails == "returns too few" else 7

    await send(mailbox, *(b"%d" % n for n in range(5)))

    async def is_done() -> bool:
        return await unsettled(mailbox) == {}

    async with running(worker, mailbox) as task:
        await until_answer(is_done)
    assert len(batches[0]) == 5
    assert Counter(each for batch in batches for each in batch) == {b"%d" % n: 2 for n in range(5)}
    assert (task.result().handled, task.result().failed) == (5, 1 if fails == "ends" else 5)


async def test_batches_keep_the_order_of_keys_and_a_stop_releases_what_they_hold(
    mailbox: OwnedMailbox,
) -> None:
    worker, handled = Worker(), list[str]()
    blocks = asyncio.Event()

    @worker.consumer("orders", batch=3, concurrency=3)
    async def handle(payloads: list[str], messages: list[ReceivedMessage]) -> list[Exception | None]:
        handled.extend(payloads)
        await asyncio.sleep(0.002)
        if len(handled) > 20:
            blocks.set()
            await asyncio.Event().wait()
        return [
            ValueError("once") if payload == "a3" and handled.count("a3") == 1 else None
            for payload in payloads
        ]

    await mailbox.set_topic_policy("orders", {"ordered_keys": True, "key_batch": 5})
    keys = [f"{key}{number}" for number in range(1, 10) for key in "ab"] + ["c1", "c2", "c3", "c4", "c5"]
    await mailbox.send_batch([NewMessage("orders", key.encode(), sticky_key=key[0]) for key in keys])
    running_worker = asyncio.create_task(worker.run(mailbox, stop_ms=1))
    await asyncio.wait_for(blocks.wait(), SECONDS)
    worker.stop()
    await asyncio.wait_for(running_worker, SECONDS)
    for key in "ab":
        own = list(dict.fromkeys(int(each[1:]) for each in handled if each[0] == key))
        assert own == sorted(own)
    states = await unsettled(mailbox)
    assert states.pop("ready") > 0
    assert states == {}


@pytest.mark.parametrize("annotation", [bytes, dict, list])
def test_a_handler_of_batches_must_take_lists(annotation: Any) -> None:
    def handle(payloads: annotation) -> None: ...

    with pytest.raises(InvalidRequest, match="annotate the parameter payloads with a list"):
        Worker().consumer("orders", batch=2)(handle)


def test_a_consumer_of_batches_has_no_middlewares() -> None:
    with pytest.raises(InvalidRequest, match="middlewares take one message at a time"):
        Worker(middlewares=[lambda next_: next_]).consumer("orders", batch=2)
    with pytest.raises(InvalidRequest, match="middlewares take one message at a time"):
        Worker().consumer("orders", batch=2, middlewares=[lambda next_: next_])
    for wrong in (0, 257, True, "2"):
        with pytest.raises(InvalidRequest, match="batch"):
            Worker().consumer("orders", batch=wrong)  # type: ignore[arg-type] # wrong on purpose


@pytest.mark.parametrize("error", [ValueError, SystemExit, PoisonMessage])
@pytest.mark.parametrize("concurrency", [1, 8])
async def test_messages_of_an_ordered_key_that_come_together_are_handled_one_after_the_other(
    mailbox: OwnedMailbox, error: type[BaseException], concurrency: int
) -> None:
    worker, handled = Worker(), list[str]()
    busy: set[str | None] = set()

    @worker.consumer("orders", concurrency=concurrency)
    async def handle(message: ReceivedMessage) -> None:
        assert message.ordered_key not in busy
        busy.add(message.ordered_key)
        handled.append(message.payload.decode())
        await asyncio.sleep(0.002)
        busy.remove(message.ordered_key)
        if message.payload == b"a2" and handled.count("a2") == 1:
            raise error("once")

    policy = {"ordered_keys": True, "key_batch": 4, "dead_letters_hold_keys": True}
    await mailbox.set_topic_policy("orders", policy)
    keys = [f"{key}{number}" for number in range(1, 7) for key in "abc"]
    await mailbox.send_batch([NewMessage("orders", key.encode(), sticky_key=key[0]) for key in keys])
    is_held = error is PoisonMessage

    async def is_done() -> bool:
        return await unsettled(mailbox) == ({"dead": 1, "ready": 4} if is_held else {})

    async with running(worker, mailbox):
        await until_answer(is_done)
    retried = ["1", "2"] if is_held else ["1", "2", "2", "3", "4", "5", "6"]
    for key in "abc":
        expected = retried if key == "a" else ["1", "2", "3", "4", "5", "6"]
        assert [each[1] for each in handled if each[0] == key] == expected


async def test_a_worker_that_stops_releases_the_later_messages_of_a_key(mailbox: OwnedMailbox) -> None:
    worker, began = Worker(), asyncio.Event()

    @worker.consumer("orders", concurrency=8)
    async def handle(message: ReceivedMessage) -> None:
        began.set()
        await asyncio.Event().wait()

    await mailbox.set_topic_policy("orders", {"ordered_keys": True, "key_batch": 4})
    await mailbox.send_batch([NewMessage("orders", b"%d" % n, sticky_key="k") for n in range(3)])
    running_worker = asyncio.create_task(worker.run(mailbox, stop_ms=1))
    await asyncio.wait_for(began.wait(), SECONDS)
    worker.stop()
    await asyncio.wait_for(running_worker, SECONDS)
    received = await mailbox.receive_messages("orders")
    assert [(each.payload, each.attempt) for each in received] == [(b"0", 1), (b"1", 1), (b"2", 1)]
