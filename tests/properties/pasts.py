"""Mailboxes with a generated past: steps taken through the public handlers, under a clock that tests move."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from hypothesis import strategies as st

from postroom.adapters.compose import OwnedMailbox
from postroom.application.ports.event_log import EventLog
from postroom.application.query_results import Backlog, DeadLetter
from postroom.application.received_messages import ReceivedMessage
from postroom.domain.errors import Rejected
from postroom.domain.mailbox.counts import TopicCount, count
from postroom.domain.names import message_id
from postroom.domain.policy import MailboxLimits, TopicPolicy
from tests.support.steps import Operate, Wait
from tests.support.stores import Place, message

POLICY = TopicPolicy(
    shards=2,
    visibility_ms=250,
    max_attempts=3,
    backoff_base_ms=100,
    backoff_max_ms=500,
    replay_window_ms=500,
    ready_retention_ms=60_000,
    dead_retention_ms=90_000,
    dead_capacity=2,
    priorities=True,
    priority_aging_ms=1_000,
)
LIMITS = MailboxLimits(history_retention_ms=120_000)
TOPICS = ("orders", "mail")


@dataclass(frozen=True)
class Send:
    topic: str
    delay_ms: int = 0
    ttl_seconds: int = 0
    idem_key: str | None = None
    outside_id: bool = False
    priority: int = 5


@dataclass(frozen=True)
class Receive:
    topic: str
    visibility_ms: int | None = None


@dataclass(frozen=True)
class Settle:
    """Settle, or extend, one of the latest deliveries; 0 is the very latest."""

    how: str
    which: int
    delay_ms: int | None = None


@dataclass(frozen=True)
class Reopen:
    reboot: bool = False


@dataclass(frozen=True)
class Retain:
    """Let a day pass and remove what is older than the history retention."""


Step = Send | Receive | Settle | Operate | Wait | Reopen | Retain

_topics = st.sampled_from([*TOPICS, TOPICS[0], TOPICS[0]])
sends = st.builds(
    Send,
    _topics,
    st.sampled_from([0, 0, 0, 400]),
    st.sampled_from([0, 0, 0, 1]),
    st.sampled_from([None, None, "key"]),
    st.booleans(),
    st.sampled_from([5, 5, 0, 10]),
)
receives = st.builds(Receive, _topics, st.sampled_from([None, None, 1_000]))
settles = st.builds(
    Settle,
    st.sampled_from(["ack", "nack", "nack", "extend", "reject", "release"]),
    st.sampled_from([0, 0, 0, 1, 2, 3]),
    st.sampled_from([None, None, 0, 5_000]),
)
waits = st.builds(Wait, st.sampled_from([1, 100, 300, 2_000, 70_000]))
restarts = st.builds(Reopen, st.booleans())
operations = st.builds(
    Operate, st.sampled_from(["redrive", "purge", "policy", "cancel", "reschedule"]), _topics
)
steps: st.SearchStrategy[Step] = st.one_of(
    sends, sends, receives, receives, settles, settles, waits, restarts, operations, st.just(Retain())
)
_soon = st.builds(Wait, st.sampled_from([0, 1, 100, 300, 600]))


def _poison(topic: str, pause: Step, what_follows: Sequence[Step]) -> list[Step]:
    attempts: list[Step] = [Receive(topic), Settle("nack", 0, 0)] * POLICY.max_attempts
    return [Send(topic), *attempts, pause, Operate("redrive", topic), *what_follows]


_episodes: st.SearchStrategy[list[Step]] = st.one_of(
    st.builds(_poison, _topics, _soon, st.tuples(_soon, receives, _soon, settles)),
    st.tuples(sends, receives, _soon, settles).map(list),
    st.tuples(_soon, receives, _soon, settles).map(list),
    st.tuples(_soon, receives, _soon, settles, _soon, receives).map(list),
    st.lists(steps, min_size=1, max_size=2),
)
histories: st.SearchStrategy[list[Step]] = st.lists(_episodes, min_size=1, max_size=12).map(
    lambda episodes: [step for episode in episodes for step in episode]
)
"""Steps of which many follow up on the one before, so that messages live through much."""


def without_retention(taken: list[Step]) -> list[Step]:
    """Return the steps that leave the log whole."""
    return [step for step in taken if not isinstance(step, Retain)]


@dataclass(frozen=True)
class Seen:
    """What the live engine answered when its last event was `position` and the log's time `now` (µs)."""

    position: int
    now: int
    backlog: Backlog
    at_last_event: list[TopicCount]
    dead: tuple[DeadLetter, ...]


@dataclass
class Past:
    """A mailbox's log after some steps, and what its engine said along the way."""

    place: Place
    log: EventLog
    seen: list[Seen] = field(default_factory=list)


def live(place: Place, steps: Sequence[Step], policy: TopicPolicy = POLICY) -> Past:
    """Take steps in a mailbox, and look at it after each."""
    return asyncio.run(_live(place, steps, policy))


def as_time(us: int) -> datetime:
    """Return µs since 1970 as a time."""
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us)


async def _live(place: Place, steps: Sequence[Step], policy: TopicPolicy) -> Past:
    past = Past(place, place.open_log())
    received: list[ReceivedMessage] = []
    todo = list(steps)
    while True:
        async with place.open(policy=policy, limits=LIMITS) as mailbox:
            past.seen.append(await _look(mailbox))
            while todo:
                step = todo.pop(0)
                place.clock.advance(1)
                if isinstance(step, Reopen):
                    if step.reboot:
                        place.clock.reboot(after_ms=1)
                    break
                with suppress(Rejected):  # a refused command leaves no trace
                    await _take(mailbox, place, step, received)
                past.seen.append(await _look(mailbox))
            else:
                return past


async def _look(mailbox: OwnedMailbox) -> Seen:
    """Look at a mailbox between two events; one that its timers cause meanwhile has it looked at again."""
    while True:
        state, now = mailbox.engine.mailbox, mailbox.engine.now()
        backlog, dead = await mailbox.get_backlog(), (await mailbox.list_dead_letters()).items
        seen = Seen(state.position, now, backlog, count(state, state.at), dead)
        if seen.position == backlog.position == state.position:
            return seen


async def _take(mailbox: OwnedMailbox, place: Place, step: Step, received: list[ReceivedMessage]) -> None:
    match step:
        case Wait(ms):
            place.clock.advance(ms)
        case Retain():
            place.clock.advance(24 * 60 * 60 * 1_000)
            await mailbox.retention.enforce_age()
        case Send(topic, delay_ms, ttl_seconds, idem_key, outside_id, priority):
            await mailbox.send_message(
                message(
                    topic=topic,
                    deliver_after_ms=delay_ms,
                    ttl_seconds=ttl_seconds,
                    idem_key=idem_key,
                    message_id=f"order {place.clock.wall_us}" if outside_id else None,
                    priority=priority,
                )
            )
        case Receive(topic, visibility_ms):
            received += await mailbox.receive_messages(
                topic, max_messages=2, visibility_ms=visibility_ms, consumer="worker"
            )
        case Settle(how, which, delay_ms) if received:
            receipt = received[-1 - which % len(received)].receipt
            if how == "ack":
                await mailbox.ack_messages([receipt])
            elif how == "reject":
                await mailbox.nack_messages([receipt], reason=f"no {which}", action="reject")
            elif how == "release":
                await mailbox.nack_messages([receipt], delay_ms=delay_ms, action="release")
            elif how == "nack":
                await mailbox.nack_messages([receipt], reason=f"no {which}", delay_ms=delay_ms)
            else:
                await mailbox.extend_visibility([receipt], visibility_ms=300)
        case Operate("redrive", topic):
            await mailbox.redrive_dead_letters(topic)
        case Operate("purge", topic):
            await mailbox.purge_topic(topic, ready=True)
        case Operate("cancel" | "reschedule" as how, topic):
            unsettled = [each for each in mailbox.engine.mailbox.messages.values() if each.topic == topic]
            ids = [message_id(each.stream) for each in unsettled[:2]]
            if how == "cancel":
                await mailbox.cancel_messages(ids, reason="ordered twice", principal="ann")
            else:
                await mailbox.reschedule_messages(ids, deliver_after_ms=400)
        case Operate("policy", topic):
            await mailbox.set_topic_policy(topic, TopicPolicy(visibility_ms=300, max_attempts=2, shards=2))
