"""Whatever the bearer of a capability calls, topics that it does not cover neither change nor show."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroom.application.access.guard import Guard
from postroom.application.operations.mailbox import Mailbox
from postroom.application.query_results import Backlog
from postroom.application.received_messages import ReceivedMessage
from postroom.domain.capability.rights import Topics
from postroom.domain.errors import PostroomError
from postroom.domain.message import Receipt
from postroom.domain.policy import TopicPolicy
from postroom.domain.search import topic_matches
from tests.support.access import MemoryPlace, controlled_mailbox, mailbox_of
from tests.support.examples import examples
from tests.support.messages import message

TOPICS = ("orders", "orders.eu", "payments", "x")
GLOBS = (*TOPICS, "orders*", "orders.*", "*s", "*.eu", "p*", "y")
PER_TOPIC = 3

Call = Callable[[Mailbox, str, str, Receipt], Awaitable[object]]
CALLS: dict[str, Call] = {
    "send": lambda m, topic, id_, receipt: m.send_message(message(topic=topic)),
    "send batch": lambda m, topic, id_, receipt: m.send_batch([message(topic=each) for each in TOPICS]),
    "receive": lambda m, topic, id_, receipt: m.receive_messages(topic, visibility_ms=60_000),
    "receive of two": lambda m, topic, id_, receipt: m.receive_messages([topic, "orders"]),
    "stream": lambda m, topic, id_, receipt: _first(m, topic),
    "ack": lambda m, topic, id_, receipt: m.ack_messages([receipt]),
    "nack": lambda m, topic, id_, receipt: m.nack_messages([receipt], delay_ms=0),
    "extend": lambda m, topic, id_, receipt: m.extend_visibility([receipt], 60_000),
    "redrive": lambda m, topic, id_, receipt: m.redrive_dead_letters(topic),
    "redrive of ids": lambda m, topic, id_, receipt: m.redrive_dead_letters(topic, message_ids=[id_]),
    "purge": lambda m, topic, id_, receipt: m.purge_topic(topic, ready=True),
    "policy": lambda m, topic, id_, receipt: m.set_topic_policy(topic, TopicPolicy(max_attempts=9)),
    "pause": lambda m, topic, id_, receipt: m.pause_topic(topic),
    "resume": lambda m, topic, id_, receipt: m.resume_topic(topic),
    "delete": lambda m, topic, id_, receipt: m.delete_old_events(1 << 60),
    "get": lambda m, topic, id_, receipt: m.get_message(id_),
    "explain": lambda m, topic, id_, receipt: m.explain_message(id_),
    "backlog": lambda m, topic, id_, receipt: m.get_backlog(topic),
    "backlog of all": lambda m, topic, id_, receipt: m.get_backlog(),
    "dead letters": lambda m, topic, id_, receipt: m.list_dead_letters(topic),
    "dead letters of all": lambda m, topic, id_, receipt: m.list_dead_letters(),
    "get policy": lambda m, topic, id_, receipt: m.get_topic_policy(topic),
    "topics": lambda m, topic, id_, receipt: m.list_topics(),
    "peek": lambda m, topic, id_, receipt: m.peek_messages(topic),
}
NUMBERS = st.integers(0, PER_TOPIC * len(TOPICS) - 1)
STEPS = st.lists(
    st.tuples(st.sampled_from(sorted(CALLS)), st.sampled_from((*TOPICS, "*")), NUMBERS, NUMBERS), max_size=30
)
SCOPES = st.lists(st.lists(st.sampled_from(GLOBS), min_size=1, max_size=3), min_size=1, max_size=3)


async def _first(mailbox: Mailbox, topic: str) -> list[ReceivedMessage]:
    async with mailbox.stream_messages(topic, wait_ms=1) as stream:
        return [each async for each in stream]


async def prepare(place: MemoryPlace) -> list[ReceivedMessage]:
    """Fill each topic with a message in flight, a dead letter and a ready message; return all deliveries."""
    deliveries: list[ReceivedMessage] = []
    for topic in TOPICS:
        await place.mailbox.set_topic_policy(topic, TopicPolicy(max_attempts=1))
        for number in range(PER_TOPIC):
            await place.mailbox.send_message(message(_canary(topic), topic, message_id=f"{topic}-{number}"))
        dead, ready, held = await place.mailbox.receive_messages(topic, visibility_ms=600_000)
        await place.mailbox.nack_messages([dead.receipt])
        await place.mailbox.set_topic_policy(topic, TopicPolicy(max_attempts=5))
        await place.mailbox.nack_messages([ready.receipt], delay_ms=0)
        deliveries += (dead, ready, held)
    return deliveries


async def state(place: MemoryPlace, topic: str) -> object:
    mailbox = place.mailbox
    histories = [await mailbox.get_message(f"{topic}-{number}") for number in range(PER_TOPIC)]
    topics = [each for each in await mailbox.list_topics() if each.topic == topic]
    return histories, topics, (await mailbox.get_backlog(topic)).shards


def _canary(topic: str) -> bytes:
    return f"canary of {topic};".encode()


def _shows(answer: Any, topic: str) -> bool:
    """Return whether an answer has a message of a topic, or names it."""
    items = answer if isinstance(answer, list) else [answer]
    envelopes = [getattr(getattr(each, "item", None), "envelope_blob", b"") for each in items]
    backlogs = [each for each in items if isinstance(each, Backlog)]
    parts = [*items, *(shard for each in backlogs for shard in each.shards)]
    return any(_canary(topic) in each for each in envelopes) or any(
        getattr(each, "topic", None) == topic for each in parts
    )


async def check(scopes: list[list[str]], steps: list[tuple[str, str, int, int]]) -> None:
    outside = [
        topic
        for topic in TOPICS
        if not all(any(topic_matches(glob, topic) for glob in globs) for globs in scopes)
    ]
    async with controlled_mailbox() as place:
        deliveries = await prepare(place)
        first, *others = (tuple(each) for each in scopes)
        mailbox = await mailbox_of(place, *map(Topics, others), topics=first)
        before = [await state(place, topic) for topic in outside]
        for name, topic, id_, receipt in steps:
            with suppress(PostroomError):
                answer = await CALLS[name](
                    mailbox, topic, deliveries[id_].message_id, deliveries[receipt].receipt
                )
                assert not [each for each in outside if _shows(answer, each)], name
        assert [await state(place, topic) for topic in outside] == before


@given(scopes=SCOPES, steps=STEPS)
@settings(max_examples=examples(40))
def test_a_capability_changes_and_shows_topics_that_it_covers_only(
    scopes: list[list[str]], steps: list[tuple[str, str, int, int]]
) -> None:
    asyncio.run(check(scopes, steps))


def test_the_property_notices_a_guard_that_covers_every_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guard, "covers", lambda self, topic: True)
    for name in ("ack", "redrive", "purge", "peek", "topics", "receive"):
        with pytest.raises(AssertionError):
            asyncio.run(check([["y"]], [(name, "orders", 1, 2)]))
