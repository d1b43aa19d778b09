"""Settings of a mailbox are in its log: whoever owns it, they are the same (ADR 0098)."""

import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uuid_utils

from postroom.adapters.cli.output import Output
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import load_settings
from postroom.adapters.cli.work import work
from postroom.adapters.compose import OwnerSettings, open_mailbox
from postroom.adapters.compose.connect import connect, share_mailbox
from postroom.adapters.compose.queries import read_mailbox
from postroom.application.cluster.namespace_mailbox import NamespaceMailbox
from postroom.application.mailbox.stored_snapshots import fold, usable_snapshots
from postroom.application.operations.mailbox import Mailbox
from postroom.application.workers.worker import Worker
from postroom.domain.errors import Difference, InvalidRequest, SettingsConflict
from postroom.domain.mailbox.state import shard_of
from postroom.domain.mailbox.topic_decisions import SettingsEffect
from postroom.domain.policy import MailboxLimits, TopicPolicy
from postroom.domain.settings import SettingsChanges
from tests.support.namespaces import Directory, Member
from tests.support.stores import memory_place, message

FIRST = TopicPolicy(shards=2, visibility_ms=2_000, max_attempts=3, dead_capacity=7, replay_window_ms=600_000)
OTHER = TopicPolicy(max_attempts=1, dead_capacity=2)
CONFLICT = (
    "Mailbox main@local has other settings than those given: policy.max_attempts is 3, not 1; "
    "topics.orders.shards is 2, not 4. Leave them out to use what is stored; to change it, run "
    "`postroom mailbox set policy.max_attempts=1 topics.orders.shards=4` or `postroom apply`."
)

KEY = next(str(n) for n in range(99) if len({shard_of(str(n), shards) for shards in (2, 5, 8)}) == 3)
FILE = "[policy]\nmax_attempts = 1\n[topics.orders]\nshards = 4\n"
worker = Worker()


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store.db")


def cli_session(folder: Path, text: str) -> Session:
    """Return a session of a command with a settings file in a folder."""
    file = folder / "postroom.toml"
    file.write_text(text)
    flags = {"store": str(folder / "store.db")}
    return Session("test", load_settings(flags, {}, str(file)), Output(True))


async def kill(mailbox: Any, count: int) -> None:
    """Make dead letters."""
    await mailbox.send_batch([message(b"%d" % number, sticky_key=str(number)) for number in range(count)])
    for _ in range(FIRST.max_attempts):
        received = await mailbox.receive_messages("orders", max_messages=256)
        await mailbox.nack_messages([each.receipt for each in received], reason="boom", delay_ms=0)


# -- a change of owner ---


async def test_a_change_of_owner_changes_nothing() -> None:
    place = memory_place()
    async with place.open(policy=FIRST) as first:
        await kill(first, 6)
        await first.send_message(message(b"paid", "once", idem_key="k"))
        await first.send_message(message(b"older", "keys", sticky_key=KEY))
        (kept,) = [row for row in (await first.get_backlog("keys")).shards if row.ready]
    place.clock.advance(400_000)  # longer than the replay window by default, and within this mailbox's
    async with place.open() as second:
        assert len((await second.list_dead_letters("orders")).items) == 6
        assert (await second.send_message(message(b"paid", "once", idem_key="k"))).duplicate
        await second.send_message(message(b"newer", "keys", sticky_key=KEY))
        (shard,) = [row for row in (await second.get_backlog("keys")).shards if row.ready]
        assert (shard.shard, shard.ready) == (kept.shard, 2)
        (received,) = await second.receive_messages("once")
        assert await second.nack_messages([received.receipt], delay_ms=0) == [None]
        assert (await second.list_dead_letters("once")).items == ()
        assert await second.get_topic_policy("orders") == FIRST


async def test_a_take_over_with_other_settings_is_refused_and_leaves_no_trace() -> None:
    place = memory_place()
    async with place.open(policy=FIRST) as first:
        await kill(first, 6)
    end = place.open_log().head()
    with pytest.raises(SettingsConflict) as refusal:
        async with place.open(policy=OTHER, limits=MailboxLimits(topics=9)):
            pass
    assert place.open_log().head() == end
    assert refusal.value.differences == (
        Difference("limits.topics", 10_000, 9),
        Difference("policy.shards", 2, 8),
        Difference("policy.visibility_ms", 2_000, 30_000),
        Difference("policy.max_attempts", 3, 1),
        Difference("policy.replay_window_ms", 600_000, 300_000),
        Difference("policy.dead_capacity", 7, 2),
    )
    async with place.open(policy=FIRST) as again:
        assert len((await again.list_dead_letters("orders")).items) == 6


async def test_the_visibility_is_the_same_whoever_owns_the_mailbox(tmp_path: Path, store: str) -> None:
    session = cli_session(tmp_path, "")
    openers: list[Callable[[], AbstractAsyncContextManager[Mailbox]]] = [
        lambda: open_mailbox(store),
        lambda: connect(store),
        lambda: session.use(create=True),
    ]
    for opener in openers:
        async with opener() as mailbox:
            assert (await mailbox.get_topic_policy("orders")).visibility_ms == 30_000


# -- openers that say something else ---


@asynccontextmanager
async def _library(folder: Path) -> AsyncIterator[object]:
    changes = SettingsChanges(default_policy={"max_attempts": 1}, topics={"orders": {"shards": 4}})
    async with share_mailbox(str(folder / "store.db"), settings=OwnerSettings(settings=changes)) as mailbox:
        yield mailbox


@asynccontextmanager
async def _command(folder: Path) -> AsyncIterator[object]:
    async with cli_session(folder, FILE).use(create=True) as mailbox:
        yield mailbox


@asynccontextmanager
async def _worker(folder: Path) -> AsyncIterator[object]:
    await work(cli_session(folder, FILE), "tests.integration.test_settings:worker", once=True)
    yield None


@pytest.mark.parametrize("opener", [_library, _command, _worker])
@pytest.mark.parametrize("is_owned", [True, False])
async def test_every_opener_is_refused_with_the_same_sentence(
    tmp_path: Path, store: str, opener: Callable[[Path], AbstractAsyncContextManager[object]], is_owned: bool
) -> None:
    async with AsyncExitStack() as opened:
        await opened.enter_async_context(open_mailbox(store, default_policy=FIRST))
        if not is_owned:
            await opened.aclose()
        with pytest.raises(SettingsConflict) as refusal:
            async with opener(tmp_path):
                pass
    assert str(refusal.value) == CONFLICT
    copied = pickle.loads(pickle.dumps(refusal.value))
    assert (str(copied), copied.differences) == (CONFLICT, refusal.value.differences)
    with read_mailbox(store) as reader:
        assert reader.get_backlog().epoch == 1


async def test_a_process_goes_on_when_another_changes_the_settings(store: str) -> None:
    async with connect(store, default_policy=FIRST) as first, connect(store, default_policy=FIRST) as second:
        await first.send_message(message(b"1"))
        async with share_mailbox(store) as operator:
            assert await operator.set_settings(SettingsChanges(default_policy={"max_attempts": 9}))
        assert (await second.get_topic_policy("orders")).max_attempts == 9
        await second.send_message(message(b"2"))
    with pytest.raises(SettingsConflict, match=r"policy\.max_attempts is 9, not 3"):
        async with connect(store, default_policy=FIRST):
            pass


# -- changes ---


async def test_settings_are_changed_previewed_and_restored_over_the_local_socket(store: str) -> None:
    changes = SettingsChanges(
        {"topics": 5},
        {"dead_capacity": 2},
        {"pay.*": {"max_attempts": 9}, "pay.cards": {"visibility_ms": 250}},
    )
    async with open_mailbox(store, default_policy=FIRST) as owner, share_mailbox(store) as client:
        await kill(owner, 6)
        preview = await client.preview_settings(changes)
        assert preview.effects == preview.losses == [SettingsEffect("orders", "dead_letters_expired", 4)]
        assert preview.after != await client.get_settings() == preview.before
        assert await client.set_settings(changes)
        assert not await client.set_settings(changes)
        assert await client.get_settings() == preview.after
        assert (await client.get_topic_policy("pay.cards")).max_attempts == 9
        await owner.engine.take_snapshot()
        with pytest.raises(InvalidRequest, match="has no field 'atempts'; did you mean max_attempts"):
            await client.set_settings(SettingsChanges(topics={"x": {"atempts": 1}}))
        await client.set_settings(
            SettingsChanges(topics={"pay.*": None, "pay.cards": {"visibility_ms": None}})
        )
        assert (await client.get_settings()).topics == {}
        assert await client.set_settings(SettingsChanges(), replace=True)
        assert (await client.get_topic_policy("pay.cards")) == TopicPolicy()
    with read_mailbox(store) as reader:
        assert next(usable_snapshots(reader.log)).restore() is not None
        assert fold(reader.log).settings == reader.get_settings()


async def test_effects_of_a_change_are_counted_before_it_is_made() -> None:
    place = memory_place()
    async with place.open(policy=TopicPolicy(replay_window_ms=600_000, shards=1)) as mailbox:
        await mailbox.send_batch([message(b"a", idem_key=str(number)) for number in range(3)])
        received = await mailbox.receive_messages("orders", max_messages=2)
        await mailbox.nack_messages([each.receipt for each in received], delay_ms=0)
        place.clock.advance(400_000)
        await mailbox.send_message(message(b"b", idem_key="late"))
        changes = SettingsChanges(
            {"history_retention_ms": 1},
            {"replay_window_ms": 300_000, "max_attempts": 1, "shards": 2},
        )
        preview = await mailbox.preview_settings(changes)
        assert preview.effects == [
            SettingsEffect("orders", "keys_forgotten", 3),
            SettingsEffect("orders", "shards_wait", 4),
            SettingsEffect("orders", "attempts_used", 2),
            SettingsEffect(None, "records_removed", 2),
        ]
        assert [each.effect for each in preview.losses] == [
            "keys_forgotten",
            "attempts_used",
            "records_removed",
        ]


async def test_another_number_of_shards_waits_until_the_topic_is_empty() -> None:
    place = memory_place()
    async with place.open(policy=TopicPolicy(shards=2)) as mailbox:
        await mailbox.send_message(message(b"1", sticky_key=KEY))
        await mailbox.set_settings(SettingsChanges(default_policy={"shards": 5}))
        await mailbox.send_batch([message(b"2", sticky_key=KEY), message(b"3", sticky_key=KEY)])
    async with place.open() as mailbox:
        (topic,) = await mailbox.list_topics()
        assert topic.shards_in_use == 2
        received = await mailbox.receive_messages("orders")
        assert [each.payload for each in received] == [b"1", b"2", b"3"]
        assert {row.shard for row in (await mailbox.get_backlog()).shards} == {shard_of(KEY, 2)}
        await mailbox.ack_messages([each.receipt for each in received])
        await mailbox.send_batch([message(b"4", sticky_key=KEY), message(b"5", sticky_key=KEY)])
        assert {row.shard for row in (await mailbox.get_backlog()).shards} == {shard_of(KEY, 5)}
        (topic,) = await mailbox.list_topics()
        assert topic.shards_in_use is None


# -- namespaces ---


async def test_a_new_member_of_a_namespace_follows_the_globs_of_the_older_one_and_its_own_default() -> None:
    globs = {"pay.*": {"max_attempts": 7}, "*.eu": {"shards": 3}, "pay.own": {"dead_capacity": 5}}
    async with AsyncExitStack() as opened:
        one = await opened.enter_async_context(open_mailbox("memory:", "acme@one"))
        two = await opened.enter_async_context(
            open_mailbox("memory:", "acme@two", default_policy=TopicPolicy(visibility_ms=60_000))
        )
        await one.set_settings(SettingsChanges(topics=globs))
        members = {each.name: Member(each) for each in (one, two)}
        for names in (["acme@one"], ["acme@one", "acme@two"]):
            namespace = NamespaceMailbox(Directory("acme", members, names), 3_000, uuid_utils.uuid7)
            opened.push_async_callback(namespace.close)
            await namespace.open()
            await namespace.send_message(message(b"x", "pay.eu"))
            await namespace.pause_topic("pay.eu")

        assert (await two.get_settings()).topics == globs
        assert await two.get_topic_policy("pay.eu") == TopicPolicy(
            visibility_ms=60_000, max_attempts=7, shards=3
        )
        assert {each.topic for each in await two.list_topics() if each.paused} == {"pay.eu"}
