"""A mailbox that takes more room than it may gives up its oldest settled past, and nothing else."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from random import Random

import pytest

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.parquet.log_archive import ParquetLogArchive
from postroom.application.messages import NewMessage
from postroom.application.queries.verify import VerifyLog
from postroom.domain.errors import NotFound
from postroom.domain.policy import MailboxLimits, TopicPolicy
from postroom.domain.settings import SettingsChanges
from tests.support.logs import capture_logs

MB = 1_000_000
TOPIC = "orders"
BODY_BYTES = 10_000

Open = Callable[..., AbstractAsyncContextManager[OwnedMailbox]]


@pytest.fixture(params=["sqlite", "postgres", "jetstream", "memory"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Open one and the same mailbox, with limits as the test says."""
    if request.param == "memory":
        store = "memory:"
    elif request.param == "sqlite":
        store = str(tmp_path / "store.db")
    else:
        store = request.getfixturevalue(f"{request.param}_store")

    @asynccontextmanager
    async def open_(max_store_bytes: int | None = None, **options: object) -> AsyncIterator[OwnedMailbox]:
        limits = MailboxLimits(max_store_bytes=max_store_bytes, max_messages=1_000)
        policy = TopicPolicy(visibility_ms=60_000)
        async with open_mailbox(
            store,
            "acme@one",
            limits=limits,
            default_policy=policy,
            **options,  # type: ignore[arg-type]
        ) as mailbox:
            yield mailbox

    return open_


async def send(mailbox: OwnedMailbox, count: int, topic: str = TOPIC) -> list[str]:
    """Send messages that no store can compress, and return their ids."""
    noise = Random(count)
    sent = [
        await mailbox.send_message(NewMessage(topic=topic, payload=noise.randbytes(BODY_BYTES)))
        for _ in range(count)
    ]
    return [each.message_id for each in sent]


async def settle(mailbox: OwnedMailbox, topic: str = TOPIC) -> None:
    """Receive and ack whatever is there."""
    while taken := await mailbox.receive_messages(topic, max_messages=1_000, max_bytes=100 * MB):
        await mailbox.ack_messages([each.receipt for each in taken])


async def live(mailbox: OwnedMailbox, count: int) -> list[str]:
    """Send and settle messages, ten at a time, and return their ids."""
    ids: list[str] = []
    for _ in range(count // 10):
        ids += await send(mailbox, 10)
        await settle(mailbox)
    return ids


async def test_the_oldest_settled_messages_go_until_the_rest_fits(opened: Open) -> None:
    async with opened(2 * MB) as mailbox:
        ids = await live(mailbox, 400)
        log = mailbox.engine.log
        assert log.size().commits > 3 * MB
        assert await mailbox.retention.enforce_size() > 200
        assert 1 * MB < log.size().commits <= 2 * MB
        with pytest.raises(NotFound):
            await mailbox.get_message(ids[0])
        assert (await mailbox.get_message(ids[-1])).message_id == ids[-1]
        assert await mailbox.retention.enforce_size() == 0
        VerifyLog(log)()


async def test_a_mailbox_that_fits_and_one_without_a_bound_keep_everything(opened: Open) -> None:
    async with opened(100 * MB) as mailbox:
        await live(mailbox, 100)
        assert await mailbox.retention.enforce_size() == 0
        await mailbox.set_settings(SettingsChanges({"max_store_bytes": None}))
    async with opened(None) as mailbox:
        assert await mailbox.retention.enforce_size() == 0


async def test_what_is_unsettled_stays_and_it_is_said_that_the_rest_cannot_go(opened: Open) -> None:
    async with opened(1 * MB) as mailbox:
        await live(mailbox, 20)
        waiting = await send(mailbox, 200, "waiting")
        await live(mailbox, 50)
        with capture_logs() as logged:
            assert await mailbox.retention.enforce_size() >= 20
        (told,) = [each for each in logged if each["event"] == "mailbox.too_large"]
        assert told["log_level"] == "warning"
        assert told["bytes"] > told["limit"] == 1 * MB
        assert [(await mailbox.get_message(id_)).message_id for id_ in waiting] == waiting
        with capture_logs() as logged:
            assert await mailbox.retention.enforce_size() == 0
        assert [each["event"] for each in logged] == ["mailbox.retention_blocked", "mailbox.too_large"]
        await settle(mailbox, "waiting")
        assert await mailbox.retention.enforce_size() > 150
        assert mailbox.engine.log.size().commits <= 1 * MB


async def test_what_goes_is_archived_first(opened: Open, tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    async with opened(1 * MB, archive=folder) as mailbox:
        await live(mailbox, 200)
        written = list(mailbox.engine.log.commits())
        removed = await mailbox.retention.enforce_size()
        assert removed > 100
        archived = list(ParquetLogArchive(folder).commits("acme@one"))
        assert archived == [commit for commit in written if commit.last <= removed]
        assert archived[-1].last == removed


async def test_a_bound_that_nothing_can_meet_removes_what_it_may_and_goes_on(opened: Open) -> None:
    async with opened(1) as mailbox:
        await live(mailbox, 50)
        with capture_logs():
            assert await mailbox.retention.enforce_size() > 100
        (id_,) = await send(mailbox, 1)
        assert (await mailbox.get_message(id_)).message_id == id_


async def test_a_file_shrinks_to_its_bound_while_senders_go_on(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    limits = MailboxLimits(max_store_bytes=2 * MB, max_messages=1_000)
    async with open_mailbox(str(path), limits=limits) as mailbox:
        await live(mailbox, 600)
        full = mailbox.engine.log.size().disk
        with capture_logs() as logged:
            _, sent = await asyncio.gather(mailbox.retention.enforce_size(), send(mailbox, 20))
        (told,) = [each for each in logged if each["event"] == "mailbox.shrunk"]
        assert told["reclaimed"] > full - 3 * MB
        assert mailbox.engine.log.size().disk < 3 * MB
        assert [(await mailbox.get_message(id_)).message_id for id_ in sent] == sent
    assert path.stat().st_size < 3 * MB
    async with open_mailbox(str(path), limits=limits) as mailbox:
        VerifyLog(mailbox.engine.log)()
        assert [(await mailbox.get_message(id_)).message_id for id_ in sent] == sent


async def test_an_open_mailbox_keeps_its_bound_by_itself(tmp_path: Path) -> None:
    limits = MailboxLimits(max_store_bytes=1 * MB, max_messages=1_000)
    async with open_mailbox(str(tmp_path / "store.db"), limits=limits) as mailbox:
        await live(mailbox, 200)
        keeping = asyncio.create_task(mailbox.retention.run(size_every_seconds=0.01))
        while mailbox.engine.log.size().commits > 1 * MB:
            await asyncio.sleep(0.01)
        keeping.cancel()
