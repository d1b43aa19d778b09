"""Failover loses no message and bounds how far a delivery is out of order (svc-mailbox G-9, I-14).

Consumers receive from one shard at a constant rate. Some lose what they received, and the process that owns
the mailbox is killed again and again, also while it answers. A delivery that is lost twice is overtaken by
what is delivered in two visibility timeouts, and by no more.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroom.adapters.compose import OwnedMailbox
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.received_messages import ReceivedMessage
from postroom.domain.mailbox.queues import Shard
from postroom.domain.mailbox.topic import Topic
from postroom.domain.policy import TopicPolicy
from postroom.domain.settings import SettingsChanges
from tests.simulation.world import MS, Disk, LogHandle, SimulatedLoop
from tests.support.clocks import SimulatedClock
from tests.support.examples import examples
from tests.support.messages import MAILBOX, message

MAX_REORDER_DEPTH = 32
BATCH = 5
TICK_MS, VISIBILITY_MS = 1_000, 3_000
POLICY = TopicPolicy(shards=1, visibility_ms=VISIBILITY_MS, max_attempts=5)
WAITING = 60
"""Messages that wait at the start; each tick adds a batch, so that there is always one to deliver."""

CONSUME, LOSE, FAIL_OVER = "consume", "lose", "fail over"
STEPS = st.lists(
    st.sampled_from([CONSUME, CONSUME, LOSE]) | st.tuples(st.just(FAIL_OVER), st.integers(0, 12)), max_size=25
)
Step = str | tuple[str, int]


class Drill:
    """The mailbox, its consumers, and what they were delivered."""

    def __init__(self) -> None:
        self.clock = SimulatedClock()
        self.loop = SimulatedLoop(self.clock)
        self.disk = Disk(MAILBOX)
        self.sent = 0
        self.delivered: set[int] = set()
        self.acked: set[int] = set()
        self.depth = 0
        self.open()
        self.send(WAITING)

    def open(self) -> None:
        self.handle = LogHandle(self.disk)
        self.engine = MailboxEngine(self.handle, self.clock)
        self.loop.play(self.engine.open("an owner", settings=SettingsChanges.of(None, POLICY)))
        self.mailbox = OwnedMailbox(self.engine, self.clock)

    def send(self, count: int) -> None:
        numbers = range(self.sent, self.sent + count)
        self.loop.play(self.mailbox.send_batch([message(b"%d" % number) for number in numbers]))
        self.sent += count

    def step(self, step: Step) -> None:
        self.clock.true += TICK_MS * MS
        self.send(BATCH)
        match step:
            case (_, turns):
                self.fail_over(int(turns))
            case "lose" if self.may_lose():
                self.receive()
            case _:
                self.ack(self.receive())
        assert self.depth <= MAX_REORDER_DEPTH
        assert self.measured() <= MAX_REORDER_DEPTH

    def may_lose(self) -> bool:
        """Return whether nothing that would be delivered now was lost twice."""
        peeked = self.loop.play(self.mailbox.peek_messages("orders", limit=BATCH))
        return all(each.attempts < 2 for each in peeked)

    def receive(self) -> list[ReceivedMessage]:
        received: list[ReceivedMessage] = self.loop.play(
            self.mailbox.receive_messages("orders", max_messages=BATCH)
        )
        for number in (int(each.payload) for each in received):
            assert number not in self.acked
            self.depth = max(self.depth, sum(later > number for later in self.delivered))
            self.delivered.add(number)
        return received

    def ack(self, received: list[ReceivedMessage]) -> None:
        assert self.loop.play(self.mailbox.ack_messages([each.receipt for each in received])) == [None] * len(
            received
        )
        self.acked |= {int(each.payload) for each in received}

    def fail_over(self, turns: int) -> None:
        """Kill the owner some turns of the loop after a consumer called it, and open another."""

        async def call() -> None:
            answer = asyncio.ensure_future(self.mailbox.receive_messages("orders", max_messages=BATCH))
            for _ in range(turns):
                await asyncio.sleep(0)
            self.handle.kill()
            await asyncio.wait([answer])
            answer.exception()  # the consumer is gone, whatever the answer

        if self.may_lose():
            self.loop.play(call())
        self.handle.kill()
        self.loop.play(self.engine.close())
        self.open()

    def measured(self) -> float:
        metrics = {each.name: each.samples for each in self.loop.play(self.mailbox.measure())}
        return max((float(value) for _, value in metrics["postroom_reorder_depth_max"]), default=0)

    def drain(self) -> None:
        for _ in range(self.sent):
            self.clock.true += TICK_MS * MS
            received = self.receive()
            self.ack(received)
            if not received and len(self.acked) == self.sent:
                break
        assert self.acked == set(range(self.sent)), "no message is lost"
        assert self.loop.play(self.mailbox.list_dead_letters()).items == ()
        assert self.depth <= MAX_REORDER_DEPTH

    def close(self) -> None:
        self.handle.kill()
        self.loop.play(self.engine.close())
        self.loop.close()


def run(steps: list[Step]) -> int:
    """Return the largest reorder depth of a drill."""
    drill = Drill()
    try:
        for step in steps:
            drill.step(step)
        drill.drain()
        return drill.depth
    finally:
        drill.close()


@given(STEPS)
@settings(max_examples=examples(60))
def test_under_failover_no_message_is_lost_and_the_reorder_depth_is_bounded(steps: list[Step]) -> None:
    run(steps)


def test_without_losses_a_shard_is_first_in_first_out_through_failovers() -> None:
    assert run([CONSUME, (FAIL_OVER, 0)] * 8) == 0


TWICE_LOST: list[Step] = [LOSE, CONSUME, CONSUME, LOSE, *[CONSUME] * 6, (FAIL_OVER, 9), *[CONSUME] * 4]


def test_a_delivery_that_is_lost_is_overtaken() -> None:
    assert 2 * BATCH < run(TWICE_LOST) <= MAX_REORDER_DEPTH


def a_redelivery_at_the_end_of_the_line(patch: pytest.MonkeyPatch) -> None:
    ready = Shard.ready
    patch.setattr(
        Shard,
        "ready",
        lambda self, now: iter(sorted(ready(self, now), key=lambda each: (each.version, each.position))),
    )


def visibility_timeouts_that_are_too_long(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(globals(), "POLICY", TopicPolicy(shards=1, visibility_ms=30_000, max_attempts=5))


def a_lost_delivery_that_never_comes_back(patch: pytest.MonkeyPatch) -> None:
    ready = Topic.ready

    def skipping(topic: Topic, *arguments: int) -> Any:
        return (each for each in ready(topic, *arguments) if each.attempt == 0)

    patch.setattr(Topic, "ready", skipping)


@pytest.mark.parametrize(
    "put_in",
    [
        a_redelivery_at_the_end_of_the_line,
        visibility_timeouts_that_are_too_long,
        a_lost_delivery_that_never_comes_back,
    ],
    ids=lambda put_in: put_in.__name__,
)
def test_the_drill_finds(
    put_in: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in(monkeypatch)
    with pytest.raises(AssertionError):
        run(TWICE_LOST)
