"""Waiting receivers are woken in their order, and only as many as there are messages."""

import asyncio

from postroom.application.mailbox.command_queue import LongPolls
from postroom.domain.errors import MailboxClosed

LONG_MS = 60_000


async def start(polls: LongPolls, count: int, topic: str = "orders") -> list["asyncio.Task[None]"]:
    """Return receivers that wait."""
    tasks = [asyncio.create_task(polls.wait((topic,), LONG_MS)) for _ in range(count)]
    await asyncio.sleep(0)
    assert polls.count(topic) == count
    return tasks


async def woken(tasks: list["asyncio.Task[None]"]) -> list[bool]:
    await asyncio.sleep(0.01)
    return [task.done() for task in tasks]


async def test_receivers_are_woken_in_order_of_arrival() -> None:
    polls = LongPolls()
    tasks = await start(polls, 4)
    polls.wake("orders", 2)
    assert await woken(tasks) == [True, True, False, False]
    assert polls.count("orders") == 2
    polls.wake_all(MailboxClosed("closed"))
    await asyncio.gather(*tasks)
    assert list(polls) == []


async def test_receivers_of_other_topics_are_not_woken() -> None:
    polls = LongPolls()
    orders, invoices = await start(polls, 1), await start(polls, 1, "invoices")
    polls.wake("orders", 10)
    assert await woken([*orders, *invoices]) == [True, False]
    polls.wake_all(MailboxClosed("closed"))
    await asyncio.gather(*invoices)


async def test_a_receiver_cancelled_after_its_wake_up_wakes_the_next_one() -> None:
    polls = LongPolls()
    tasks = await start(polls, 3)
    polls.wake("orders", 1)
    tasks[0].cancel()
    assert await woken(tasks) == [True, True, False]
    assert tasks[0].cancelled()
    polls.wake_all(MailboxClosed("closed"))
    await tasks[2]


async def test_a_receiver_cancelled_before_its_wake_up_consumes_none() -> None:
    polls = LongPolls()
    tasks = await start(polls, 2)
    tasks[0].cancel()
    await asyncio.sleep(0)
    polls.wake("orders", 1)
    assert await woken(tasks) == [True, True]


async def test_waiting_ends_after_the_timeout() -> None:
    polls = LongPolls()
    await polls.wait(("orders",), 1)
    assert list(polls) == []
