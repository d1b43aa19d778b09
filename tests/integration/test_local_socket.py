"""The socket of a mailbox's owner: who may use it, what it accepts, and where it is."""

import asyncio
import inspect
import os
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest

from postroom import (
    EventFilter,
    InvalidRequest,
    NewMessage,
    OwnedMailbox,
    RedriveSpec,
    Unavailable,
    connect,
    open_mailbox,
)
from postroom.adapters.compose.connect import connect_remote
from postroom.adapters.compose.serve import (
    HttpSettings,
    open_grpc_surface,
    open_http_surface,
    serve_mailbox,
    unrestricted,
)
from postroom.adapters.local import protocol
from postroom.adapters.local.protocol import FRAME_BYTES, frame
from postroom.application.worker_reports import HandlerState, WorkerState
from postroom.domain.mailbox.commands import Ack, Extend, Nack, Purge, Receive, Redrive, Send, SetPolicy
from postroom.domain.message import IN_FLIGHT, Headers, Message, Receipt
from postroom.domain.policy import TopicPolicy
from postroom.domain.saved_search import search_id
from postroom.domain.schedule import ScheduleSpec
from postroom.domain.settings import SettingsChanges
from postroom.domain.subscription import SubscriptionFilter

MAILBOX = "main@local"
JOB_ID = "0189b2d6-7c1e-7abc-8def-0123456789ab"
NIGHTLY = ScheduleSpec(
    "reports", "0 3 * * *", "Europe/Madrid", payload=b"\xff", headers={"a": "b"}, priority=0
)
FILTER = SubscriptionFilter(("orders",), {"region": "eu"})
BEFORE = datetime(2026, 1, 31, 12, 0, 0, 5, tzinfo=UTC)
RECEIPT = Receipt(b"m" * 16, 1, 1)
SEND = Send(b"m" * 16, "orders", 2, b"h" * 32, b"c" * 32, Headers(0), b"envelope")
DEPTH = 100_000
decode = msgspec.msgpack.decode


def changed(struct: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(struct, **fields)


def socket_of(store: Path) -> Path:
    return store.with_name(f"{store.name}-socket-{MAILBOX}")


class Peer:
    """A client that writes what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(self, data: bytes) -> Any:
        self._writer.write(data)
        return await self.read()

    async def read(self) -> Any:
        """Return the next frame; None at the end."""
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "big")
        except asyncio.IncompleteReadError:
            return None
        return decode(await self._reader.readexactly(size))

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def peer(store: Path) -> AsyncIterator[Peer]:
    connected = Peer(*await asyncio.open_unix_connection(str(socket_of(store))))
    assert await connected.read() == {"version": 6, "mailbox": MAILBOX}
    try:
        yield connected
    finally:
        connected.close()


@pytest.fixture
async def owned(tmp_path: Path) -> AsyncIterator[OwnedMailbox]:
    async with open_mailbox(str(tmp_path / "store.db"), durability="relaxed") as mailbox:
        yield mailbox


@pytest.mark.parametrize(
    "data",
    [
        b"\0\0\0\1\xc1",
        b"\0\0\0\0",
        b"GET / HTTP/1.1\r\n\r\n",
        (FRAME_BYTES + 1).to_bytes(4, "big"),
        frame("text"),
        frame([1, "ping"]),
        frame([1, "cancel", "text"]),
        frame([1 << 63, "cancel", []]),
        (7 + DEPTH).to_bytes(4, "big") + b"\x93\x01\xa4ping" + b"\x91" * DEPTH,
    ],
    ids=range(9),
)
async def test_a_malformed_frame_ends_its_connection_with_one_error_and_nothing_else(
    owned: OwnedMailbox, tmp_path: Path, data: bytes
) -> None:
    async with peer(tmp_path / "store.db") as other, peer(tmp_path / "store.db") as one:
        id_, error, _ = await one.ask(data)
        assert (id_, error["code"]) == (0, "E_SCHEMA")
        assert await one.read() is None
        assert await other.ask(frame([7, "ping", None])) == [7, None, None]
    await owned.send_message(NewMessage(topic="orders", payload=b""))


@pytest.mark.parametrize(
    "data",
    [
        frame([1, "explode", None]),
        frame([1, "Sweep", [{}]]),
        frame([1, "TakeOwnership", [{}]]),
        frame([1, "Truncate", [{"through": 1, "link": b""}]]),
        frame([1, "Send", [{"topic": "orders"}]]),
        frame([1, "Ack", "text"]),
        frame([1, "receive", [5]]),
        frame([1, "query", ["__class__", [], {}]]),
        frame([1, "query", ["engine", [], {}]]),
        frame([1, "query", ["search_unsettled", [{"topics": 5}], {}]]),
        frame([1, "query", ["get_message", [], {}]]),
        frame([1, "query", ["get_message", ["a"], {"b": 1}]]),
        frame([1, "find_id", "text"]),
        frame([1, "relay", 5]),
    ],
    ids=range(14),
)
async def test_an_unknown_or_malformed_request_is_answered_with_an_error(
    owned: OwnedMailbox, tmp_path: Path, data: bytes
) -> None:
    async with peer(tmp_path / "store.db") as one:
        id_, error, _ = await one.ask(data)
        assert (id_, error["code"]) == (1, "E_SCHEMA")
        assert await one.ask(frame([7, "ping", None])) == [7, None, None]
    await owned.send_message(NewMessage(topic="orders", payload=b""))


async def test_a_client_whose_request_the_owner_can_not_read_is_told_so_at_once(
    owned: OwnedMailbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(str(tmp_path / "store.db")) as client:
        monkeypatch.setattr("postroom.adapters.local.client.frame", lambda _: frame("text"))
        with pytest.raises(InvalidRequest, match="can't be read"):
            await client.get_backlog()


@asynccontextmanager
async def transported(transport: str, store: str) -> AsyncIterator[Any]:
    """Open the mailbox that another owner has, or has to have, over a transport."""
    if transport == "owner":
        async with connect(store) as mailbox:
            yield mailbox
        return
    async with open_mailbox(store) as owner:
        if transport == "socket":
            async with connect(store) as mailbox:
                yield mailbox
        elif transport == "sync":
            in_threads = await asyncio.to_thread(connect(store).sync)
            yield in_threads
            await asyncio.to_thread(in_threads.close)
        else:
            address = "127.0.0.1:0"
            surface = (
                open_http_surface(address, HttpSettings())
                if transport == "http"
                else open_grpc_surface(address)
            )
            async with (
                serve_mailbox(store, owner, [surface], access=unrestricted) as (served,),
                connect_remote(served, timeout_ms=30_000) as mailbox,
            ):
                yield mailbox


WORKER = WorkerState(
    "shop", "host-1", 7, "1.2", "0.1", 1, (HandlerState("o*", "ship", "shop/ship@h:7", 4, 1),)
)
QUERIES: dict[str, Callable[[Any, str], Any]] = {
    "get_message": lambda mailbox, id_: mailbox.get_message(id_),
    "wait_for_result": lambda mailbox, id_: mailbox.wait_for_result(id_, wait_ms=1),
    "explain_message": lambda mailbox, id_: mailbox.explain_message(id_),
    "get_backlog": lambda mailbox, _: mailbox.get_backlog(),
    "list_dead_letters": lambda mailbox, _: mailbox.list_dead_letters(),
    "get_topic_policy": lambda mailbox, _: mailbox.get_topic_policy("orders"),
    "list_topics": lambda mailbox, _: mailbox.list_topics(),
    "describe_topic": lambda mailbox, _: mailbox.describe_topic("orders"),
    "list_consumers": lambda mailbox, _: mailbox.list_consumers(),
    "report_worker": lambda mailbox, _: mailbox.report_worker(JOB_ID, WORKER),
    "list_workers": lambda mailbox, _: mailbox.list_workers(),
    "peek_messages": lambda mailbox, _: mailbox.peek_messages("orders"),
    "preview_redrive": lambda mailbox, _: mailbox.preview_redrive(RedriveSpec()),
    "start_redrive": lambda mailbox, _: mailbox.start_redrive(RedriveSpec(), job_id=JOB_ID),
    "list_redrives": lambda mailbox, _: mailbox.list_redrives(),
    "get_redrive": lambda mailbox, _: mailbox.get_redrive(JOB_ID),
    "list_redrive_messages": lambda mailbox, _: mailbox.list_redrive_messages(JOB_ID),
    "change_redrive": lambda mailbox, _: mailbox.change_redrive(JOB_ID, "cancel"),
    "cancel_messages": lambda mailbox, _: mailbox.cancel_messages(["unknown"]),
    "reschedule_messages": lambda mailbox, _: mailbox.reschedule_messages(["unknown"], at=BEFORE),
    "set_subscription": lambda mailbox, _: mailbox.set_subscription("mail", FILTER, start=BEFORE),
    "list_subscriptions": lambda mailbox, _: mailbox.list_subscriptions(),
    "rewind_subscription": lambda mailbox, _: mailbox.rewind_subscription("mail", BEFORE, dry_run=True),
    "delete_subscription": lambda mailbox, _: mailbox.delete_subscription("mail", dry_run=True),
    "set_schedule": lambda mailbox, _: mailbox.set_schedule("nightly", NIGHTLY),
    "list_schedules": lambda mailbox, _: mailbox.list_schedules(),
    "pause_schedule": lambda mailbox, _: mailbox.pause_schedule("nightly"),
    "resume_schedule": lambda mailbox, _: mailbox.resume_schedule("nightly"),
    "run_schedule": lambda mailbox, _: mailbox.run_schedule("nightly"),
    "delete_schedule": lambda mailbox, _: mailbox.delete_schedule("nightly"),
    "save_search": lambda mailbox, _: mailbox.save_search("mine", "topics=orders"),
    "list_searches": lambda mailbox, _: mailbox.list_searches(),
    "delete_search": lambda mailbox, _: mailbox.delete_search(search_id("mine", "topics=orders")),
    "get_settings": lambda mailbox, _: mailbox.get_settings(),
    "preview_settings": lambda mailbox, _: mailbox.preview_settings(SettingsChanges()),
    "delete_old_events": lambda mailbox, _: mailbox.delete_old_events(1),
}
"""Of every transport."""
LOCAL_QUERIES: dict[str, Callable[[Any, str], Any]] = {
    "search_unsettled": lambda mailbox, id_: mailbox.search_unsettled(EventFilter()),
    "measure": lambda mailbox, _: mailbox.measure(),
    "erase_messages": lambda mailbox, _: mailbox.erase_messages("p" * 32),
    "get_mode": lambda mailbox, _: mailbox.check_mode("queue"),
}
"""Of processes of the owner's user alone."""


REFUSALS = {"change_redrive": "so it can't cancel", "erase_messages": "has no settings of erasure"}
"""Queries that this mailbox refuses, with the beginning of the reason."""


@pytest.mark.parametrize("transport", ["owner", "socket", "sync", "http", "grpc"])
async def test_every_query_is_answered_over_every_transport(tmp_path: Path, transport: str) -> None:
    queries = QUERIES if transport in ("sync", "http", "grpc") else QUERIES | LOCAL_QUERIES
    async with transported(transport, str(tmp_path / "store.db")) as mailbox:

        async def ask(query: Callable[[], Any]) -> Any:
            answer = await asyncio.to_thread(query) if transport == "sync" else query()
            return await answer if inspect.isawaitable(answer) else answer

        sent = await ask(lambda: mailbox.send_message(NewMessage(topic="orders", payload=b"x")))
        for name, query in queries.items():
            if name in REFUSALS:
                with pytest.raises(InvalidRequest, match=REFUSALS[name]):
                    await ask(partial(query, mailbox, sent.message_id))
                continue
            answer = await ask(partial(query, mailbox, sent.message_id))
            match name:
                case "get_backlog":
                    assert answer.ready == 1
                case "peek_messages" | "list_topics" | "list_redrives":
                    assert len(answer) == 1
                case "set_subscription":
                    assert (answer.topics, answer.headers) == (("orders",), {"region": "eu"})
                case "list_subscriptions":
                    assert [(each.name, each.dead) for each in answer] == [("mail", 0)]
                case "rewind_subscription":
                    assert (answer.name, answer.position, answer.copied) == ("mail", 0, 0)
                case "delete_subscription":
                    assert (answer.name, answer.left) == ("mail", 0)
                case "set_schedule":
                    assert (answer.cron, answer.timezone, answer.headers) == (
                        "0 3 * * *",
                        "Europe/Madrid",
                        {"a": "b"},
                    )
                    assert (answer.payload_bytes, answer.priority, answer.every_ms) == (1, 0, None)
                case "list_schedules":
                    assert [(each.name, each.runs, each.last_run) for each in answer] == [
                        ("nightly", 0, None)
                    ]
                case "pause_schedule" | "resume_schedule":
                    assert (answer.paused, answer.next_run is None) == (name == "pause_schedule",) * 2
                case "run_schedule":
                    assert not answer.duplicate
                    detail = await ask(partial(mailbox.get_message, answer.message_id))
                    assert detail.topic == "reports"
                    await ask(partial(mailbox.cancel_messages, [answer.message_id]))
                case "save_search":
                    assert (answer.name, answer.query, answer.topics) == ("mine", "topics=orders", ["orders"])
                case "list_searches":
                    assert [each.name for each in answer] == ["mine"]
                case "delete_schedule" | "delete_search":
                    assert answer is None
                case "describe_topic":
                    assert (answer.summary.ready, answer.periods[0].sent) == (1, 1)
                case "list_consumers":
                    assert answer == []
                case "list_workers":
                    assert [(each.id, each.version, *each.handlers) for each in answer] == [
                        (JOB_ID, "1.2", *WORKER.handlers)
                    ]
                case "search_unsettled":
                    assert [each.message_id for each in answer.items] == [sent.message_id]


def test_the_test_of_transports_has_every_query_of_the_local_protocol() -> None:
    assert set(protocol.QUERIES) == set(QUERIES | LOCAL_QUERIES)


@pytest.mark.parametrize(
    "command",
    [
        changed(SEND, topic="no spaces"),
        changed(SEND, message=b"short"),
        changed(SEND, payload_hash=b""),
        changed(SEND, size=-1),
        changed(SEND, ttl_ms=-1),
        changed(SEND, deliver_after_ms=1 << 62),
        changed(SEND, idem_key=""),
        changed(SEND, sticky_key="k" * 256),
        changed(SEND, headers=Headers(1 << 63)),
        changed(SEND, existing_hash=b"h" * 32),
        changed(SEND, priority=11),
        Ack(changed(RECEIPT, message=b"short")),
        Nack(RECEIPT, float("nan")),
        Nack(RECEIPT, 2.0),
        Extend(RECEIPT, 1),
        Redrive("orders", 1 << 62),
        Purge("orders", limit=0),
        SetPolicy("orders", TopicPolicy(shards=0)),
    ],
    ids=range(18),
)
async def test_a_command_out_of_bounds_is_refused_and_leaves_the_state_as_it_is(
    owned: OwnedMailbox, tmp_path: Path, command: Any
) -> None:
    state, position = owned.engine.state, owned.engine.mailbox.position
    async with peer(tmp_path / "store.db") as one:
        id_, error, _ = await one.ask(frame([7, type(command).__name__, [command]]))
        assert (id_, error["code"]) == (7, "E_SCHEMA"), error
        assert await one.ask(frame([8, "ping", None])) == [8, None, None]
    assert owned.engine.state is state
    assert owned.engine.mailbox.position == position


async def test_what_only_an_owner_fills_in_is_dropped(owned: OwnedMailbox, tmp_path: Path) -> None:
    await owned.send_message(NewMessage(topic="orders", payload=b"1"))
    (waiting,) = owned.engine.mailbox.messages
    forged = changed(RECEIPT, message=b"n" * 16)
    stored = Message(b"n" * 16, 1, IN_FLIGHT, "orders", 0, 1, 1, 1, 1, 1, 1, 1, 1)
    async with peer(tmp_path / "store.db") as one:
        _, error, answers = await one.ask(frame([1, "Ack", [Ack(forged, stored)]]))
        assert (error, answers[0]["code"]) == (None, "E_NOT_FOUND")
        corrupt = Receive(("orders",), 1, 1, corrupt=frozenset([waiting]))
        _, error, deliveries = await one.ask(frame([2, "receive", [corrupt, 0]]))
        assert (error, len(deliveries)) == (None, 1)


@pytest.mark.parametrize("is_settled", [False, True])
async def test_an_id_that_a_client_uses_twice_is_a_conflict_and_no_other_send_fails(
    owned: OwnedMailbox, tmp_path: Path, is_settled: bool
) -> None:
    async with peer(tmp_path / "store.db") as one:
        assert await one.ask(frame([1, "Send", [SEND]])) == [1, None, [[SEND.message, False]]]
        if is_settled:
            await owned.purge_topic("orders", ready=True)
        again = [SEND, changed(SEND, payload_hash=b"i" * 32)]
        (_, error, (same, other)), *sent = await asyncio.gather(
            one.ask(frame([2, "Send", again])),
            *(owned.send_message(NewMessage(topic="orders", payload=b"")) for _ in range(5)),
        )
    assert error is None
    assert same == [SEND.message, True]
    assert other["code"] == "E_DUPLICATE"
    assert len({each.message_id for each in sent if not each.duplicate}) == 5
    assert (await owned.get_backlog("orders")).shards[0].ready == (5 if is_settled else 6)


async def test_two_requests_with_one_id_end_the_connection(owned: OwnedMailbox, tmp_path: Path) -> None:
    receive = frame([1, "receive", [Receive(("orders",), 1, 1), 60_000]])
    async with peer(tmp_path / "store.db") as one:
        assert (await one.ask(receive + receive))[0] == 0
        assert await one.read() is None


async def test_a_request_that_is_cancelled_at_once_is_not_started(
    owned: OwnedMailbox, tmp_path: Path
) -> None:
    async with peer(tmp_path / "store.db") as one:
        cancelled = frame([1, "Send", [SEND]]) + frame([0, "cancel", 1])
        assert await one.ask(cancelled + frame([2, "ping", None])) == [2, None, None]
    assert list(owned.engine.mailbox.messages) == []


async def test_a_receive_of_a_client_that_leaves_takes_no_message(
    owned: OwnedMailbox, tmp_path: Path
) -> None:
    async with connect(str(tmp_path / "store.db")) as client:
        waiting = asyncio.create_task(client.receive_messages("orders", wait_ms=60_000))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.wait([waiting])
        await client.get_backlog()  # answered after the cancellation was read
        async with peer(tmp_path / "store.db") as one:
            one._writer.write(frame([1, "receive", [Receive(("orders",), 1, 1), 60_000]]))
            await one.ask(frame([2, "ping", None]))
        await client.get_backlog()
        await client.send_message(NewMessage(topic="orders", payload=b"1"))
        (received,) = await client.receive_messages("orders")
        assert received.attempt == 1


async def test_large_messages_and_batches_pass_through(owned: OwnedMailbox, tmp_path: Path) -> None:
    payloads = [bytes([number]) * 900_000 for number in range(12)]
    async with connect(str(tmp_path / "store.db")) as client:
        await client.send_batch([NewMessage(topic="orders", payload=payload) for payload in payloads])
        received = []
        while messages := await client.receive_messages("orders", max_messages=12, max_bytes=1 << 40):
            received += [message.payload for message in messages]
        assert received == payloads
        await client.set_topic_policy("small", TopicPolicy(shard_capacity=20_000))
        answers = await client.send_batch([NewMessage(topic="small", payload=b"x")] * 12_000)
        assert len({answer.message_id for answer in answers if not isinstance(answer, Exception)}) == 12_000


AS_NOBODY = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
one = socket.socket(socket.AF_UNIX)
one.connect(sys.argv[1])
print(one.recv(100))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
async def test_another_user_is_not_answered_even_where_the_permissions_allow_it(owned: OwnedMailbox) -> None:
    path = socket_of(Path(owned.engine.log.path))  # type: ignore[attr-defined]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o666)
    for folder in path.parents[:-2]:
        folder.chmod(folder.stat().st_mode | 0o055)  # of /dev/shm nothing is taken away
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", AS_NOBODY, str(path), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    answer, error = await process.communicate()
    assert b"Hello" not in answer
    assert answer == b"b''\n" or b"ConnectionReset" in error


async def test_the_socket_of_a_dead_owner_is_replaced_and_ones_own_removed(tmp_path: Path) -> None:
    path = socket_of(tmp_path / "store.db")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with connect(str(tmp_path / "store.db")), connect(str(tmp_path / "store.db")) as client:
        await client.send_message(NewMessage(topic="orders", payload=b""))
    assert not path.exists()


async def test_a_socket_that_was_deleted_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postroom.adapters.local.server.WATCH_SECONDS", 0.05)
    store = tmp_path / "store.db"
    async with connect(str(store)) as owner, connect(str(store)) as earlier:
        socket_of(store).unlink()
        async with connect(str(store), timeout_ms=20_000) as later:
            await later.send_message(NewMessage(topic="orders", payload=b""))
        await earlier.send_message(NewMessage(topic="orders", payload=b""))
        assert (await owner.get_backlog()).ready == 2
        assert stat.S_IMODE(socket_of(store).stat().st_mode) == 0o600
    assert not socket_of(store).exists()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder for sockets in a runtime directory with a short path."""
    with TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder, "postroom")


async def test_a_store_whose_path_is_too_long_for_a_socket_is_shared_at_one_beside_it(
    tmp_path: Path, runtime: Path
) -> None:
    folder = tmp_path / ("f" * 200)
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    async with connect(str(folder / "store.db")), connect(str(tmp_path / "link" / "store.db")) as client:
        await client.send_message(NewMessage(topic="orders", payload=b""))
        assert stat.S_ISSOCK((folder / f"store.db-socket-{MAILBOX}").stat().st_mode)
    assert not (folder / f"store.db-socket-{MAILBOX}").exists()
    assert not os.listdir(runtime.parent)


async def test_a_store_whose_name_is_too_long_for_a_socket_is_shared(
    tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, name = tmp_path, "s" * 120
    (tmp_path / "link").symlink_to(folder)
    async with connect(str(folder / name)), connect(str(tmp_path / "link" / name)) as client:
        await client.send_message(NewMessage(topic="orders", payload=b""))
        assert len(os.listdir(runtime)) == 1
    assert stat.S_IMODE(os.stat(runtime).st_mode) == 0o700
    os.chmod(runtime, 0o777)
    with pytest.raises(Unavailable, match="must be a folder of user"):
        async with connect(str(folder / name)):
            pytest.fail("connected")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    with pytest.raises(Unavailable, match="too long for a socket"):
        async with connect(str(folder / name)):
            pytest.fail("connected")
