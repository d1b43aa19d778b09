"""A mailbox in amnesia mode forgets what is settled, within its bound (svc-mailbox I-5, I-9, I-16)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.memory.amnesia_log import AmnesiaEventLog
from postroom.application.mailbox.owner_tasks import MemoryBound
from postroom.application.mailbox.stored_snapshots import fold
from postroom.application.messages import Sent
from postroom.domain.errors import InvalidRequest, NotFound, Saturated
from postroom.domain.message import MessageSent, Status
from postroom.domain.policy import MailboxLimits, TopicPolicy
from postroom.domain.search import EventFilter, Order
from postroom.domain.settings import SettingsChanges
from postroom.domain.subscription import SubscriptionFilter
from tests.conformance.records import append_each, sent
from tests.support.examples import examples
from tests.support.snapshots import take_snapshot
from tests.support.stores import MAILBOX, Place, envelope, message

PAYLOAD = bytes(10_000)
LIMITS = MailboxLimits(max_store_bytes=1_000_000)


@asynccontextmanager
async def small_mailbox() -> AsyncIterator[OwnedMailbox]:
    async with open_mailbox("memory:", limits=LIMITS, amnesia=True) as mailbox:
        yield mailbox


@asynccontextmanager
async def compacting() -> AsyncIterator[tuple[OwnedMailbox, AmnesiaEventLog, MemoryBound]]:
    """Open a mailbox that is compacted by the test alone, and whose payloads are read from the log."""
    log = AmnesiaEventLog(MAILBOX)
    policy = TopicPolicy(max_attempts=3, shards=1)
    async with Place(lambda: log).open(policy=policy, cache_bytes=0) as mailbox:
        yield mailbox, log, MemoryBound(log)


async def fill(mailbox: OwnedMailbox) -> int:
    """Send 10 MB, and return the number of messages that were accepted before the mailbox was full."""
    answers = [each for _ in range(20) for each in await mailbox.send_batch([message(PAYLOAD)] * 50)]
    refusals = [each for each in answers if not isinstance(each, Sent)]
    assert refusals
    for each in refusals:
        assert isinstance(each, Saturated)
        assert "1000000 bytes in memory" in str(each)
        assert each.retry_after_ms > 0
    return len(answers) - len(refusals)


async def ack_all(mailbox: OwnedMailbox) -> int:
    count = 0
    while received := await mailbox.receive_messages("orders", max_messages=100):
        await mailbox.ack_messages([each.receipt for each in received])
        count += len(received)
    return count


async def test_a_full_mailbox_refuses_sends_until_messages_are_settled() -> None:
    async with small_mailbox() as mailbox:
        count = await fill(mailbox)
        assert 50 < count < 100
        assert await ack_all(mailbox) == count
        assert await fill(mailbox) > 50


async def test_a_send_that_is_refused_for_lack_of_memory_changes_nothing() -> None:
    async with small_mailbox() as mailbox:
        count = await fill(mailbox)
        with pytest.raises(Saturated):
            await mailbox.send_message(message(PAYLOAD, idem_key="k"))
        assert (await mailbox.get_backlog()).ready == count


async def test_a_message_that_was_accepted_before_is_a_duplicate_in_a_full_mailbox() -> None:
    async with small_mailbox() as mailbox:
        first = await mailbox.send_message(message(idem_key="k"))
        await fill(mailbox)
        again = await mailbox.send_message(message(idem_key="k"))
        assert (again.message_id, again.duplicate) == (first.message_id, True)


async def test_many_times_the_bound_passes_through_a_mailbox() -> None:
    async with small_mailbox() as mailbox:
        total = 0
        for _ in range(20):
            total += await fill(mailbox)
            await ack_all(mailbox)
        assert total * len(PAYLOAD) > 5_000_000


async def test_idempotency_keys_count_to_the_bound() -> None:
    async with compacting() as (mailbox, log, bound):
        await mailbox.send_batch([message(idem_key=f"key-{number}") for number in range(1_000)])
        await ack_all(mailbox)
        for _ in range(2):
            await bound.compact(mailbox.engine)
        limit = {"max_store_bytes": log.used_bytes + 300_000}
        await mailbox.set_settings(SettingsChanges(limits=limit))
        with pytest.raises(Saturated, match="in memory"):
            bound.admit(mailbox.engine.mailbox, 1)


async def test_the_content_of_a_settled_message_is_forgotten_at_once() -> None:
    async with small_mailbox() as mailbox:
        sent = await mailbox.send_message(message(PAYLOAD))
        used = mailbox.engine.log.size().commits
        (received,) = await mailbox.receive_messages("orders")
        assert (await mailbox.get_message(sent.message_id)).status == "in_flight"
        await received.ack()
        assert mailbox.engine.log.size().commits < used - len(PAYLOAD) + 5_000
        with pytest.raises(NotFound, match="amnesia mode"):
            await mailbox.get_message(sent.message_id)
        assert "acked" in (await mailbox.explain_message(sent.message_id)).now.lower()


async def test_a_repeated_ack_is_accepted_although_the_content_is_forgotten() -> None:
    async with small_mailbox() as mailbox:
        await mailbox.send_message(message())
        (received,) = await mailbox.receive_messages("orders")
        await received.ack()
        await received.ack()


async def test_a_compaction_keeps_what_delivers_and_settles_each_unsettled_message() -> None:
    async with compacting() as (mailbox, log, bound):
        topics = ("ready", "nacked", "dead", "extended", "redriven", "rescheduled")
        ids = [(await mailbox.send_message(message(each.encode(), each))).message_id for each in topics]
        for topic, nacks in (("nacked", 2), ("dead", 3), ("redriven", 3), ("rescheduled", 1)):
            for _ in range(nacks):
                (received,) = await mailbox.receive_messages(topic)
                await received.nack(reason="no", delay_ms=0)
        await mailbox.redrive_dead_letters("redriven")
        await mailbox.reschedule_messages(ids[-1:], deliver_after_ms=60_000)
        await mailbox.reschedule_messages(ids[-1:], deliver_after_ms=0)
        (extended,) = await mailbox.receive_messages("extended")
        for visibility_ms in (6_000, 7_000, 8_000):
            await extended.extend(visibility_ms)
        before = await mailbox.get_backlog()
        statuses = [(await mailbox.get_message(each)).status for each in ids]

        assert await bound.compact(mailbox.engine) > 10

        assert take_snapshot(fold(log)) == take_snapshot(mailbox.engine.mailbox)
        assert (await mailbox.get_backlog()).shards == before.shards
        assert [(await mailbox.get_message(each)).status for each in ids] == statuses
        await extended.ack()
        await mailbox.redrive_dead_letters("dead")
        for topic, attempt in (("ready", 1), ("nacked", 3), ("dead", 1), ("redriven", 1), ("rescheduled", 2)):
            (received,) = await mailbox.receive_messages(topic)
            assert (received.payload, received.attempt) == (topic.encode(), attempt)
            await received.ack()
        assert (await mailbox.get_backlog()).shards == []


async def has_content(mailbox: OwnedMailbox, id_: str) -> bool:
    try:
        return b"secret" in (await mailbox.get_message(id_)).item.envelope_blob
    except NotFound:
        return False


async def check_contents(steps: list[str]) -> None:
    async with compacting() as (mailbox, log, bound):
        ids: list[str] = []
        unsettled: set[str] = set()
        for step in steps:
            match step:
                case "send":
                    ids.append((await mailbox.send_message(message(b"secret"))).message_id)
                    unsettled.add(ids[-1])
                case "purge" if unsettled:
                    await mailbox.purge_topic("orders", ready=True)
                    unsettled.clear()
                case "compact":
                    await bound.compact(mailbox.engine)
                case "redrive" if unsettled:
                    await mailbox.redrive_dead_letters("orders")
                case "ack" | "nack":
                    received = await mailbox.receive_messages("orders", max_messages=2)
                    receipts = [each.receipt for each in received]
                    if step == "ack":
                        await mailbox.ack_messages(receipts)
                        unsettled -= {each.message_id for each in received}
                    else:
                        await mailbox.nack_messages(receipts, delay_ms=0)
            assert {each for each in ids if await has_content(mailbox, each)} == unsettled
            stored = [each.event.envelope for each in log.read() if isinstance(each.event, MessageSent)]
            assert sum(b"secret" in each for each in stored) <= len(unsettled)


STEPS = st.lists(st.sampled_from(["send", "send", "ack", "nack", "redrive", "purge", "compact"]), max_size=20)


@given(STEPS)
def test_whatever_happens_a_mailbox_has_the_content_of_unsettled_messages_only(steps: list[str]) -> None:
    asyncio.run(check_contents(steps))


async def check_restart(store: str, amnesia: bool, nacked: list[bool]) -> None:
    policy = TopicPolicy(shards=1, max_attempts=1)

    @asynccontextmanager
    async def opened() -> AsyncIterator[OwnedMailbox]:
        async with open_mailbox(
            store, default_policy=policy, durability="relaxed", amnesia=amnesia
        ) as mailbox:
            assert (await mailbox.get_backlog()).dlq_profile == ("ephemeral" if amnesia else "durable")
            yield mailbox

    async with opened() as mailbox:
        for number, is_dead in enumerate(nacked):
            await mailbox.send_message(message(b"%d" % number))
            (received,) = await mailbox.receive_messages("orders", max_messages=1)
            await (received.nack(reason=f"reason {number}") if is_dead else received.ack())
        letters = (await mailbox.list_dead_letters()).items
        assert len(letters) == sum(nacked)
    async with opened() as mailbox:
        assert (await mailbox.list_dead_letters()).items == (() if amnesia else letters)


@given(amnesia=st.booleans(), nacked=st.lists(st.booleans(), max_size=6))
@settings(max_examples=examples(40))
def test_dead_letters_survive_a_restart_unless_the_mailbox_is_in_amnesia_mode(
    amnesia: bool, nacked: list[bool]
) -> None:
    with TemporaryDirectory() as folder:
        store = "memory:" if amnesia else str(Path(folder) / "store.db")
        asyncio.run(check_restart(store, amnesia, nacked))


async def test_a_message_is_forgotten_altogether_after_two_compactions() -> None:
    async with compacting() as (mailbox, log, bound):
        await mailbox.send_envelopes([envelope("own-id")])
        (received,) = await mailbox.receive_messages("orders")
        await received.ack()
        await bound.compact(mailbox.engine)
        (again,) = await mailbox.send_envelopes([envelope("own-id")])
        assert isinstance(again, Sent)
        assert again.duplicate
        assert (await mailbox.explain_message(received.message_id)).story
        await bound.compact(mailbox.engine)
        with pytest.raises(NotFound, match="has no message"):
            await mailbox.explain_message(received.message_id)
        assert log.used_bytes < 3_000


@pytest.mark.parametrize(
    ("store", "settings", "reason"),
    [
        ("orders.db", {}, "in memory only, not in orders.db"),
        ("postgresql://user:secret@host/db", {}, r"not in postgresql://user@host/db"),
        ("memory:", {"mode": "archive"}, "can't have mode archive"),
        ("memory:", {"archive": "segments"}, "can't have an archive"),
        ("memory:", {"outboxes": ["service.db"]}, "can't have outboxes"),
        ("memory:", {"amnesia": "yes"}, "amnesia must be of type bool"),
    ],
)
async def test_amnesia_is_refused_where_a_disk_would_be_used(
    store: str, settings: dict[str, object], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        async with open_mailbox(store, **({"amnesia": True} | settings)):  # type: ignore[arg-type]
            pass


async def search(postroom: OwnedMailbox, **criteria: object) -> list[str]:
    """Return the topics of the messages that a search finds, in pages of two."""
    topics: list[str] = []
    cursor = None
    while True:
        filter_ = EventFilter(**criteria, limit=2, cursor=cursor)  # type: ignore[arg-type]
        page = await postroom.search_unsettled(filter_)
        topics += [each.topic for each in page.items]
        cursor = page.next_cursor
        if cursor is None:
            return topics


async def test_a_search_in_memory_finds_the_unsettled_messages_that_match() -> None:
    async with small_mailbox() as mailbox:
        for topic, region in (
            ("a.one", "north"),
            ("b.two", "south"),
            ("a.three", "south"),
            ("done", "south"),
        ):
            await mailbox.send_message(message(topic=topic, attrs={"region": region}))
        await mailbox.receive_messages("b.two")
        (received,) = await mailbox.receive_messages("done")
        await received.ack()
        oldest = Order.OLDEST_FIRST
        assert await search(mailbox, order=oldest) == ["a.one", "b.two", "a.three"]
        assert await search(mailbox) == ["a.three", "b.two", "a.one"]
        assert await search(mailbox, topics=("a.*",), order=oldest) == ["a.one", "a.three"]
        assert await search(mailbox, headers={"region": "south"}, order=oldest) == ["b.two", "a.three"]
        assert await search(mailbox, statuses=(Status.IN_FLIGHT,)) == ["b.two"]
        assert await search(mailbox, match="nor*") == ["a.one"]
        assert await search(mailbox, offset=2) == ["a.one"]
        assert await search(mailbox, mailbox="another@one") == []


def test_commits_that_are_read_end_where_a_compaction_removed_them_meanwhile() -> None:
    log = AmnesiaEventLog(MAILBOX)
    append_each(log, [sent(number) for number in range(1, 6)])
    commits = log.commits()
    assert next(commits).last == 1
    log.compact(5, frozenset())
    assert list(commits) == []
    assert [commit.last for commit in log.commits()] == [5]


async def test_nothing_is_forgotten_that_a_subscription_has_yet_to_copy() -> None:
    async with compacting() as (mailbox, log, bound):
        await mailbox.set_topic_policy("mail", {"shard_capacity": 20})
        await mailbox.set_subscription("mail", SubscriptionFilter(("orders",)))
        await mailbox.send_batch([message(b"%d" % number) for number in range(100)])
        assert await ack_all(mailbox) == 100
        (behind,) = await mailbox.list_subscriptions()
        assert behind.status == "copying"
        assert await bound.compact(mailbox.engine) == 0
        copied: list[int] = []
        async with asyncio.timeout(60):
            while len(copied) < 100:
                for received in await mailbox.receive_messages("mail", wait_ms=500):
                    copied.append(int(received.payload))
                    await received.ack()
            while (await mailbox.list_subscriptions())[0].status != "live":
                await asyncio.sleep(0.05)
        assert copied == [*range(100)]
        sent = (each.event for each in log.read() if isinstance(each.event, MessageSent))
        assert not any(each.envelope for each in sent)
        with pytest.raises(InvalidRequest, match="no history"):
            await mailbox.rewind_subscription("mail", 0)


async def test_a_full_mailbox_whose_subscription_lacks_room_accepts_acks_copies_and_then_sends() -> None:
    async with small_mailbox() as mailbox:
        await mailbox.set_topic_policy("mail", {"shard_capacity": 5, "shards": 1})
        await mailbox.set_subscription("mail", SubscriptionFilter(("orders",)))
        count = await fill(mailbox)
        (behind,) = await mailbox.list_subscriptions()
        assert behind.status == "copying"
        assert await ack_all(mailbox) == count
        (refused,) = await mailbox.send_batch([message(PAYLOAD)])
        assert isinstance(refused, Saturated)  # what is yet to be copied is kept
        copied = 0
        async with asyncio.timeout(60):
            while copied < count:
                for received in await mailbox.receive_messages("mail", wait_ms=500):
                    await received.ack()
                    copied += 1
            while (await mailbox.list_subscriptions())[0].status != "live":
                await asyncio.sleep(0.05)
        assert await fill(mailbox) > 0
