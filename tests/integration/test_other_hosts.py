"""Processes of several hosts that share a mailbox of a database, without a server in between (ADR 0064).

A "host" is a runtime folder of its own: its processes find no socket of the others.
"""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from postroom import InvalidRequest, Mailbox, NewMessage, OwnedMailbox, Unavailable, connect, open_mailbox
from postroom.adapters.compose.doctor import store_checks
from postroom.adapters.local import server
from postroom.adapters.local.endpoints import NAME, issue_certificate, trust_certificate
from postroom.adapters.local.protocol import frame, read_hello
from postroom.adapters.postgres.database import connect as connect_database
from postroom.adapters.postgres.ownership import PostgresOwnership
from postroom.application.ports.lease_store import OwnerAddress
from tests.support.servers.process import free_port, listens
from tests.support.waiting import SECONDS

MAILBOX = "main@local"
ORDER = NewMessage(topic="orders", payload=b"1")


@pytest.fixture
def hosts() -> Iterator[Callable[[str], Any]]:
    """Return what makes this process one of a host while a context lasts."""
    with TemporaryDirectory(prefix="postroom-") as folder:

        @contextmanager
        def on(name: str) -> Iterator[None]:
            before = os.environ.get("XDG_RUNTIME_DIR")
            os.environ["XDG_RUNTIME_DIR"] = str(Path(folder, name))
            Path(folder, name).mkdir(mode=0o700, exist_ok=True)
            try:
                yield
            finally:
                del os.environ["XDG_RUNTIME_DIR"]
                if before is not None:
                    os.environ["XDG_RUNTIME_DIR"] = before

        yield on


@asynccontextmanager
async def connected(host: Any, store: str, **options: Any) -> AsyncIterator[Mailbox]:
    connection = connect(store, MAILBOX, **options)
    with host:  # the path of the socket is chosen when the mailbox is opened
        mailbox = await connection.__aenter__()
    try:
        yield mailbox
    finally:
        await connection.__aexit__(None, None, None)


@asynccontextmanager
async def owned(host: Any, store: str, **options: Any) -> AsyncIterator[OwnedMailbox]:
    opening = open_mailbox(store, MAILBOX, **options)
    with host:
        mailbox = await opening.__aenter__()
    try:
        yield mailbox
    finally:
        await opening.__aexit__(None, None, None)


async def address_of(store: str) -> OwnerAddress:
    """Return the address of the owner once it is announced."""
    directory = PostgresOwnership(store).directory
    async with asyncio.timeout(SECONDS):
        while (address := await directory.find(MAILBOX)) is None:
            await asyncio.sleep(0.01)
    return address


def split(address: OwnerAddress) -> tuple[str, int]:
    host, _, port = address.address.rpartition(":")
    return host, int(port)


async def open_tls(address: OwnerAddress) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(
        *split(address), ssl=trust_certificate(address.certificate), server_hostname=NAME
    )


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(SECONDS):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


async def test_a_process_of_another_host_uses_the_mailbox_of_its_owner(
    postgres_store: str, hosts: Any
) -> None:
    async with owned(hosts("a"), postgres_store) as owner, connected(hosts("b"), postgres_store) as mailbox:
        sent = await mailbox.send_message(NewMessage(topic="orders", payload=b"x" * 500_000))
        (received,) = await owner.receive_messages("orders")
        assert received.message_id == sent.message_id
        await received.ack()
        assert (await mailbox.get_backlog()).owner == f"process {os.getpid()} on {socket.gethostname()}"
        assert (await mailbox.get_message(sent.message_id)).status == "acked"


async def test_the_address_is_that_of_the_interface_to_the_database(postgres_store: str, hosts: Any) -> None:
    async with owned(hosts("a"), postgres_store):
        assert split(await address_of(postgres_store))[0] == "127.0.0.1"
    assert await PostgresOwnership(postgres_store).directory.find(MAILBOX) is None


async def test_the_address_may_be_chosen_and_a_wildcard_is_told_as_the_interface(
    postgres_store: str, hosts: Any
) -> None:
    port = free_port()
    async with owned(hosts("a"), postgres_store, listen=f"0.0.0.0:{port}"):
        assert (await address_of(postgres_store)).address == f"127.0.0.1:{port}"
        async with connected(hosts("b"), postgres_store) as mailbox:
            await mailbox.send_message(ORDER)


async def test_an_owner_that_answers_its_host_only_is_named_to_others(
    postgres_store: str, hosts: Any
) -> None:
    async with owned(hosts("a"), postgres_store, listen="off", owner="the other host"):
        with pytest.raises(Unavailable, match="the other host"):
            async with connected(hosts("b"), postgres_store, timeout_ms=3_000):
                pytest.fail("connected")


@pytest.mark.parametrize("listen", ["", "7070", "host", "host:port", "a:1:2", "unix:/tmp/s", 7070])
async def test_an_address_that_is_none_is_refused(postgres_store: str, listen: Any) -> None:
    with pytest.raises(InvalidRequest, match="listen"):
        async with open_mailbox(postgres_store, listen=listen):
            pytest.fail("opened")


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", frame([1, "ping", None]), b"", bytes(5_000)],
    ids=["http", "frame", "nothing", "zeros"],
)
async def test_a_peer_without_tls_gets_nothing(
    postgres_store: str, hosts: Any, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS", 0.5)
    async with owned(hosts("a"), postgres_store) as owner:
        reader, writer = await asyncio.open_connection(*split(await address_of(postgres_store)))
        writer.write(data)
        answer = await read_to_end(reader)
        assert MAILBOX.encode() not in answer
        assert len(answer) <= 7  # an alert
        writer.close()
        await owner.send_message(ORDER)


@pytest.mark.parametrize("kind", ["random", "used", "of another mailbox", "old", "cut"])
async def test_a_peer_without_a_valid_ticket_gets_nothing(
    postgres_store: str, hosts: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = PostgresOwnership(postgres_store).directory
    async with owned(hosts("a"), postgres_store):
        address = await address_of(postgres_store)
        ticket = await directory.issue_ticket("other@local" if kind == "of another mailbox" else MAILBOX)
        if kind == "used":
            reader, writer = await open_tls(address)
            writer.write(ticket)
            size = int.from_bytes(await reader.readexactly(4), "big")
            assert read_hello(await reader.readexactly(size)).mailbox == MAILBOX
            writer.close()
        elif kind == "random":
            ticket = os.urandom(32)
        elif kind == "old":
            with closing(connect_database(postgres_store, "test")) as connection:
                connection.execute("UPDATE postroom.owner_ticket SET issued_at = now() - interval '61 s'")
        elif kind == "cut":
            monkeypatch.setattr(server, "HANDSHAKE_SECONDS", 0.3)
            ticket = ticket[:-1]
        reader, writer = await open_tls(address)
        request = b"" if kind == "cut" else frame([1, "ping", None])
        writer.write(ticket + request)
        assert await read_to_end(reader) == b""
        writer.close()


async def test_a_request_that_follows_its_ticket_at_once_is_answered(postgres_store: str, hosts: Any) -> None:
    async with owned(hosts("a"), postgres_store):
        address = await address_of(postgres_store)
        reader, writer = await open_tls(address)
        ticket = await PostgresOwnership(postgres_store).directory.issue_ticket(MAILBOX)
        for part in (ticket[:7], ticket[7:] + frame([7, "ping", None])):
            writer.write(part)
            await writer.drain()
        frames = [
            await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big")) for _ in range(2)
        ]
        assert read_hello(frames[0]).mailbox == MAILBOX
        assert frames[1] == b"\x93\x07\xc0\xc0"
        writer.close()


async def test_a_reader_of_the_database_who_may_not_write_can_not_call_the_owner(
    postgres_store: str, hosts: Any
) -> None:
    role = f"reader_{os.urandom(4).hex()}"
    with closing(connect_database(postgres_store, "test")) as connection:
        connection.execute(f"CREATE ROLE {role} LOGIN".encode())
        try:
            connection.execute(f"GRANT USAGE ON SCHEMA postroom TO {role}".encode())
            connection.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA postroom TO {role}".encode())
            url = postgres_store.replace("postgres@", f"{role}@")
            async with owned(hosts("a"), postgres_store):
                await address_of(postgres_store)
                with pytest.raises(Unavailable, match="denies a privilege"):
                    async with connected(hosts("b"), url, timeout_ms=3_000):
                        pytest.fail("connected")
        finally:
            connection.execute(f"DROP OWNED BY {role}".encode())
            connection.execute(f"DROP ROLE {role}".encode())


async def test_an_impostor_at_the_address_gets_neither_ticket_nor_request(
    postgres_store: str, hosts: Any
) -> None:
    received = bytearray()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.extend(await read_to_end(reader))

    context, _ = issue_certificate()
    server = await asyncio.start_server(listen, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    async with server, owned(hosts("a"), postgres_store):
        await address_of(postgres_store)
        with closing(connect_database(postgres_store, "test")) as connection:
            connection.execute("UPDATE postroom.mailbox_owner SET address = %s", (f"127.0.0.1:{port}",))
        with pytest.raises(Unavailable, match="is not the owner whose certificate is in the database"):
            async with connected(hosts("b"), postgres_store, timeout_ms=3_000):
                pytest.fail("connected")
    assert received == b""


async def test_silent_peers_keep_nobody_out(
    postgres_store: str, hosts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_HANDSHAKES", 5)
    monkeypatch.setattr(server, "MAX_STRANGERS", 5)
    async with owned(hosts("a"), postgres_store):
        address = await address_of(postgres_store)
        silent = [await asyncio.open_connection(*split(address)) for _ in range(20)]
        strangers = [await open_tls(address) for _ in range(12)]
        async with connected(hosts("b"), postgres_store) as mailbox:
            await mailbox.send_message(ORDER)
        for reader, _ in (*silent[:15], *strangers[:7]):
            assert await read_to_end(reader) == b""
        for _, writer in (*silent, *strangers):
            writer.transport.abort()


async def test_an_owner_that_ends_closes_the_connections_of_strangers(
    postgres_store: str, hosts: Any
) -> None:
    async with owned(hosts("a"), postgres_store):
        reader, writer = await open_tls(await address_of(postgres_store))
    assert await read_to_end(reader) == b""
    writer.transport.abort()


async def test_the_row_of_a_dead_owner_is_not_used(postgres_store: str, hosts: Any) -> None:
    with closing(connect_database(postgres_store, "test")) as connection:
        connection.execute(
            "INSERT INTO postroom.mailbox_owner (mailbox, session, address, certificate) "
            "VALUES (%s, 1, '192.0.2.1:7', 'none')",
            (MAILBOX,),
        )
    async with connected(hosts("b"), postgres_store) as mailbox:
        await mailbox.send_message(ORDER)
        assert (await address_of(postgres_store)).address.startswith("127.0.0.1:")


async def test_an_owner_whose_lock_has_a_new_session_tells_its_address_again(
    postgres_store: str, hosts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "ANNOUNCE_SECONDS", 0.02)
    monkeypatch.setattr("postroom.adapters.postgres.ownership.CHECK_SECONDS", 0.02)
    async with owned(hosts("a"), postgres_store, owner="first"):
        before = await address_of(postgres_store)
        with closing(connect_database(postgres_store, "test")) as connection:
            ended = (
                "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE application_name = %s"
            )
            connection.execute(ended.encode(), ("first",))
        assert await address_of(postgres_store) == before
        async with connected(hosts("b"), postgres_store) as mailbox:
            await mailbox.send_message(ORDER)


FORK = """
import asyncio, os, socket, sys
from postroom import connect, open_mailbox

store, port = sys.argv[1], int(sys.argv[2])

def listens():
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0

async def main():
    async with open_mailbox(store, listen=f"127.0.0.1:{port}"):
        while not listens():
            await asyncio.sleep(0.01)
        if os.fork() == 0:
            print("forked", flush=True)
            sys.stdin.read()
        os._exit(0)

asyncio.run(main())
"""


def test_a_process_that_an_owner_forked_keeps_no_port_open(postgres_store: str) -> None:
    port = free_port()
    command = [sys.executable, "-c", FORK, postgres_store, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "forked\n"
        owner.wait(SECONDS)
        assert not listens(port)  # although the child lives on, until its standard input ends


async def test_doctor_shows_where_owners_answer(postgres_store: str, hosts: Any) -> None:
    async with owned(hosts("a"), postgres_store, owner="process 7 on mars"):
        address = await address_of(postgres_store)
        checks = {each.name: each for each in store_checks(postgres_store, "full", 5)}
        (finding,) = await asyncio.to_thread(lambda: list(checks["owners"].run()))
        assert finding.status == "ok"
        assert finding.finding == f"{MAILBOX}: process 7 on mars, at {address.address}"
