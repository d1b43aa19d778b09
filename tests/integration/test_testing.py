"""`postroom.testing`: what depends on time happens when the test moves the clock."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
import time_machine
from freezegun import freeze_time

from postroom import InvalidRequest, NewMessage, RetryLater, TopicPolicy, Worker
from postroom.testing import ManualClock, MemoryMailbox, memory_mailbox, open_memory_mailbox, time_travel

__all__ = ["memory_mailbox", "time_travel"]  # the fixtures
TimeTravel = Callable[[Any], Awaitable[None]]

WAIT_SECONDS = 60


async def test_a_delayed_message_is_delivered_when_the_clock_reaches_its_time(
    memory_mailbox: MemoryMailbox,
) -> None:
    await memory_mailbox.send_message(NewMessage(topic="jobs", payload=b"1", deliver_after_ms=3_600_000))
    assert await memory_mailbox.receive_messages("jobs") == []
    await memory_mailbox.clock.advance(3_599)
    assert await memory_mailbox.receive_messages("jobs") == []
    await memory_mailbox.clock.advance(1)
    (message,) = await memory_mailbox.receive_messages("jobs")
    assert message.payload == b"1"


async def test_moving_the_clock_wakes_a_waiting_receive(memory_mailbox: MemoryMailbox) -> None:
    await memory_mailbox.send_message(NewMessage(topic="jobs", payload=b"1", deliver_after_ms=5_000))
    waiting = asyncio.create_task(memory_mailbox.receive_messages("jobs", wait_ms=60_000))
    await asyncio.sleep(0.01)
    await memory_mailbox.clock.advance(5)
    async with asyncio.timeout(WAIT_SECONDS):
        assert len(await waiting) == 1


async def test_deliveries_time_out_and_are_dead_lettered_by_the_clock() -> None:
    policy = TopicPolicy(max_attempts=2, visibility_ms=30_000)
    async with open_memory_mailbox("acme@one", default_policy=policy) as mailbox:
        await mailbox.send_message(NewMessage(topic="jobs", payload=b"1"))
        for attempt in (1, 2):
            (message,) = await mailbox.receive_messages("jobs")
            assert message.attempt == attempt
            await mailbox.clock.advance(30)
        assert await mailbox.receive_messages("jobs") == []
        (dead,) = (await mailbox.list_dead_letters("jobs")).items
    assert dead.reason == "max_attempts"


async def test_mailboxes_may_share_a_clock_which_goes_only_forward() -> None:
    clock = ManualClock()
    async with open_memory_mailbox(clock=clock) as first, open_memory_mailbox("b@c", clock=clock) as second:
        await first.clock.advance(10)
        assert first.engine.now() == second.engine.now()
        with pytest.raises(InvalidRequest, match="can't be moved back"):
            await clock.advance(-1)
        for nonsense in (float("nan"), float("inf"), 10**400, "5", None, True):
            with pytest.raises(InvalidRequest, match="seconds must be"):
                await clock.advance(nonsense)  # type: ignore[arg-type]
        assert first.engine.now() == second.engine.now()
    await clock.advance(1)


class Order(msgspec.Struct):
    id: str
    total: int = 0


def new_shop() -> Worker:
    """Return a worker whose orders are charged and then mailed, a day later if they are large."""
    worker = Worker()

    @worker.consumer("orders")
    async def charge(order: Order) -> None:
        if order.total < 0:
            raise ValueError("no negative total")
        await worker.send(mail, order.id, delay="1d" if order.total > 100 else "0")

    @worker.consumer("mail")
    def mail(order_id: str) -> None:
        if order_id == "later":
            raise RetryLater("1h")

    return worker


async def test_a_run_handles_what_handlers_send_and_assertions_tell_what_was_sent_and_handled(
    memory_mailbox: MemoryMailbox, time_travel: TimeTravel
) -> None:
    worker = new_shop()
    for order in (b'{"id": "o1"}', b'{"id": "o2", "total": 200}', b'{"id": "later"}'):
        await memory_mailbox.send_message(NewMessage("orders", order))
    counts = await worker.run_once(memory_mailbox)
    assert (counts.handled, counts.failed) == (4, 0)
    assert len(memory_mailbox.assert_sent("mail")) == 3
    (sent,) = memory_mailbox.assert_sent("mail", "o2", count=1)
    assert (await memory_mailbox.get_message(sent)).status == "delayed"
    memory_mailbox.assert_handled("orders", Order("o1"), count=0)  # as total is not in it
    memory_mailbox.assert_handled("orders", {"id": "o1"})
    memory_mailbox.assert_handled("mail", b"o1", count=1)
    memory_mailbox.assert_handled("mail", "o2", count=0)
    await time_travel("2h")
    assert (await worker.run_once(memory_mailbox)).handled == 0
    memory_mailbox.assert_handled("mail", count=1)
    await time_travel(timedelta(days=1))
    assert (await worker.run_once(memory_mailbox)).handled == 1
    memory_mailbox.assert_handled("mail", "o2", count=1)


async def test_an_assertion_that_fails_shows_the_messages_with_their_statuses_and_errors(
    memory_mailbox: MemoryMailbox,
) -> None:
    with pytest.raises(AssertionError, match=r"No message of topic mail was sent:\n  there is no message"):
        memory_mailbox.assert_sent("mail")
    for n in range(12):
        await memory_mailbox.send_message(NewMessage("orders", b'{"id": "o%d", "total": -1}' % n))
    await new_shop().run_once(memory_mailbox)
    with pytest.raises(AssertionError) as error:
        memory_mailbox.assert_handled("orders", {"id": "o3", "total": -1}, count=2)
    lines = str(error.value).splitlines()
    assert (
        lines[0] == "Not 2 messages of topic orders with the payload {'id': 'o3', 'total': -1} were handled:"
    )
    assert lines[1].startswith(
        '  orders b\'{"id": "o0", "total": -1}\' is delayed, ValueError: no negative total'
    )
    assert (len(lines), lines[-1]) == (12, "  and 2 others")
    others: list[Any] = [None, {}, 0, "o1", b""]
    for payload in others:
        memory_mailbox.assert_sent("orders", payload, count=0)


@pytest.mark.parametrize("wrong", ["-1s", "soon", timedelta(seconds=-1), "40000d"])
async def test_a_duration_that_is_none_moves_no_clock(memory_mailbox: MemoryMailbox, wrong: Any) -> None:
    before = memory_mailbox.clock.wall()
    with pytest.raises(InvalidRequest, match="seconds must be"):
        await memory_mailbox.clock.advance(wrong)
    assert memory_mailbox.clock.wall() == before


@pytest.mark.parametrize("library", ["freezegun", "time-machine"])
async def test_the_clock_of_the_application_may_be_frozen(
    memory_mailbox: MemoryMailbox, time_travel: TimeTravel, library: str
) -> None:
    worker, moments = Worker(), list[datetime]()

    @worker.consumer("jobs")
    def note(data: bytes) -> None:
        moments.append(datetime.now(UTC))

    day = datetime(2031, 5, 5, tzinfo=UTC)
    frozen = (
        freeze_time(day, real_asyncio=True)
        if library == "freezegun"
        else time_machine.travel(day, tick=False)
    )
    with frozen:
        await memory_mailbox.send_message(NewMessage("jobs", b"", deliver_after_ms=60_000))
        assert (await worker.run_once(memory_mailbox)).handled == 0
        await time_travel("1m")
        assert (await worker.run_once(memory_mailbox)).handled == 1
    assert moments == [day]
    (id_,) = memory_mailbox.assert_handled("jobs", b"")
    assert (await memory_mailbox.get_message(id_)).history[0].at.startswith("2030-01-01")


async def test_a_run_that_ends_by_itself_handles_calls_and_chains_over_several_handlers(
    memory_mailbox: MemoryMailbox,
) -> None:
    worker = Worker()

    @worker.consumer("double", results=True)
    def double(number: int) -> int:
        return 2 * number

    @worker.consumer("steps")
    async def step(number: int) -> None:
        if number < 40:
            await worker.send(step, await worker.call(double, number + 1, timeout="1m"))

    @worker.consumer("idle.*")
    def idle(data: bytes) -> None: ...

    await worker.send(step, 1, mailbox=memory_mailbox)
    async with asyncio.timeout(WAIT_SECONDS):
        counts = await worker.run(memory_mailbox, once=True)
    assert counts.handled == 9  # 1, 4, 10, 22, 46 and four doubles
    assert not (await memory_mailbox.get_backlog()).shards
