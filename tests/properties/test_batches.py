"""Commands that are decided and applied together have the effect of the same commands one by one."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from hypothesis import given, target
from hypothesis import strategies as st

from postroom.application.mailbox.codec import make_commit
from postroom.application.mailbox.snapshots import Collector
from postroom.application.mailbox.stored_snapshots import encode_part
from postroom.domain.commit import GENESIS, Commit, EventColumns, EventParts, each_event
from postroom.domain.errors import Rejected
from postroom.domain.integrity import payload_hash
from postroom.domain.mailbox.batch import decide_batch, evolve_batch, is_batch
from postroom.domain.mailbox.commands import Ack, Command, Nack, Receive, Send, Sweep
from postroom.domain.mailbox.counts import count, count_each
from postroom.domain.mailbox.decide import decide
from postroom.domain.mailbox.events import MailboxCreated, MailboxMode, OwnershipTaken, TopicPolicySet
from postroom.domain.mailbox.evolve import evolve
from postroom.domain.mailbox.snapshot import EVER
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.message import MS, Headers, Receipt
from postroom.domain.names import mailbox_stream
from postroom.domain.policy import MailboxLimits, TopicPolicy
from postroom.domain.record import Event
from postroom.domain.settings import MailboxSettings

NAME = "acme@one"
TOPICS = ("orders", "mail")
POLICY = TopicPolicy(
    shards=2,
    shard_capacity=6,
    replay_capacity=4,
    replay_window_ms=500,
    visibility_ms=250,
    ready_retention_ms=60_000,
    max_attempts=3,
)


LIMITS = MailboxLimits(frame_bytes=40)


@dataclass(frozen=True)
class Wait:
    ms: int


@dataclass(frozen=True)
class AckLatest:
    """Ack some of the latest deliveries; 0 is the very latest."""

    which: tuple[int, ...]


Step = tuple[Send, ...] | AckLatest | Receive | Wait


def send(
    number: int,
    topic: str,
    payload: bytes,
    key: str | None,
    sticky: str | None,
    delay: int,
    ttl: int | None,
    existing: bytes | None = None,
) -> Send:
    return Send(
        bytes([number]).rjust(16, b"-"),
        topic,
        len(payload),
        payload_hash(payload),
        bytes(32),
        Headers(0),
        payload * 10,
        key,
        sticky,
        delay,
        ttl,
        existing is not None,
        existing,
    )


def sends(numbers: st.SearchStrategy[int]) -> st.SearchStrategy[Send]:
    return st.builds(
        send,
        numbers,
        st.sampled_from(["orders"] * 9 + ["mail"]),
        st.sampled_from([b"a"] * 9 + [b"b", b"large"]),
        st.sampled_from([None] * 9 + ["k1", "k2", "k3", "k4", "k5"]),
        st.sampled_from((None, "x", "y", "z")),
        st.sampled_from([0] * 19 + [100]),
        st.sampled_from((None, None, 5_000)),
        st.sampled_from([None] * 19 + [b""]),
    )


def _stream(command: Send) -> bytes:
    return command.message


STEPS: st.SearchStrategy[Step] = st.one_of(
    st.lists(sends(st.integers(10, 250)), min_size=2, max_size=6, unique_by=_stream).map(tuple),
    st.lists(sends(st.integers(10, 250)), min_size=2, max_size=6, unique_by=_stream).map(tuple),
    st.lists(sends(st.integers(0, 9)), min_size=2, max_size=4).map(tuple),
    st.builds(Receive, st.sampled_from((("orders",), TOPICS)), st.integers(1, 8), st.just(1_000_000)),
    st.lists(st.integers(0, 9), min_size=1, max_size=5).map(lambda which: AckLatest(tuple(which))),
    st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True).map(lambda each: AckLatest(tuple(each))),
    st.builds(AckLatest, st.tuples(st.integers(0, 9))),
    st.builds(Wait, st.sampled_from((1, 300, 300, 600))),
)


def new_mailbox(mode: MailboxMode, *, priorities: bool) -> Mailbox:
    mailbox, own = Mailbox(NAME), mailbox_stream(NAME)
    policy = msgspec.structs.replace(POLICY, priorities=priorities)
    for event in (
        MailboxCreated(own, 1, 0, NAME, mode, MailboxSettings(LIMITS)),
        OwnershipTaken(own, 2, 0, 1, "owner", "boot", 0, False),
        TopicPolicySet(own, 3, 0, "orders", policy),
    ):
        evolve(mailbox, event)
    for first in decide(send(255, "orders", b"a", None, None, 0, None), mailbox, 0):
        evolve(mailbox, first)
    return mailbox


def decide_each(commands: Sequence[Command], mailbox: Mailbox, now: int) -> tuple[list[Event], bool]:
    """Decide and apply commands one by one; return their events, and whether each caused exactly one."""
    events: list[Event] = []
    each_caused_one = True
    for command in commands:
        try:
            its = decide(command, mailbox, now)
        except Rejected:
            each_caused_one = False
            continue
        each_caused_one = each_caused_one and len(its) == 1
        for event in its:
            evolve(mailbox, event)
        events += its
    return events, each_caused_one


def commit_of(parts: EventParts) -> Commit:
    count = len(list(each_event(parts)))
    return make_commit(parts, list(range(count)), first=1, epoch=1, previous=GENESIS)


def state_of(mailbox: Mailbox, now: int) -> tuple[object, ...]:
    """Return all that a mailbox answers from; the snapshot ends what was collected for the next one."""
    ready = {
        (name, number): [message.stream for message in shard.ready(now)]
        for name, topic in mailbox.topics.items()
        for number, shard in topic.shards.items()
    }
    in_flight = [shard.in_flight for topic in mailbox.topics.values() for shard in topic.shards.values()]
    changes = mailbox.changes
    collected = changes.through, sorted(changes.changed), sorted(changes.settled)
    overdue = [message.stream for message in mailbox.overdue(now + 3_600_000 * MS, 1_000)]
    collector = Collector(mailbox, EVER)
    while not collector.step(100):
        pass
    timer = mailbox.next_timer()
    return (
        ready,
        mailbox.in_flight,
        in_flight,
        collected,
        overdue,
        timer,
        encode_part(collector.finish(0, b"")),
    )


@given(
    st.lists(STEPS, min_size=10, max_size=40),
    st.sampled_from(("queue", "queue", "queue", "archive")),
    st.booleans(),
)
def test_a_batch_has_the_effect_of_its_commands_one_by_one(
    steps: list[Step], mode: MailboxMode, priorities: bool
) -> None:
    one, other = new_mailbox(mode, priorities=priorities), new_mailbox(mode, priorities=priorities)
    now, receipts, batches = 0, list[Receipt](), 0
    for step in steps:
        now += 1
        commands: Sequence[Command]
        match step:
            case Wait(ms):
                now += ms * MS
                commands = [Sweep()]
            case AckLatest(which):
                latest = receipts[::-1]
                commands = [Ack(latest[index]) for index in which if index < len(latest)]
                commands += [Nack(latest[0], 0.5)] if latest and len(which) == 4 else []
                commands = [each for each in commands if each.receipt.message in one.messages]  # type: ignore[union-attr]  # settling
            case Receive():
                commands = [step]
            case _:
                commands = step
        if not commands:
            continue
        together = (
            decide_batch(commands, other, now) if len({type(command) for command in commands}) == 1 else None
        )
        events, each_caused_one = decide_each(commands, one, now)
        if together is not None:
            assert each_caused_one
            assert list(together) == events
            assert isinstance(together, EventColumns)
            commit, half = commit_of(events), len(events) // 2
            assert commit_of([together]) == commit
            assert commit_of([*events[:half], together[half:]]) == commit
            batches += 1
        if events and is_batch(events):
            evolve_batch(other, events)
        else:
            for event in events:
                evolve(other, event)
        receipts += [one.messages[e.stream].receipt for e in events if type(e).__name__ == "MessageReceived"]
        assert state_of(one, now) == state_of(other, now)
        assert count(one, now) == count_each(one, now)
    target(batches)
