"""Two processes that both believe they own a mailbox of a store on disk: the log admits one (fencing)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path

import psycopg
import pytest

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.compose.queries import read_mailbox
from postroom.adapters.compose.store import open_store
from postroom.adapters.system.clock import SystemClock
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.mailbox.owner_tasks import watch_ownership
from postroom.application.messages import NewMessage, Sent
from postroom.application.ports.event_log import EventLog
from postroom.domain.errors import Fenced, MailboxOwned
from postroom.domain.policy import TopicPolicy
from tests.support.waiting import until

MAILBOX = "main@local"
DEADLINE_SECONDS = 240


def message(number: int) -> NewMessage:
    return NewMessage(topic="orders", payload=str(number).encode())


@pytest.fixture(params=["sqlite", "postgres", "jetstream"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "store.db")
    url: str = request.getfixturevalue(f"{request.param}_store")
    return url


def open_log(store: str) -> EventLog:
    return open_store(store).event_log(MAILBOX)


@asynccontextmanager
async def open_without_ownership(store: str) -> AsyncIterator[OwnedMailbox]:
    """Open a mailbox as a process does whose lock was lost without its knowing."""
    log = open_log(store)
    engine = MailboxEngine(log, SystemClock())
    await engine.open("a process without the lock")
    try:
        yield OwnedMailbox(engine, SystemClock())
    finally:
        await engine.close()
        log.close()


async def test_the_lock_admits_one_owner_and_the_next_one_when_it_leaves(store: str) -> None:
    async with open_mailbox(store, owner="the first") as first:
        await first.send_message(message(1))
        with pytest.raises(MailboxOwned, match="the first"):
            async with open_mailbox(store, wait_ms=0):
                pass
    async with open_mailbox(store, wait_ms=0) as second:
        assert [each.payload for each in await second.receive_messages("orders")] == [b"1"]


async def test_a_stale_owner_delivers_nothing_that_the_new_one_delivers(store: str) -> None:
    async with open_without_ownership(store) as old:
        await old.send_batch([message(number) for number in range(10)])
        kept = await old.receive_messages("orders", max_messages=3, visibility_ms=60_000)
        async with open_without_ownership(store) as new:
            outcomes = await asyncio.gather(
                old.receive_messages("orders", max_messages=5),
                new.receive_messages("orders", max_messages=5),
                old.send_message(message(10)),
                new.send_message(message(11)),
                return_exceptions=True,
            )
            assert isinstance(outcomes[0], Fenced)
            assert isinstance(outcomes[2], Fenced)
            with pytest.raises(Fenced):
                await old.ack_messages([kept[0].receipt])
            assert isinstance(outcomes[1], list)
            assert [each.payload for each in outcomes[1]] == [b"3", b"4", b"5", b"6", b"7"]
            # What the old owner delivered before it was taken over may still be acked, to the new one.
            assert await new.ack_messages([each.receipt for each in kept]) == [None] * 3
            rest = await new.receive_messages("orders")
            assert [each.payload for each in rest] == [b"8", b"9", b"11"]
    with read_mailbox(store) as reader:
        assert reader.verify_log().messages == 11


async def test_the_close_of_a_stale_owner_leaves_the_seal_of_the_new_one(store: str) -> None:
    async with open_without_ownership(store) as old:
        await old.send_message(message(1))
        async with open_without_ownership(store) as new:
            await new.send_message(message(2))
    with closing(open_log(store)) as log:
        seal, head = log.read_seal(), log.head()
        assert seal is not None
        assert head is not None
        assert (seal.position, seal.chain) == (head.position, head.chain)


async def test_an_idle_stale_owner_finds_out_and_every_call_raises_fenced(store: str) -> None:
    async with open_without_ownership(store) as old:
        await old.send_message(message(1))
        (held,) = await old.receive_messages("orders", visibility_ms=60_000)
        waiting = [asyncio.create_task(old.receive_messages(t, wait_ms=60_000)) for t in ("orders", "x")]
        watching = asyncio.create_task(watch_ownership(old.engine, 0.01))
        await until(lambda: {*old.engine.long_polls} == {"orders", "x"})
        assert not watching.done()
        async with open_without_ownership(store), asyncio.timeout(DEADLINE_SECONDS):
            await watching
            for outcome in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(outcome, Fenced)
            calls: list[Callable[[], Awaitable[object]]] = [
                lambda: old.send_message(message(2)),
                lambda: old.send_batch([message(2)]),
                lambda: old.receive_messages("orders"),
                lambda: old.receive_messages("orders", wait_ms=60_000),
                lambda: old.ack_messages([held.receipt]),
                lambda: old.nack_messages([held.receipt]),
                lambda: old.extend_visibility([held.receipt], 60_000),
                lambda: old.redrive_dead_letters("orders"),
                lambda: old.purge_topic("orders"),
                lambda: old.set_topic_policy("orders", TopicPolicy()),
                lambda: old.retention.enforce_age(),
            ]
            for call in calls:
                with pytest.raises(Fenced):
                    await call()
            with pytest.raises(Fenced):
                await old.get_backlog()


async def test_an_owner_whose_lock_connection_ended_is_fenced_while_it_waits(postgres_store: str) -> None:
    async with open_mailbox(postgres_store, owner="the first") as first:
        waiting = asyncio.create_task(first.receive_messages("orders", wait_ms=60_000))
        with psycopg.connect(postgres_store, autocommit=True) as connection:
            end = (
                "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity "
                "WHERE application_name = 'the first'"
            )
            assert connection.execute(end).fetchall() == [(True,)]
        async with open_mailbox(postgres_store, wait_ms=0), asyncio.timeout(DEADLINE_SECONDS):
            with pytest.raises(Fenced):
                await waiting
            with pytest.raises(Fenced):
                await first.receive_messages("orders", wait_ms=60_000)


async def test_owners_that_take_a_mailbox_from_each_other_lose_no_acknowledged_message(store: str) -> None:
    acknowledged: list[str] = []
    async with AsyncExitStack() as opened:
        owner = await opened.enter_async_context(open_without_ownership(store))
        for turn in range(10):
            sending = [asyncio.create_task(owner.send_message(message(turn))) for _ in range(20)]
            next_owner = await opened.enter_async_context(open_without_ownership(store))
            answers = await asyncio.gather(
                *sending, owner.send_message(message(turn)), return_exceptions=True
            )
            acknowledged += [answer.message_id for answer in answers if isinstance(answer, Sent)]
            assert all(isinstance(answer, Sent | Fenced) for answer in answers)
            assert isinstance(answers[-1], Fenced)
            owner = next_owner
        received = await owner.receive_messages("orders", max_messages=256)
    assert set(acknowledged) <= {each.message_id for each in received}
    with read_mailbox(store) as reader:
        assert reader.verify_log().messages == len(received)
