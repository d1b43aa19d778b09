"""A worker settles each delivery as its handler ends: once when all is well, again after a failure."""

import asyncio
import functools
import json
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from postroom import (
    NewMessage,
    PoisonMessage,
    ReceivedMessage,
    Reject,
    Retry,
    RetryLater,
    TopicPolicy,
    Worker,
    exponential,
)
from postroom.adapters.compose import OwnedMailbox
from tests.support.waiting import SECONDS, until, until_answer
from tests.support.worker_runs import running, send, unsettled

PAGE = (Path(__file__).parents[3] / "docs" / "workers.md").read_text("utf-8")


class Order(msgspec.Struct):
    id: str
    total: int


async def test_a_message_whose_handler_raises_is_retried_and_then_dead_lettered_with_the_error(
    mailbox: OwnedMailbox,
) -> None:
    worker, attempts = Worker(), []

    @worker.consumer("orders", concurrency=3)
    async def handle(message: ReceivedMessage) -> None:
        attempts.append((message.payload, message.attempt))
        if message.payload == b"bad" or message.attempt == 1:
            raise ValueError(f"no {message.payload.decode()}")

    await send(mailbox, b"bad", b"good")
    async with running(worker, mailbox) as task:
        await until(lambda: len(attempts) == 4, SECONDS)
    assert sorted(attempts) == [(b"bad", 1), (b"bad", 2), (b"good", 1), (b"good", 2)]
    assert (task.result().handled, task.result().failed) == (1, 3)
    assert await unsettled(mailbox) == {"dead": 1}
    (dead,) = (await mailbox.list_dead_letters()).items
    assert dead.last_error == "ValueError: no bad"


async def test_a_dead_letter_keeps_the_traceback_without_values_of_the_payload_and_local_variables(
    mailbox: OwnedMailbox,
) -> None:
    worker = Worker()

    @worker.consumer("orders", batch=2, retry=Retry(attempts=1))
    async def handle(orders: list[Order]) -> None:
        try:
            raise LookupError("no account")
        except LookupError as error:
            error.add_note("of the bank")
            raise ValueError(f"{orders} can't be charged") from error

    await send(mailbox, *(json.dumps({"id": each, "total": 31_415}).encode() for each in ("alice", "bertha")))
    async with running(worker, mailbox):
        await until_answer(lambda: _are_dead(mailbox, 2))
    for letter in (await mailbox.list_dead_letters()).items:
        text = (await mailbox.get_message(letter.message_id)).traceback or ""
        assert text.startswith("Traceback (most recent call last):\n")
        assert "LookupError: no account\nof the bank" in text
        assert "in handle\n" in text
        assert "[redacted]" in text.splitlines()[-1]
        assert not any(secret in text for secret in ("alice", "bertha", "31415", "31_415"))


async def _are_dead(mailbox: OwnedMailbox, count: int) -> bool:
    return await unsettled(mailbox) == {"dead": count}


async def test_a_message_that_its_handler_calls_poison_is_a_dead_letter_after_one_attempt(
    mailbox: OwnedMailbox,
) -> None:
    worker, attempts = Worker(), []

    @worker.consumer("orders")
    async def handle(message: ReceivedMessage) -> None:
        attempts.append(message.attempt)
        raise PoisonMessage("no such customer")

    await send(mailbox, b"bad")

    async def is_dead() -> bool:
        return await unsettled(mailbox) == {"dead": 1}

    async with running(worker, mailbox):
        await until_answer(is_dead)
    (dead,) = (await mailbox.list_dead_letters()).items
    assert (attempts, dead.reason, dead.last_error) == ([1], "rejected", "PoisonMessage: no such customer")


async def test_the_retry_of_a_consumer_decides_on_attempts_backoff_and_dead_letters(
    mailbox: OwnedMailbox,
) -> None:
    worker, attempts = Worker(), list[str]()
    errors: dict[str, BaseException] = {
        "twice": ValueError("again"),
        "never": LookupError("hopeless"),
        "reject": Reject("refused"),
        "snooze": RetryLater("1ms", count=False),
        "later": RetryLater("1ms"),
    }

    @worker.consumer(
        "orders", retry=Retry(attempts=2, backoff=exponential("1ms", max="1ms"), never=(LookupError,))
    )
    def handle(payload: str) -> None:
        attempts.append(payload)
        if payload != "snooze" or attempts.count(payload) < 5:
            raise errors[payload]

    # The policy alone would dead-letter none of them, and retry none of them soon.
    await mailbox.set_topic_policy(
        "orders", {"max_attempts": 99, "backoff_base_ms": 3_600_000, "backoff_max_ms": 3_600_000}
    )
    await send(mailbox, *(name.encode() for name in errors))

    async def is_done() -> bool:
        return await unsettled(mailbox) == {"dead": 4}

    async with running(worker, mailbox) as task:
        await until_answer(is_done)
    assert Counter(attempts) == {
        "twice": 2,
        "never": 1,
        "reject": 1,
        "snooze": 5,
        "later": 2,
    }
    assert (task.result().handled, task.result().failed) == (1, 4)
    letters = (await mailbox.list_dead_letters()).items
    assert {each.last_error for each in letters} == {
        "ValueError: again",
        "LookupError: hopeless",
        "Reject: refused",
        "RetryLater: the handler asked for another delivery after 1 ms",
    }


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
    mailbox: OwnedMailbox, error: type[BaseException], is_async: bool
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


async def end_as_a_generator() -> None:
    raise GeneratorExit


async def cancel_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def leave_a_cancellation_behind() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


@pytest.mark.parametrize("end", [end_as_a_generator, cancel_itself, leave_a_cancellation_behind])
async def test_a_handler_that_ends_its_task_does_not_keep_later_messages_from_being_handled(
    mailbox: OwnedMailbox, end: Callable[[], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    worker, handled = Worker(), []

    @worker.consumer("orders")
    async def handle(data: bytes) -> None:
        if data == b"bad":
            await end()
        handled.append(data)

    await send(mailbox, b"bad", b"good")
    async with asyncio.timeout(SECONDS):
        await worker.run(mailbox, once=True)
        assert handled[-1] == b"good"
        async with running(worker, mailbox):
            await send(mailbox, b"later")
            await until(lambda: b"later" in handled)
    assert "worker.handler_restarted" in caplog.text
    assert set(await unsettled(mailbox)) <= {"dead"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit])
async def test_a_thread_that_raises_what_ends_a_loop_fails_only_its_delivery(
    mailbox: OwnedMailbox, error: type[BaseException]
) -> None:
    worker = Worker()

    @worker.consumer("orders")
    def handle(data: bytes) -> None:
        if data == b"bad":
            raise error

    await send(mailbox, b"bad", b"good")
    assert (await worker.run(mailbox, once=True)).handled == 1


async def test_an_error_whose_text_is_no_utf_8_is_kept(mailbox: OwnedMailbox) -> None:
    worker = Worker()

    @worker.consumer("orders")
    async def handle(_: bytes) -> None:
        raise ValueError("\ud800\0")

    await send(mailbox, b"bad")
    async with running(worker, mailbox), asyncio.timeout(SECONDS):
        while not (dead := (await mailbox.list_dead_letters()).items):
            await asyncio.sleep(0.01)
    assert dead[0].last_error == "ValueError: \\ud800\\x00"
    traceback = (await mailbox.get_message(dead[0].message_id)).traceback or ""
    assert traceback.endswith("ValueError: \\ud800\\x00")


async def test_a_coroutine_function_that_a_decorator_wraps_is_awaited(mailbox: OwnedMailbox) -> None:
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


async def test_a_handler_that_is_a_generator_fails_because_nothing_runs_it(mailbox: OwnedMailbox) -> None:
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


async def test_a_payload_that_can_not_be_decoded_fails_its_delivery(mailbox: OwnedMailbox) -> None:
    worker = Worker()

    @worker.consumer("orders")
    def handle(order: Order) -> None: ...

    await send(mailbox, b'{"id": "a"}', b'{"id": "a", "total": 1}')
    async with running(worker, mailbox):
        async with asyncio.timeout(SECONDS):
            while await unsettled(mailbox) != {"dead": 1}:
                await asyncio.sleep(0.01)
    (dead,) = (await mailbox.list_dead_letters()).items
    assert "missing required field `total`" in str(dead.last_error)


async def test_a_handler_that_exceeds_its_time_limit_fails_its_delivery(mailbox: OwnedMailbox) -> None:
    worker = Worker()

    @worker.consumer("orders", timeout="20ms")
    async def handle(_: bytes) -> None:
        await asyncio.Event().wait()

    await send(mailbox, b"slow")
    async with running(worker, mailbox):
        await until(lambda: len(mailbox.engine.mailbox.topics["orders"].dead) == 1, SECONDS)
    (dead,) = (await mailbox.list_dead_letters()).items
    assert dead.last_error == "the handler exceeded 20 ms"


async def test_a_thread_whose_handler_exceeded_its_time_limit_gets_no_other_message_until_it_returns(
    mailbox: OwnedMailbox,
) -> None:
    worker, release, attempts = Worker(), threading.Event(), []

    @worker.consumer("orders", timeout="1s")
    def handle(message: ReceivedMessage) -> None:
        attempts.append(message.attempt)
        release.wait(SECONDS)

    sent = await mailbox.send_message(NewMessage(topic="orders", payload=b"slow"))

    async def is_received_again() -> bool:
        history = (await mailbox.get_message(sent.message_id)).history
        return [entry.event for entry in history].count("MessageReceived") == 2

    async with running(worker, mailbox) as task:
        await until_answer(is_received_again)
        assert attempts == [1]
        release.set()
        await until(lambda: attempts == [1, 2], SECONDS)
    assert (task.result().handled, task.result().failed) == (1, 1)


async def test_a_delivery_is_extended_while_its_handler_runs(mailbox: OwnedMailbox) -> None:
    worker, attempts = Worker(), []

    @worker.consumer("orders", visibility="2s")  # long enough for a machine on which others run
    async def handle(message: ReceivedMessage) -> None:
        attempts.append(message.attempt)
        await asyncio.sleep(5)

    await send(mailbox, b"1", b"2")
    assert (await worker.run(mailbox, once=True)).handled == 2
    assert attempts == [1, 1]


async def test_no_more_handlers_run_at_once_than_the_concurrency(mailbox: OwnedMailbox) -> None:
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


@pytest.mark.parametrize("policy", [{"ordered_keys": True}, {"max_in_flight": 1}])
async def test_a_worker_that_handles_what_is_ready_goes_on_with_what_waited_for_it(
    mailbox: OwnedMailbox, policy: dict[str, Any]
) -> None:
    worker, handled = Worker(), []

    @worker.consumer("orders", concurrency=8)
    async def handle(data: bytes) -> None:
        handled.append(data)

    await mailbox.set_topic_policy("orders", TopicPolicy(**policy))
    await mailbox.send_batch([NewMessage("orders", b"%d" % number, sticky_key="a") for number in range(5)])
    assert (await worker.run(mailbox, once=True)).handled == 5
    assert handled == [b"0", b"1", b"2", b"3", b"4"]


ROWS = re.findall(r"^\| (`def`|`async def`|`def`, `async def`) \| `(.+?)` \| (.+) \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(
    ("kind", "body", "end"), [(kind, body, end) for kinds, body, end in ROWS for kind in kinds.split(", ")]
)
async def test_a_delivery_ends_as_the_table_of_the_page_says_and_the_next_is_handled(
    mailbox: OwnedMailbox, kind: str, body: str, end: str
) -> None:
    worker, names = Worker(), {"asyncio": asyncio, "sys": sys, "time": time, "Reject": Reject}
    exec(f"{kind.strip('`')} handle(message):\n    if message.payload != b'bad': return\n    {body}", names)
    handle: Any = names["handle"]
    handle.__annotations__ = {"message": ReceivedMessage}
    worker.consumer("orders", timeout="200ms", retry=Retry(attempts=1))(handle)
    await send(mailbox, b"bad")
    await send(mailbox, b"good")
    is_generator = "yield" in body  # of each message
    async with running(worker, mailbox) as task:
        await until_answer(lambda: _is_over(mailbox))
    dead = (await mailbox.list_dead_letters()).items
    errors = [each.last_error or "" for each in dead]
    if match := re.match("fails: `(.+?)`", end):
        assert [each.startswith(match[1].removesuffix("...")) for each in errors] == [True] * (
            1 + is_generator
        )
    else:
        assert (end.partition(";")[0], errors) == ("is acked", [])
    assert task.result().handled == 2 - len(dead)


async def _is_over(mailbox: OwnedMailbox) -> bool:
    return (await unsettled(mailbox)).keys() <= {"dead"}


def test_the_page_has_a_table_of_what_handlers_do() -> None:
    assert len(ROWS) == 8
