"""A store with dead letters of several topics, reasons and errors."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from postroom.adapters.compose import OwnedMailbox
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.messages import NewMessage
from postroom.domain.policy import TopicPolicy
from postroom.domain.settings import SettingsChanges
from tests.projections.histories import START_US, Store, build_without_spark, open_log
from tests.support.clocks import ManualClock

MAILBOX = "main@local"
POLICY = TopicPolicy(shards=1, max_attempts=1, visibility_ms=60_000)


class Failure(NamedTuple):
    """Messages of a topic that fail with one error, and the pause after them.

    Arguments:
        error: `{n}` in it is the number of the message.
    """

    topic: str
    error: str
    messages: int = 1
    pause_ms: int = 60_000


FAILURES = (
    Failure("orders.eu", "card {n} refused", 5),
    Failure("orders.us", "card {n} refused", 3, 3_600_000),
    Failure("orders.eu", "TIMEOUT after {n} ms: 100 % of\x00it", 4),
    Failure("payments", "<script>alert(1)</script> \u202eRTL_", 2, 60_000),
    Failure("payments", "card {n} refused", 2, 7_200_000),
    Failure("orders.eu", "card {n} refused", 2),
)


async def fail(post: OwnedMailbox, clock: ManualClock, failures: Sequence[Failure]) -> None:
    """Send messages that are dead-lettered at once."""
    for failure in failures:
        for number in range(failure.messages):
            await post.send_message(NewMessage(topic=failure.topic, payload=b"%d" % number))
            (received,) = await post.receive_messages(failure.topic)
            await post.nack_messages([received.receipt], reason=failure.error.format(n=number))
            clock.advance(10)
        clock.advance(failure.pause_ms)


def fill(store: Store, failures: Sequence[Failure] = FAILURES, *, start_us: int = START_US) -> None:
    """Give a store dead letters, and read models of them.

    Arguments:
        start_us: log time at which the first message is sent.
    """

    async def live() -> None:
        clock = ManualClock()
        clock.wall_us = start_us
        log = open_log(store, MAILBOX)
        engine = MailboxEngine(log, clock)
        await engine.open("a test", "queue", SettingsChanges.of(None, POLICY))
        await fail(OwnedMailbox(engine, clock), clock, failures)
        await engine.close()
        log.close()

    asyncio.run(live())
    build_without_spark(store)
