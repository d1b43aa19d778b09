"""A mailbox that processes share, beside owners that can't be reached, break off, or differ in version."""

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from postroom import (
    Fenced,
    InvalidRequest,
    Mailbox,
    MailboxClosed,
    MailboxOwned,
    NewMessage,
    TopicPolicy,
    Unavailable,
    connect,
    open_mailbox,
    read_mailbox,
)
from postroom.adapters.compose import socket_path
from postroom.adapters.compose.connect import share_mailbox
from postroom.adapters.compose.store import open_store
from postroom.adapters.local.endpoints import bound_path
from postroom.adapters.local.protocol import VERSION, Hello, frame
from postroom.application.threads import cancel_and_wait
from postroom.domain.errors import WrongMode
from tests.support.waiting import until, within

MAILBOX = "main@local"
SHORT_MS = 400
CANCELLATIONS, CANCEL_STEP_SECONDS = 60, 0.000_05
MESSAGE = NewMessage(topic="orders", payload=b"{}")


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "s")


def lock(store: str, owner: str = "process 7 on mars") -> AbstractAsyncContextManager[None]:
    """Own the mailbox without answering anybody, as a process on another host does."""
    return open_store(store).ownership().acquire(MAILBOX, owner, 0)


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]


@asynccontextmanager
async def owner_that_breaks_off(store: str, version: int = VERSION) -> AsyncIterator[list[str]]:
    """Own the mailbox and greet everybody; yield the kinds of the requests, at which the owner ends."""
    kinds: list[str] = []
    path = socket_path(open_store(store), MAILBOX)
    assert path is not None
    owning = lock(store)
    await owning.__aenter__()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(Hello(version, MAILBOX)))
        while True:
            try:
                size = int.from_bytes(await reader.readexactly(4), "big")
            except asyncio.IncompleteReadError:
                break
            kind = msgspec.msgpack.decode(await reader.readexactly(size))[1]
            if kind != "ping":
                kinds.append(kind)
                server.close()
                path.unlink(missing_ok=True)
                await owning.__aexit__(None, None, None)
                break
        writer.close()

    server = await asyncio.start_unix_server(serve, str(path))
    yield kinds
    server.close()


async def test_a_mailbox_whose_owner_can_not_be_reached_is_unavailable_and_names_it(
    postgres_store: str, store: str
) -> None:
    for address in (store, postgres_store):
        async with lock(address):
            with pytest.raises(Unavailable, match="process 7 on mars") as refused:
                async with connect(address, timeout_ms=SHORT_MS):
                    pytest.fail("connected")
        assert not isinstance(refused.value, MailboxOwned)
        assert refused.value.retry_after_ms > 0


async def test_a_send_whose_answer_is_lost_is_repeated_by_its_id(store: str) -> None:
    async with owner_that_breaks_off(store) as kinds, connect(store) as mailbox:
        sent = await mailbox.send_message(MESSAGE)
        assert (kinds, sent.duplicate) == (["Send"], False)
        assert (await mailbox.get_message(sent.message_id)).status == "ready"
        assert (await mailbox.get_backlog()).ready == 1


@pytest.mark.parametrize("call", ["purge_topic", "redrive_dead_letters"])
async def test_an_unsafe_call_whose_answer_is_lost_is_not_repeated(store: str, call: str) -> None:
    async with owner_that_breaks_off(store) as kinds, connect(store) as mailbox:
        with pytest.raises(Unavailable, match="whether the call took effect is unknown"):
            await getattr(mailbox, call)("orders")
        assert kinds == [{"purge_topic": "Purge", "redrive_dead_letters": "Redrive"}[call]]


async def test_an_owner_that_hangs_is_asked_once_and_then_replaced(store: str) -> None:
    connections = 0

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.write(frame(Hello(VERSION, MAILBOX)))
        await reader.read()
        writer.close()

    async with lock(store):
        path = socket_path(open_store(store), MAILBOX)
        assert path is not None
        bound = bound_path(path, await open_store(store).ownership().incumbent(MAILBOX))
        server = await asyncio.start_unix_server(hang, str(bound))
        bound.rename(path)
        async with connect(store, owner_timeout_ms=SHORT_MS) as mailbox:
            await mailbox.send_message(MESSAGE)
            assert connections == 1
        server.close()


async def test_an_owner_that_ends_every_connection_is_not_called_without_pause(store: str) -> None:
    connections: list[float] = []
    now = asyncio.get_running_loop().time

    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(now())
        writer.write(frame(Hello(VERSION, MAILBOX)))
        await writer.drain()
        writer.close()

    async with lock(store):
        server = await asyncio.start_unix_server(end, str(socket_path(open_store(store), MAILBOX)))
        async with connect(store):
            await until(lambda: len(connections) >= 12)
        server.close()
    # Before, 250 a second; now pauses grow from 20 ms, so these lie at least 0.7 s apart.
    assert connections[11] - connections[0] > 0.5


async def test_an_owner_of_another_version_is_refused_by_name(store: str) -> None:
    async with owner_that_breaks_off(store, version=VERSION + 1):
        with pytest.raises(Unavailable, match=rf"speaks version {VERSION + 1} .* run the same version"):
            async with connect(store):
                pytest.fail("connected")


async def test_a_mailbox_of_another_mode_is_refused_beside_its_owner(store: str) -> None:
    async with open_mailbox(store, mode="archive"):
        with pytest.raises(WrongMode):
            async with connect(store, mode="queue"):
                pytest.fail("connected")


@pytest.mark.parametrize("address", ["mysql://shop", "sqlite:///orders.db", "redis://localhost"])
async def test_an_address_of_an_unknown_scheme_is_not_taken_for_a_file(address: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"begins with {address.partition('/')[0]}//; a store is"):
        async with connect(address):
            pass


async def test_an_argument_that_can_not_be_sent_is_refused(store: str) -> None:
    async with open_mailbox(store), connect(store) as mailbox:
        for value in (object(), 1 << 80, "\ud800"):
            with pytest.raises(InvalidRequest):
                await mailbox.get_message(value)  # type: ignore[arg-type]


async def test_many_callers_of_many_connections_get_their_own_answers(store: str) -> None:
    async with (
        open_mailbox(store, durability="relaxed"),
        connect(store) as one,
        connect(store) as two,
    ):

        async def call(number: int) -> None:
            mailbox, topic = (one, two)[number % 2], f"topic-{number}"
            sent = await mailbox.send_message(NewMessage(topic=topic, payload=str(number).encode()))
            (received,) = await mailbox.receive_messages(topic)
            assert (received.message_id, received.payload) == (sent.message_id, str(number).encode())
            await received.ack()
            assert (await mailbox.get_message(sent.message_id)).status == "acked"

        await asyncio.gather(*map(call, range(300)))
    with read_mailbox(store) as reader:
        assert reader.verify_log().messages == 300


async def test_a_take_over_stays_in_the_store_when_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    async with contextlib.AsyncExitStack() as owning:
        await owning.enter_async_context(connect("s", archive="archive"))
        async with connect("s", archive="archive") as mailbox:
            await mailbox.send_message(MESSAGE)
            monkeypatch.chdir(tmp_path / "other")
            await owning.aclose()
            assert (await mailbox.get_backlog()).ready == 1
    assert os.listdir(".") == []


@pytest.mark.parametrize("removed", ["files", "folder"])
async def test_nothing_is_acknowledged_in_a_file_that_was_removed(tmp_path: Path, removed: str) -> None:
    store = tmp_path / "f" / "s"
    store.parent.mkdir()
    async with connect(str(store)) as mailbox:
        await mailbox.send_message(MESSAGE)
        if removed == "folder":
            store.parent.rename(tmp_path / "elsewhere")
            store.parent.mkdir()
        else:
            for file in store.parent.glob("s*"):
                file.unlink()
        await mailbox.send_message(MESSAGE)
        async with connect(str(store)) as other:
            assert (await other.get_backlog()).ready == 1


async def test_an_owner_whose_file_was_replaced_is_told_so(store: str) -> None:
    async with open_mailbox(store) as mailbox:
        await mailbox.send_message(MESSAGE)
        shutil.copy(store, f"{store}-copy")
        os.replace(f"{store}-copy", store)
        for _ in range(2):
            with pytest.raises(Fenced, match=r"was removed or replaced .* open the mailbox again"):
                await mailbox.send_message(MESSAGE)


async def test_an_idle_owner_whose_file_was_removed_learns_it(store: str) -> None:
    async with open_mailbox(store) as mailbox:
        os.unlink(store)
        with pytest.raises(Fenced, match="was removed or replaced"):
            await mailbox.engine.check_ownership()
        await mailbox.engine.wait_until_lost()


async def test_an_answer_above_the_limit_is_refused_and_the_connection_stays(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postroom.adapters.local.server_connection.FRAME_BYTES", 10_000)
    async with open_mailbox(store), connect(store) as mailbox:
        await mailbox.send_batch([NewMessage(topic="orders", payload=bytes(2_000))] * 8)
        waiting = asyncio.create_task(mailbox.receive_messages("others", wait_ms=20_000))
        with pytest.raises(InvalidRequest, match="ask for fewer"):
            await mailbox.peek_messages("orders")
        assert len(await mailbox.peek_messages("orders", limit=2)) == 2
        await mailbox.send_message(NewMessage(topic="others", payload=b""))
        assert len(await waiting) == 1


async def test_a_mailbox_used_in_another_event_loop_says_so(store: str) -> None:
    async with open_mailbox(store), connect(store) as mailbox:

        def use() -> None:
            with pytest.raises(InvalidRequest, match="opened in another event loop"):
                asyncio.run(mailbox.get_backlog())

        await asyncio.to_thread(use)


async def test_tasks_share_a_connection(store: str) -> None:
    connection = connect(store, timeout_ms=5_000)
    is_open, may_leave = asyncio.Event(), asyncio.Event()

    async def use_and_leave() -> None:
        async with connection:
            is_open.set()
            await within(may_leave.wait())

    other = asyncio.create_task(use_and_leave())
    await within(is_open.wait())
    async with connection as mailbox:
        may_leave.set()
        await other
        await mailbox.send_message(MESSAGE)


async def test_a_store_below_a_file_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable, match="Not a directory"):
        async with connect(str(tmp_path / "file" / "s")):
            pytest.fail("connected")


async def test_a_connection_that_closes_before_its_first_call_releases_the_mailbox(store: str) -> None:
    for _ in range(3):
        async with connect(store):
            pass
        async with open_mailbox(store):  # refused at once while anybody owns it
            pass


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 50, 500])
async def test_a_connection_that_is_cancelled_while_it_opens_releases_the_mailbox(
    store: str, steps: int
) -> None:
    async def use() -> None:
        async with connect(store):
            await asyncio.sleep(60)

    using = asyncio.create_task(use())
    for _ in range(steps):
        await asyncio.sleep(0)
    await cancel_and_wait(using, seconds=10)
    async with open_mailbox(store):
        pass


@pytest.mark.parametrize("kind", ["owner", "local socket", "thread"])
async def test_a_receive_that_is_cancelled_at_any_moment_leaves_its_message_to_the_next_one(
    store: str, kind: str
) -> None:
    policy = TopicPolicy(max_attempts=1, visibility_ms=100_000)
    async with AsyncExitStack() as opened:
        owner = await opened.enter_async_context(open_mailbox(store, default_policy=policy))
        mailbox: Mailbox = owner
        if kind != "owner":
            client = share_mailbox(store, in_thread=kind == "thread")
            mailbox = await opened.enter_async_context(client)
        cancelled = 0
        for number in range(CANCELLATIONS):
            await mailbox.send_message(NewMessage("orders", b"%d" % number))
            receiving = asyncio.create_task(mailbox.receive_messages("orders", wait_ms=20_000))
            await asyncio.sleep(number * CANCEL_STEP_SECONDS)
            receiving.cancel()
            (received,) = await asyncio.gather(receiving, return_exceptions=True)
            if isinstance(received, asyncio.CancelledError):
                cancelled += 1
                received = await mailbox.receive_messages("orders", wait_ms=20_000)
            assert not isinstance(received, BaseException)
            (message,) = received
            assert (message.payload, message.attempt) == (b"%d" % number, 1)
            await message.ack()
        assert cancelled > 0


async def test_a_receive_whose_message_another_one_got_waits_for_as_long_as_it_may(store: str) -> None:
    async with connect(store, timeout_ms=1_500) as mailbox:
        await mailbox.send_message(MESSAGE)
        receives = [
            asyncio.create_task(mailbox.receive_messages("orders", max_messages=1, wait_ms=20_000))
            for _ in range(2)
        ]
        await asyncio.wait(receives, return_when=asyncio.FIRST_COMPLETED, timeout=20)
        await asyncio.sleep(2)  # longer than a call that waits for no message may take
        await mailbox.send_message(MESSAGE)
        assert [[each.attempt for each in await receive] for receive in receives] == [[1], [1]]


@pytest.mark.parametrize("pause", [0, 0.001, 0.005])
async def test_a_connection_that_closes_ends_the_receives_that_wait(store: str, pause: float) -> None:
    async with connect(store, timeout_ms=60_000) as mailbox:
        await mailbox.send_message(MESSAGE)
        receives = [
            asyncio.create_task(mailbox.receive_messages("orders", max_messages=1, wait_ms=60_000))
            for _ in range(4)
        ]
        await asyncio.sleep(pause)
    async with asyncio.timeout(30):
        received = await asyncio.gather(*receives, return_exceptions=True)
    assert all(isinstance(each, MailboxClosed | list) for each in received)
    assert any(isinstance(each, MailboxClosed) for each in received)
