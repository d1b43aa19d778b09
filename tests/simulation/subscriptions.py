"""Subscriptions in a small world, held against what their log must say; shares no code with the domain."""

import asyncio
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from postroom.adapters.compose import OwnedMailbox
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.mailbox.stored_snapshots import fold
from postroom.application.messages import NewMessage, Sent
from postroom.domain.errors import NotFound, PostroomError, Rejected, Unavailable
from postroom.domain.policy import TopicPolicy
from postroom.domain.record import Record
from postroom.domain.settings import SettingsChanges
from postroom.domain.subscription import AdvanceSubscription, SubscriptionFilter
from tests.simulation.world import MS, Disk, LogHandle, SimulatedLoop, WithoutSnapshots
from tests.support.clocks import SimulatedClock

NAMES = ("mail", "audit", "orders.copy")
TOPICS = ("orders.eu", "orders.us", "news")
FILTERS = (
    SubscriptionFilter(("orders.*",)),
    SubscriptionFilter(("*",)),
    SubscriptionFilter(("news", "orders.us")),
    SubscriptionFilter(("*",), {"kind": "a"}),
)
POLICIES: tuple[dict[str, Any], ...] = (
    {"shards": 1, "shard_capacity": 4},
    {"shards": 2, "shard_capacity": 10, "ordered_keys": True},
    {"shards": 1, "shard_capacity": 20, "fair_keys": True},
)
ROUNDS = 60
"""Rounds in which consumers that take all must have every subscription live."""


class Expected:
    """A subscription as its log must show it.

    Arguments:
        cursor: position through which it has a copy of every message that matches.
        unsettled: streams of its copies that were not settled or removed.
    """

    def __init__(self, name: str, event: Any, position: int) -> None:
        self.name = name
        self.filter = event.filter
        self.cursor = event.position
        self.status = "live" if event.position == position - 1 else "copying"
        self.unsettled: set[bytes] = set()

    def matches(self, event: Any) -> bool:
        custom = event.headers.custom_headers or {}
        return (
            event.copy_of is None
            and any(fnmatchcase(event.topic, pattern) for pattern in self.filter.topics)
            and all(custom.get(name) == value for name, value in self.filter.headers.items())
        )


class Reference:
    """What the log says of subscriptions, checked record by record."""

    def __init__(self) -> None:
        self.position = 0
        self.originals: list[tuple[int, Any]] = []
        self.subscriptions: dict[str, Expected] = {}
        self.copies: dict[bytes, str] = {}

    def follow(self, records: list[Record]) -> None:
        """Check the records of a log after the last ones, in order."""
        for number, record in enumerate(records):
            event, kind = record.event, record.type
            self.position = record.position
            if kind == "MessageSent":
                self._sent(event)
            elif kind in ("MessageAcked", "MessageExpired") and record.stream in self.copies:
                self._of(record.stream).discard(record.stream)
            elif kind.startswith("Subscription"):
                self._changed(kind, event)
            if number + 1 == len(records) or records[number + 1].chain != record.chain:  # a commit ends
                for each in self.subscriptions.values():
                    if each.status == "live":
                        missing = self.next_of(each)
                        assert missing is None, f"live {each.name} has no copy of {missing}"
                        each.cursor = self.position

    def next_of(self, subscription: Expected) -> tuple[int, Any] | None:
        """Return the next message that a subscription must copy, after its position."""
        return next(
            (
                (position, event)
                for position, event in self.originals
                if position > subscription.cursor and subscription.matches(event)
            ),
            None,
        )

    def _sent(self, event: Any) -> None:
        if event.copy_of is None:
            assert event.topic not in self.subscriptions, f"{event.topic} got a message that is no copy"
            self.originals.append((self.position, event))
            return
        subscription = self.subscriptions[event.topic]
        following = self.next_of(subscription)
        assert following is not None, (
            f"{event.topic} got a copy of {event.copy_of} that it has, or must not have"
        )
        position, original = following
        assert event.copy_of == str(UUID(bytes=original.stream)), (
            f"{event.topic} got its copies in another order"
        )
        assert event.envelope == original.envelope
        assert event.stream not in self.copies
        assert subscription.status != "clearing"
        subscription.cursor = position
        subscription.unsettled.add(event.stream)
        self.copies[event.stream] = event.topic

    def _changed(self, kind: str, event: Any) -> None:
        name = event.subscription
        subscription = self.subscriptions.get(name)
        if kind == "SubscriptionSet":
            if subscription is None:
                self.subscriptions[name] = Expected(name, event, self.position)
            else:
                if subscription.status == "live":
                    subscription.cursor = self.position - 1
                subscription.filter = event.filter
            return
        assert subscription is not None
        if kind == "SubscriptionDeleted":
            del self.subscriptions[name]
        elif kind == "SubscriptionRewound":
            subscription.cursor, subscription.status = event.position, "clearing"
        else:
            if subscription.status == "clearing":
                assert event.position == subscription.cursor
                assert not subscription.unsettled, f"{name} copies again before its queue is empty"
            elif subscription.status == "copying":
                following = self.next_of(subscription)
                assert following is None or following[0] > event.position, f"{name} skipped {following}"
                subscription.cursor = event.position
            else:  # it lacks room, so the messages of this commit are copied later
                assert event.position <= self.position
                following = self.next_of(subscription)
                assert following is None or following[0] > event.position, f"{name} skipped {following}"
                subscription.cursor = event.position
            subscription.status = event.status
            if event.status == "live":
                missing = self.next_of(subscription)
                assert missing is None, f"{name} is live without a copy of {missing}"

    def _of(self, stream: bytes) -> set[bytes]:
        subscription = self.subscriptions.get(self.copies[stream])
        return set() if subscription is None else subscription.unsettled


class SubscriptionsMachine(RuleBasedStateMachine):
    """Drive a mailbox with subscriptions, and check its log after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = SimulatedClock()
        self.loop = SimulatedLoop(self.clock)
        self.disk = Disk("simulated@test")
        self.reference = Reference()
        self.is_open = False

    @initialize(policies=st.tuples(*[st.sampled_from(POLICIES)] * len(NAMES)))
    def open_for_the_first_time(self, policies: tuple[dict[str, Any], ...]) -> None:
        self._open()
        for name, policy in zip(NAMES, policies, strict=True):
            self._play(self.mailbox.set_topic_policy(name, policy))
        for name in ("orders.us", "news"):
            self._play(self.mailbox.set_topic_policy(name, {"subscriptions_only": True}))

    # -- rules ---

    @rule(
        name=st.sampled_from(NAMES), filter_=st.sampled_from(FILTERS), start=st.none() | st.integers(0, 300)
    )
    def set(self, name: str, filter_: SubscriptionFilter, start: int | None) -> None:
        end = self.engine.mailbox.position
        self._play(
            self.mailbox.set_subscription(name, filter_, start=None if start is None else min(start, end))
        )

    @rule(name=st.sampled_from(NAMES), share=st.floats(0, 1), dry_run=st.booleans())
    def rewind(self, name: str, share: float, dry_run: bool) -> None:
        start = int(self.engine.mailbox.position * share)
        self._play(self.mailbox.rewind_subscription(name, start, dry_run=dry_run))

    @rule(name=st.sampled_from(NAMES))
    def delete(self, name: str) -> None:
        self._play(self.mailbox.delete_subscription(name))

    @rule(
        topic=st.sampled_from(TOPICS),
        count=st.integers(1, 8),
        key=st.sampled_from([None, "x", "y"]),
        kind=st.sampled_from(["a", "b"]),
        unique=st.sampled_from([None, None, None, "u"]),
        replace=st.booleans(),
        turns=st.none() | st.integers(0, 12),
    )
    def send(
        self,
        topic: str,
        count: int,
        key: str | None,
        kind: str,
        unique: str | None,
        replace: bool,
        turns: int | None,
    ) -> None:
        """Send messages in a batch; or others, beside it and one after the other, that many turns later."""
        new = NewMessage(
            topic=topic,
            payload=b"x",
            sticky_key=key,
            attrs={"kind": kind},
            unique_key=unique,
            on_conflict="replace" if replace and unique else "keep",
        )

        async def work() -> None:
            sending = asyncio.ensure_future(self.mailbox.send_batch([new] * count))
            for _ in range(turns or 0):
                await asyncio.sleep(0)
            if turns is not None:
                await asyncio.gather(*(self.mailbox.send_message(new) for _ in range(2)))
            for answer in await sending:
                assert isinstance(answer, Sent), answer

        self._play(work())

    @rule(
        name=st.sampled_from(NAMES),
        count=st.integers(1, 10),
        how=st.sampled_from(["ack", "ack", "ack", "nack", "reject", "leave"]),
    )
    def consume(self, name: str, count: int, how: str) -> None:
        async def work() -> None:
            for message in await self.mailbox.receive_messages(name, max_messages=count):
                if how == "ack":
                    await message.ack()
                elif how == "nack":
                    await message.nack(delay_ms=0)
                elif how == "reject":
                    await message.reject()

        self._play(work())

    @rule(
        name=st.sampled_from(NAMES),
        is_rewound=st.booleans(),
        is_asked=st.booleans(),
        topic=st.sampled_from(TOPICS),
        gaps=st.lists(st.integers(0, 12), min_size=1, max_size=12),
    )
    def copy_beside_sends(
        self, name: str, is_rewound: bool, is_asked: bool, topic: str, gaps: list[int]
    ) -> None:
        """Send messages, each some turns after the one before, while a subscription copies from the log.

        Arguments:
            is_asked: ask for the copies in one group with sends, too.
        """
        self.consume(name, 10, "ack")

        async def work() -> None:
            self.clock.true += 1_000 * MS
            sending: list[asyncio.Future[Any]] = []
            if is_rewound:
                sending.append(asyncio.ensure_future(self.mailbox.rewind_subscription(name, 0)))
            for gap in gaps:
                for _ in range(gap):
                    await asyncio.sleep(0)
                new = NewMessage(topic=topic, payload=b"x", attrs={"kind": "a"})
                sending.append(asyncio.ensure_future(self.mailbox.send_message(new)))
            subscription = self.engine.mailbox.subscriptions.get(name)
            if is_asked and subscription is not None:
                through = subscription.position
                ask = AdvanceSubscription(name, subscription.version, through=through, is_last=True)
                sending.append(asyncio.ensure_future(self.engine.submit([ask])))
                sending.append(asyncio.ensure_future(self.mailbox.send_message(new)))
            for answer in await asyncio.gather(*sending, return_exceptions=True):
                assert not isinstance(answer, Exception) or isinstance(answer, NotFound), answer

        self._play(work())

    @rule(name=st.sampled_from(NAMES), ready=st.booleans())
    def purge(self, name: str, ready: bool) -> None:
        self._play(self.mailbox.purge_topic(name, dead=True, ready=ready))

    @rule(duration_ms=st.sampled_from([0, 250, 1_000, 40_000]))
    def time_passes(self, duration_ms: int) -> None:
        self.clock.true += duration_ms * MS
        self._play(asyncio.sleep(0))

    @rule(moment=st.sampled_from(["before", "after"]), topic=st.sampled_from(TOPICS))
    def the_disk_fails(self, moment: str, topic: str) -> None:
        self.handle.fail_next = moment
        self._play(self.mailbox.send_message(NewMessage(topic=topic, payload=b"x")))
        self.handle.fail_next = None
        self._play(self.mailbox.receive_messages("nobody"))

    @rule(turns=st.integers(0, 30), topic=st.sampled_from(TOPICS))
    def crash(self, turns: int, topic: str) -> None:
        async def die() -> None:
            sending = asyncio.ensure_future(self.mailbox.send_message(NewMessage(topic=topic, payload=b"x")))
            for _ in range(turns):
                await asyncio.sleep(0)
            self.handle.kill()
            await self.engine.close()
            with suppress(PostroomError):
                await sending

        self.loop.play(die())
        self._open()

    @rule(whole=st.booleans())
    def save_a_snapshot(self, whole: bool) -> None:
        self._play(self.engine.take_snapshot(whole=whole))

    @rule()
    def retention_removes_what_is_settled(self) -> None:
        for name in ("orders.eu", *NAMES[:1]):
            self.consume(name, 200, "ack")
        self._follow()
        self._play(self.mailbox.retention.remove_before(self.engine.now() + 1))

    # -- what must hold ---

    @precondition(lambda self: self.is_open)
    @invariant()
    def no_copy_is_missing_or_doubled(self) -> None:
        self._follow()
        subscriptions = self.engine.mailbox.subscriptions
        assert {name: each.status for name, each in self.reference.subscriptions.items()} == {
            name: each.status for name, each in subscriptions.items()
        }
        assert fold(self.handle).subscriptions == subscriptions
        if (self.disk.first_position() or 1) == 1:
            assert fold(WithoutSnapshots(self.disk)).subscriptions == subscriptions

    def teardown(self) -> None:
        """Consume everything: every subscription is live then, and has a copy of every message."""
        try:
            if self.is_open:
                self._consume_all()
        finally:
            if self.is_open:
                self.handle.kill()
                self.loop.play(self.engine.close())
            self.loop.close()

    def _consume_all(self) -> None:
        for _ in range(ROUNDS):
            for name in NAMES:
                self.consume(name, 200, "ack")
                self.purge(name, ready=False)
            self.time_passes(1_000)
            self.no_copy_is_missing_or_doubled()
            if all(each.status == "live" for each in self.reference.subscriptions.values()):
                return
        raise AssertionError(f"a subscription is behind for ever: {self.engine.mailbox.subscriptions}")

    # -- how ---

    def _follow(self) -> None:
        self.reference.follow(list(self.disk.read(self.reference.position)))

    def _play(self, work: Any) -> None:
        """Run what may be refused, as the topic or the subscription does not exist, or the disk fails."""
        with suppress(Rejected, NotFound, Unavailable):
            self.loop.play(work)

    def _open(self) -> None:
        self.handle = LogHandle(self.disk)
        self.engine = MailboxEngine(self.handle, self.clock)
        settings = SettingsChanges.of(None, TopicPolicy(shards=2, max_attempts=3))
        self.loop.play(self.engine.open("the simulation", settings=settings))
        self.mailbox = OwnedMailbox(self.engine, self.clock)
        self.is_open = True

        async def run() -> None:
            if self.engine.mailbox.subscriptions:
                self.mailbox.run_copier()

        self.loop.play(run())
