"""A worker that stops, fails or starts again loses nothing."""

import asyncio
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from postroom import InvalidRequest, MailboxClosed, NewMessage, TopicPolicy, Worker, connect
from postroom.adapters.compose import OwnedMailbox
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.workers import consumer_run, handler_calls
from postroom.application.workers.handler_calls import LoopWatch
from postroom.domain.errors import Unavailable
from tests.support.waiting import SECONDS, until, within
from tests.support.worker_runs import running, send, unsettled

PATIENT = TopicPolicy(max_attempts=1_000, backoff_base_ms=1, backoff_max_ms=1)
"""For visibility timeouts so short that a busy machine exceeds them many times."""


async def test_stopping_lets_handlers_finish(mailbox: OwnedMailbox) -> None:
    worker, started = Worker(), asyncio.Event()

    @worker.consumer("orders", concurrency=2)
    async def handle(_: bytes) -> None:
        started.set()
        await asyncio.sleep(0.3)

    await send(mailbox, b"1", b"2")
    async with running(worker, mailbox) as task:
        await within(started.wait())
    assert task.result().handled == 2
    assert await unsettled(mailbox) == {}


@pytest.mark.parametrize("is_async", [True, False])
async def test_handlers_that_do_not_finish_in_time_are_cancelled_and_their_messages_released(
    mailbox: OwnedMailbox, is_async: bool
) -> None:
    worker, started, release = Worker(), threading.Event(), threading.Event()

    async def handle_async(_: bytes) -> None:
        started.set()
        await asyncio.Event().wait()

    def handle(_: bytes) -> None:
        started.set()
        release.wait(SECONDS)

    worker.consumer("orders")(handle_async if is_async else handle)
    await send(mailbox, b"1")
    async with running(worker, mailbox, stop_ms=100):
        await until(started.is_set, SECONDS)
    release.set()
    (message,) = await mailbox.receive_messages("orders")
    assert message.attempt == 1


async def test_a_handler_that_ignores_its_cancellation_does_not_keep_the_worker_from_stopping(
    mailbox: OwnedMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_run, "CANCEL_SECONDS", 0.1)
    worker, started, release = Worker(), asyncio.Event(), asyncio.Event()

    @worker.consumer("orders")
    async def handle(_: bytes) -> None:
        started.set()
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await within(release.wait())

    await send(mailbox, b"1", b"2")
    async with running(worker, mailbox, stop_ms=100):
        await within(started.wait())
    release.set()
    received = await mailbox.receive_messages("orders", max_messages=2)
    assert [each.payload for each in received] == [b"1", b"2"]


async def test_a_batch_whose_handler_ignores_its_cancellation_is_delivered_again_at_once(
    mailbox: OwnedMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_run, "CANCEL_SECONDS", 0.1)
    worker, started, release = Worker(), asyncio.Event(), asyncio.Event()

    @worker.consumer("orders", batch=3)
    async def handle(_: list[bytes]) -> None:
        started.set()
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await within(release.wait())

    await send(mailbox, b"1", b"2", b"3")
    async with running(worker, mailbox, stop_ms=100):
        await within(started.wait())
    left = await unsettled(mailbox)
    release.set()
    assert left == {"ready": 3}


async def test_a_cancelled_worker_returns_its_messages_at_once(mailbox: OwnedMailbox) -> None:
    worker, started = Worker(), asyncio.Event()

    @worker.consumer("orders")
    async def handle(_: bytes) -> None:
        started.set()
        await asyncio.Event().wait()

    await send(mailbox, b"1")
    task = asyncio.create_task(worker.run(mailbox))
    await within(started.wait())
    with pytest.raises(InvalidRequest, match="is running"):
        await worker.run(mailbox)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    (message,) = await mailbox.receive_messages("orders")
    assert message.attempt == 1


async def test_an_ack_that_is_refused_altogether_does_not_stop_the_worker(
    mailbox: OwnedMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, seen = Worker(), []

    @worker.consumer("orders", visibility="250ms")
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
        async with asyncio.timeout(SECONDS):
            while await unsettled(mailbox):
                await asyncio.sleep(0.01)
    assert set(seen) == {b"1", b"2"}


async def test_an_outage_of_the_mailbox_is_waited_for(
    mailbox: OwnedMailbox, monkeypatch: pytest.MonkeyPatch
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
        await until(lambda: seen == [b"1"], SECONDS)
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
            await until(lambda: seen, SECONDS)
        async with asyncio.timeout(SECONDS):
            with pytest.raises(MailboxClosed, match="is closed"):
                await task


async def test_a_worker_runs_only_with_a_mailbox_that_is_open() -> None:
    worker = Worker()

    @worker.consumer("orders")
    async def handle(data: bytes) -> None: ...

    for nonsense in ("orders.db", None, connect("memory:")):
        with pytest.raises(InvalidRequest, match="runs with a mailbox that is open"):
            await worker.run(nonsense)  # type: ignore[arg-type]


async def test_a_worker_can_run_again_and_many_messages_are_each_handled_once(mailbox: OwnedMailbox) -> None:
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


def test_a_loop_that_is_blocked_after_a_pause_without_messages_is_noticed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handler_calls, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(handler_calls, "IDLE_SECONDS", 3_600.0)

    async def main() -> None:
        watch = LoopWatch(lambda task: None)
        with watch:
            await until(lambda: watch.is_idle)
            watch.note()
            give_up_at = time.monotonic() + SECONDS
            while not caplog.messages and time.monotonic() < give_up_at:
                time.sleep(0.01)  # noqa: ASYNC251  # as a handler may do

    asyncio.run(main())
    assert any("worker.loop_blocked" in line for line in caplog.messages)
