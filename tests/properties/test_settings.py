"""Settings of a mailbox, for any sections and any order of changes (ADR 0098)."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from postroom.domain.errors import Rejected
from postroom.domain.integrity import payload_hash
from postroom.domain.mailbox.batch import decide_batch, evolve_batch, is_batch
from postroom.domain.mailbox.commands import (
    Ack,
    Command,
    Nack,
    Purge,
    Receive,
    Redrive,
    Send,
    SetPolicy,
    SetSettings,
    Sweep,
    TakeOwnership,
)
from postroom.domain.mailbox.decide import decide
from postroom.domain.mailbox.evolve import evolve
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.message import MS, Headers
from postroom.domain.policy import TopicPolicy
from postroom.domain.record import Event
from postroom.domain.search import topic_matches
from postroom.domain.settings import (
    MailboxSettings,
    SettingsChanges,
    change_settings,
    explain_policy,
    resolve_policy,
)
from tests.support.snapshots import restore, take_snapshot

NAME = "acme@one"
TOPICS = ("pay", "pay.cards", "mail")
KEYS = ("a", "b", "c", "d")
patterns = st.sampled_from([*TOPICS, "*", "pay*", "pay.*", "*a*", "*.cards", "m*l", "p*s"])
fields = st.fixed_dictionaries(
    {},
    optional={
        "shards": st.integers(1, 5),
        "max_attempts": st.integers(1, 3),
        "dead_capacity": st.integers(1, 3),
        "replay_window_ms": st.integers(60_000, 600_000),
        "priorities": st.booleans(),
    },
)
topics = st.dictionaries(patterns, fields | st.none(), max_size=4)
changes = st.builds(SettingsChanges, default_policy=fields, topics=topics)
wholes = changes.map(lambda each: change_settings(MailboxSettings(), each))


@given(wholes, st.sampled_from(TOPICS))
def test_each_field_comes_from_the_most_specific_section_that_has_it(
    settings: MailboxSettings, topic: str
) -> None:
    explained = explain_policy(settings, topic)
    for name in TopicPolicy.__struct_fields__:
        having = [
            each
            for each, section in settings.topics.items()
            if name in section and topic_matches(each, topic)
        ]
        best = max(having, key=lambda each: (each == topic, len(each.replace("*", "")), each), default=None)
        value = getattr(settings.default_policy, name) if best is None else settings.topics[best][name]
        assert explained[name] == (value, best or "policy")
    resolved = resolve_policy(settings, topic)
    assert msgspec.structs.asdict(resolved) == {name: each.value for name, each in explained.items()}
    assert resolved.validate() is resolved


@given(wholes, changes)
def test_a_change_made_twice_is_made_once_and_whole_settings_are_a_change_of_the_defaults(
    settings: MailboxSettings, change: SettingsChanges
) -> None:
    once = change_settings(settings, change)
    assert change_settings(once, change) == once
    whole = SettingsChanges(
        msgspec.structs.asdict(once.limits), msgspec.structs.asdict(once.default_policy), once.topics
    )
    assert change_settings(MailboxSettings(), whole) == once
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(once), type=MailboxSettings) == once


def send(topic: str, key: str, priority: int) -> Send:
    """Return a send whose stream id is not chosen yet."""
    content = (1, payload_hash(b"x"), b"chain", Headers(0), b"envelope")
    return Send(b"", topic, *content, sticky_key=key, priority=priority)


def sends(topic: str) -> st.SearchStrategy[Sequence[Command]]:
    one = st.builds(send, st.just(topic), st.sampled_from(KEYS), st.integers(0, 10))
    return st.lists(one, min_size=1, max_size=4)


a_topic = st.sampled_from(TOPICS)
steps: st.SearchStrategy[Any] = st.one_of(
    a_topic.flatmap(sends),
    a_topic.flatmap(sends),
    st.builds(lambda n: [Receive(TOPICS, n, 1 << 20)], st.integers(1, 4)),
    st.sampled_from(["ack", "nack", "time passes", "take over", "restore"]),
    a_topic.map(lambda topic: [Redrive(topic, 2)]),
    st.builds(lambda *what: [Purge(*what)], a_topic, st.booleans(), st.booleans()),
    st.builds(lambda change, replace: [SetSettings(change, replace)], changes, st.booleans()),
    st.builds(lambda topic, section: [SetPolicy(topic, TopicPolicy(**section))], a_topic, fields),
)


class World:
    """A mailbox, its log, and the sticky key of each message."""

    def __init__(self) -> None:
        self.mailbox, self.log, self.now = Mailbox(NAME), list[Event](), 0
        self.keys: dict[bytes, str] = {}
        self.streams = count()
        self.take(TakeOwnership(NAME, None, "first", "boot", 0, False))

    def next_stream(self) -> bytes:
        return next(self.streams).to_bytes(16, "big")

    def take(self, *commands: Command) -> None:
        """Decide commands, together if that is possible, and apply their events."""
        events = decide_batch(commands, self.mailbox, self.now) if len(commands) > 1 else None
        if events is not None:
            self.apply(events)
            return
        for command in commands:
            with suppress(Rejected):  # such as a redrive of a topic that does not exist
                self.apply(decide(command, self.mailbox, self.now))

    def apply(self, events: Sequence[Event]) -> None:
        self.log += events
        if len(events) > 1 and is_batch(events):
            evolve_batch(self.mailbox, events)
            return
        for event in events:
            evolve(self.mailbox, event)

    def step(self, step: Any) -> None:
        in_flight = [
            message for message in self.mailbox.messages.values() if message.status.name == "IN_FLIGHT"
        ]
        match step:
            case "ack":
                self.take(*(Ack(message.receipt) for message in in_flight[:2]))
            case "nack":
                self.take(*(Nack(message.receipt, 0.0, delay_ms=0) for message in in_flight[:2]))
            case "time passes":
                self.now += 40_000 * MS
                self.take(Sweep())
            case "take over":
                self.take(TakeOwnership(NAME, None, "next", "boot", self.now, True))
            case "restore":
                restored = restore(take_snapshot(self.mailbox), NAME)
                assert restored is not None
                self.mailbox = restored
            case [Send(), *_]:
                commands = [msgspec.structs.replace(each, message=self.next_stream()) for each in step]
                self.keys |= {each.message: each.sticky_key for each in commands}
                self.take(*commands)
            case _:
                self.take(*step)

    def check(self) -> None:
        shards: dict[tuple[str, str], set[int]] = {}
        for message in self.mailbox.messages.values():
            shards.setdefault((message.topic, self.keys[message.stream]), set()).add(message.shard)
        assert all(len(each) == 1 for each in shards.values())
        for name, topic in self.mailbox.topics.items():
            assert topic.policy == resolve_policy(self.mailbox.settings, name)
            assert all(message.shard < topic.shards_in_use for message in topic.dead.values())


@given(st.lists(steps, max_size=30))
def test_whatever_settings_change_messages_of_a_key_share_a_shard_and_the_state_is_a_fold(
    taken: list[Any],
) -> None:
    world = World()
    for step in taken:
        world.step(step)
        world.check()
    folded = Mailbox(NAME)
    for event in world.log:
        evolve(folded, event)
    assert take_snapshot(folded) == take_snapshot(world.mailbox)
