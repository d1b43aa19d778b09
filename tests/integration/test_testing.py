"""`postroom.testing`: what depends on time happens when the test moves the clock."""

import asyncio

import pytest

from postroom import InvalidRequest, NewMessage, TopicPolicy
from postroom.testing import ManualClock, MemoryMailbox, memory_mailbox, open_memory_mailbox

__all__ = ["memory_mailbox"]  # the fixture

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
