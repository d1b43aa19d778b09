"""Receivers that wait are woken as if every topic were looked at after each group of commands."""

import asyncio
from functools import partial
from typing import Any

from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from postroom.application.mailbox.command_queue import LongPolls
from postroom.application.mailbox.groups import LoadedMailbox
from postroom.domain.errors import Rejected
from postroom.domain.mailbox import counts
from postroom.domain.mailbox.batch import decide_batch, evolve_batch, is_batch
from postroom.domain.mailbox.commands import (
    Ack,
    Command,
    Nack,
    Pause,
    Receive,
    Redrive,
    Resume,
    SetSettings,
    Sweep,
)
from postroom.domain.mailbox.decide import decide
from postroom.domain.mailbox.events import MailboxCreated, OwnershipTaken
from postroom.domain.mailbox.evolve import evolve
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.message import MS, Receipt
from postroom.domain.names import mailbox_stream
from postroom.domain.settings import MailboxSettings, SettingsChanges
from tests.properties.test_batches import NAME, send

TOPICS = ("orders", "calls.a", "calls.b")
SECTIONS: list[dict[str, Any]] = [
    {},
    {
        "orders": {"visibility_ms": 250, "max_attempts": 2},
        "calls.*": {"shared_limits": True, "max_in_flight": 1},
    },
    {"orders": {"ordered_keys": True, "dead_letters_hold_keys": True, "max_attempts": 1}},
    {
        "orders": {"fair_keys": True, "max_in_flight_per_key": 1},
        "calls.a": {"rate": 2, "rate_period_ms": 400},
    },
    {
        "orders": {"fair_keys": True, "rate_per_key": 1, "rate_period_ms": 300},
        "calls.a": {"max_in_flight": 2},
    },
    {"*": {"shared_limits": True, "rate": 2, "rate_period_ms": 500}, "calls.b": {"priorities": True}},
]

topics = st.sampled_from(TOPICS)
waits = st.one_of(topics.map(lambda topic: [topic]), topics.map(lambda topic: [topic]), st.just(list(TOPICS)))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), waits, st.integers(1, 3)),
        st.tuples(st.just("wait"), waits, st.integers(1, 3)),
        st.tuples(st.just("send"), topics, st.sampled_from([1, 2, 5])),
        st.tuples(st.just("send later"), topics, st.sampled_from([100, 300])),
        st.tuples(st.just("receive"), topics, st.integers(1, 3)),
        st.tuples(st.just("ack"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("nack"), st.integers(0, 5), st.sampled_from([0, 200])),
        st.tuples(st.just("reject"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("redrive"), topics, st.just(0)),
        st.tuples(st.just("pause"), topics, st.just(0)),
        st.tuples(st.just("resume"), topics, st.just(0)),
        st.tuples(st.just("time"), st.just(0), st.sampled_from([50, 300, 70_000])),
    ),
    min_size=20,
    max_size=80,
)


def _deliverable(mailbox: Mailbox, now: int, topic: str, most: int) -> int:
    return mailbox.count_deliverable(topic, now, most)


def _commands(kind: str, what: Any, number: int, sent: int, receipts: list[Receipt]) -> list[Command]:
    receipt = receipts[-1 - what % len(receipts)] if receipts and isinstance(what, int) else None
    match kind:
        case "send":
            key = "abc"[sent % 3] if number > 1 else None
            return [send(sent + each, what, b"a", None, key, 0, None) for each in range(number)]
        case "send later":
            return [send(sent, what, b"a", None, None, number, None)]
        case "receive":
            return [Receive((what,), number, 1_000_000)]
        case "ack" if receipt is not None:
            return [Ack(receipt)]
        case "nack" if receipt is not None:
            return [Nack(receipt, 0.5, delay_ms=number)]
        case "reject" if receipt is not None:
            return [Nack(receipt, 0.5, "reject")]
        case "redrive":
            return [Redrive(what, 5)]
        case "pause":
            return [Pause(what)]
        case "resume":
            return [Resume(what)]
        case _:
            return [Sweep()]


@settings(phases=[Phase.explicit, Phase.generate])  # to shrink a failure would take minutes
@example(
    [
        *[("send", "calls.a", 1), ("send", "calls.a", 1), ("receive", "calls.a", 1)],
        *[("wait", ["calls.a"], 1), ("send", "orders", 1), ("ack", 0, 0)],
    ],
    {"calls.a": {"max_in_flight": 1}},
    {},
)
@example(
    [
        *[("send", "calls.a", 1), ("send", "calls.b", 1), ("receive", "calls.a", 1)],
        *[("wait", ["calls.b"], 1), ("send", "orders", 1), ("ack", 0, 0)],
    ],
    {"calls.*": {"shared_limits": True, "max_in_flight": 1}},
    {},
)
@example(
    [
        *[("send", "orders", 1), ("receive", "orders", 1), ("wait", ["orders"], 3)],
        *[("send", "calls.a", 2), ("send", "calls.a", 2), ("send", "orders", 2)],
    ],
    {},
    {},
)
@given(steps, st.sampled_from(SECTIONS), st.sampled_from(SECTIONS))
def test_receivers_are_woken_as_if_every_topic_were_looked_at(
    steps: list[tuple[str, Any, int]], sections: dict[str, Any], later_sections: dict[str, Any]
) -> None:
    async def main() -> None:
        mailbox, own, now = Mailbox(NAME), mailbox_stream(NAME), 0
        options = MailboxSettings(topics=sections)
        evolve(mailbox, MailboxCreated(own, 1, 0, NAME, "queue", options))
        evolve(mailbox, OwnershipTaken(own, 2, 0, 1, "owner", "boot", 0, False))
        polls, waiting = LongPolls(), list[tuple[str, ...]]()
        tasks: list[asyncio.Task[None]] = []
        receipts: list[Receipt] = []
        sent = 0
        changes = [
            SetSettings(SettingsChanges(topics=each), replace=True) for each in (sections, later_sections)
        ]
        for number, (kind, what, count) in enumerate(steps):
            if kind == "wait":
                # As `MailboxEngine` does: who finds a message does not wait.
                if not any(mailbox.count_deliverable(topic, now, 1) for topic in what):
                    for _ in range(count):
                        tasks.append(asyncio.create_task(polls.wait(what, 60_000)))
                        waiting.append(tuple(what))
                    await asyncio.sleep(0)
                continue
            now += count * MS if kind == "time" else 1
            commands = _commands(kind, what, count, sent, receipts)
            sent += len(commands) if kind.startswith("send") else 0
            if number % 8 == 7:
                commands = [changes[number // 8 % 2 - 1]]
            together = decide_batch(commands, mailbox, now)
            for command in commands if together is None else commands[:1]:
                try:
                    events = decide(command, mailbox, now) if together is None else together
                except Rejected:
                    continue
                if len(events) > 1 and is_batch(events):
                    evolve_batch(mailbox, events)
                else:
                    for event in events:
                        evolve(mailbox, event)
                receipts += [
                    mailbox.messages[event.stream].receipt
                    for event in events
                    if event.type_name == "MessageReceived" and event.stream in mailbox.messages
                ]
            polls.wake_for(partial(_deliverable, mailbox, now), mailbox, now)
            for topic in sorted(TOPICS):
                woken = mailbox.count_deliverable(topic, now, len(waiting))
                for each in [each for each in waiting if topic in each][:woken]:
                    waiting.remove(each)
            assert counts.count(mailbox, now) == counts.count_each(mailbox, now)
            still = {topic: sum(topic in each for each in waiting) for topic in TOPICS}
            assert {topic: polls.count(topic) for topic in TOPICS} == still
            times = [mailbox.next_timer(), *(mailbox.next_due(topic, now) for topic in polls)]
            expected = min((time for time in times if time is not None), default=None)
            due = polls.next_due(LoadedMailbox(mailbox, b""), now)
            # Not later: a delivery of another topic that shares the limits may only delay what is due.
            assert expected is None or (due is not None and due <= expected)
        waited = {topic: polls.count(topic) for topic in polls}
        polls.wake_for(partial(_deliverable, mailbox, now), mailbox, now)
        for topic, count in waited.items():  # those who were woken may fail to receive a message
            assert mailbox.count_deliverable(topic, now, 1) == 0 or polls.count(topic) < count
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
