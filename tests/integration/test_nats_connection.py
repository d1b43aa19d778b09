"""Connections to a NATS server that is away, silent, or says what it should not."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client
from nats.errors import Error

from postroom.adapters.nats.connection import connect
from postroom.adapters.nats.publisher import JetStreamPublisher
from postroom.adapters.nats.pull_consumer import PullConsumer
from postroom.adapters.nats.settings import NatsSettings
from postroom.adapters.nats.source import JetStreamSource
from postroom.application.ports.outbox import PublishAck
from postroom.application.ports.source import SourceMessage
from postroom.domain.errors import InvalidRequest, Unavailable
from tests.support.logs import capture_logs
from tests.support.servers.nats import NatsServer
from tests.support.servers.process import LOOPBACK, free_port
from tests.support.waiting import until, wait_until

SOON_SECONDS = 120.0
"""Far more than a reconnect or a close takes, far less than nats-py's own 6 minutes."""

USER = {"user": "user", "password": "secret"}
RELOADED = "Reloaded server configuration"
WITHOUT_INBOX = {"users": [USER | {"permissions": {"subscribe": {"deny": "_INBOX.>"}}}]}
"""The server drops the subscriptions that it denies, and keeps the connection."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path / "nats") as server:
        yield server


async def test_a_server_that_nobody_runs_is_unavailable_soon_and_by_name() -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    with pytest.raises(
        Unavailable, match=rf"NATS at {url} can't be reached: .*Connect call failed.*\[nats\] url"
    ):
        async with connect(NatsSettings(url), "test"):
            pytest.fail("connected to nobody")


async def test_an_unreachable_server_is_named_without_its_password() -> None:
    settings = NatsSettings("nats://user:canary-token@127.0.0.1:1,nats://canary-token@127.0.0.1:2")
    with pytest.raises(Unavailable, match=r"NATS at nats://127.0.0.1:1,nats://127.0.0.1:2 can't") as refused:
        async with connect(settings, "test"):
            pass
    assert "canary-token" not in str(refused.value)


def test_a_url_of_another_scheme_is_refused_at_once() -> None:
    with pytest.raises(InvalidRequest, match="begins with http://; write nats://host:4222"):
        NatsSettings("nats://127.0.0.1:4222,http://127.0.0.1:8222")
    assert NatsSettings("127.0.0.1:4222,tls://nats:4222").shown_url == "127.0.0.1:4222,tls://nats:4222"


async def test_a_server_that_accepts_connections_and_says_nothing_is_unavailable(server: NatsServer) -> None:
    server.pause()
    async with asyncio.timeout(SOON_SECONDS):
        with pytest.raises(Unavailable, match="can't be reached"):
            async with connect(NatsSettings(server.url), "test"):
                pytest.fail("connected to a server that says nothing")


async def test_a_flush_that_timed_out_leaves_the_connection_as_it_was(server: NatsServer) -> None:
    async with connect(NatsSettings(server.url), "test") as client:
        server.pause()
        with pytest.raises(Error):
            await client.flush(1)
        server.resume()
        await client.flush(10)
        assert client.stats["reconnects"] == 0


async def test_a_flush_without_a_connection_says_so(server: NatsServer) -> None:
    async with connect(NatsSettings(server.url), "test") as client:
        server.kill()
        await until(lambda: not client.is_connected, SOON_SECONDS)
        with pytest.raises(Error):
            await client.flush(1)


async def test_an_outage_is_logged_at_its_beginning_and_at_its_end(server: NatsServer) -> None:
    with capture_logs() as events:
        async with connect(NatsSettings(server.url), "test") as client:
            for _ in range(2):
                events.clear()
                server.kill()
                await until(lambda: client.server_pool[0].reconnects >= 5, SOON_SECONDS)
                server.start()
                await until(lambda: _named(events, "nats.reconnected"), SOON_SECONDS)
                (error,) = _named(events, "nats.error")
                (recovery,) = _named(events, "nats.reconnected")
                assert error["count"] == 1
                assert recovery["errors"] >= 5


async def test_the_errors_of_a_long_outage_are_counted(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postroom.adapters.nats.connection.ERROR_LOG_SECONDS", 1.0)
    with capture_logs() as events:
        async with connect(NatsSettings(server.url), "test") as client:
            server.kill()
            await until(lambda: len(_named(events, "nats.error")) >= 3, SOON_SECONDS)
            attempts = client.server_pool[0].reconnects
    counts = [each["count"] for each in _named(events, "nats.error")]
    assert counts[0] == 1
    assert sum(counts) >= attempts


async def test_a_server_that_stays_silent_is_noticed(server: NatsServer) -> None:
    async with connect(NatsSettings(server.url), "test") as client:
        server.pause()
        await until(lambda: not client.is_connected, SOON_SECONDS)
        server.resume()
        await until(lambda: client.is_connected, SOON_SECONDS)
        await client.flush(10)


@pytest.mark.parametrize(
    "garbage",
    [b"HMSG subject 1 x y\r\n", b"INFO {\r\n", b"-ERR 'Slow Consumer'\r\n", b"nonsense\r\n"],
    ids=["header-sizes", "info", "error", "operation"],
)
async def test_a_connection_is_replaced_after_anything_that_ends_its_read_loop(garbage: bytes) -> None:
    async with (
        _scripted_server([garbage]) as (url, connections),
        connect(NatsSettings(url), "test") as client,
    ):
        await until(lambda: connections() >= 2 and client.is_connected, SOON_SECONDS)
        await client.flush(10)


async def test_a_login_that_is_refused_for_a_while_is_tried_again(server: NatsServer, tmp_path: Path) -> None:
    async with connect(NatsSettings(server.url), "test") as client:
        with _configured(server, tmp_path, authorization={"token": "another"}):
            await until(lambda: not client.is_connected, SOON_SECONDS)
        await until(lambda: client.is_connected, SOON_SECONDS)
        await client.flush(10)


async def test_a_source_whose_subscription_the_server_dropped_reads_on(
    server: NatsServer, tmp_path: Path
) -> None:
    with _configured(server, tmp_path, authorization={"users": [USER]}):
        settings = _settings_of_user(server)
        async with connect(settings, "test") as client:
            stream = client.jetstream()
            await stream.add_stream(name="EVENTS", subjects=["acme.>"])
            source = await JetStreamSource.open(
                settings, PullConsumer(durable="reader", stream="EVENTS", create=True, ack_wait_ms=2_000)
            )
            with _configured(server, tmp_path, authorization=WITHOUT_INBOX), suppress(Unavailable):
                assert list(await source.fetch(1, 500)) == []
            await client.publish("acme.orders", b"1")
            async with asyncio.timeout(SOON_SECONDS):
                messages: list[SourceMessage] = []
                while not messages:
                    with suppress(Unavailable):
                        messages = list(await source.fetch(1, 500))
            assert messages[0].data == b"1"
            await source.close()


async def test_a_publisher_whose_reply_subscription_the_server_dropped_publishes_on(
    server: NatsServer, tmp_path: Path
) -> None:
    with _configured(server, tmp_path, authorization={"users": [USER]}):
        async with connect(_settings_of_user(server), "test") as client:
            await client.jetstream().add_stream(name="EVENTS", subjects=["acme.>"])
            publisher = JetStreamPublisher(client, timeout_ms=500)

            async def publish_until(is_stored: bool) -> PublishAck | None:
                async with asyncio.timeout(SOON_SECONDS):
                    while True:
                        published = None
                        with suppress(Unavailable):
                            published = await publisher.publish("acme.orders", b"1", {"Nats-Msg-Id": "1"})
                        if (published is not None) == is_stored:
                            return published
                        await asyncio.sleep(0.01)

            await publish_until(is_stored=True)
            with _configured(server, tmp_path, authorization=WITHOUT_INBOX):
                await publish_until(is_stored=False)
            published = await publish_until(is_stored=True)
            assert published is not None
            assert (published.sequence, published.duplicate) == (1, True)


@pytest.mark.parametrize("state", ["connected", "stalled", "reconnecting", "connecting"])
async def test_a_client_closes_within_seconds_whatever_its_state(server: NatsServer, state: str) -> None:
    before = asyncio.all_tasks()
    async with connect(NatsSettings(server.url), "test") as client:
        publishing = asyncio.create_task(_publish_much(client) if state == "stalled" else asyncio.sleep(0))
        if state == "stalled":
            server.pause()
            await asyncio.sleep(1)  # until the buffers are full
            assert not publishing.done()
        if state == "reconnecting":
            server.kill()
            await until(lambda: client.is_reconnecting, SOON_SECONDS)
        if state == "connecting":
            server.pause()
            await client.force_reconnect()
            await asyncio.sleep(0.5)
        closing = asyncio.create_task(client.close())
        done, _ = await asyncio.wait([closing], timeout=SOON_SECONDS)
        assert done
        assert client.is_closed
        with suppress(Error):
            await asyncio.wait_for(publishing, SOON_SECONDS)
        assert asyncio.all_tasks() - before == set()


async def test_a_published_message_is_sent_before_the_client_closes(server: NatsServer) -> None:
    async with connect(NatsSettings(server.url), "test") as client:
        stream = client.jetstream()
        await stream.add_stream(name="EVENTS", subjects=["acme.>"])
        async with connect(NatsSettings(server.url), "another") as another:
            for n in range(100):
                await another.publish("acme.orders", b"%d" % n)
        async with asyncio.timeout(SOON_SECONDS):  # the stream stores them after the server has read them
            while (await stream.stream_info("EVENTS")).state.messages < 100:
                await asyncio.sleep(0.02)


async def test_flushes_that_overlap_share_a_ping_that_follows_what_was_sent() -> None:
    received: list[bytes] = []
    async with _scripted_server([], received) as (url, _), connect(NatsSettings(url), "test") as client:
        received.clear()

        async def publish(subject: str) -> None:
            await client._send_command(b"PUB %b 0\r\n\r\n" % subject.encode())  # nothing flushes it yet
            await client.flush()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(publish("acme.a"))
            tasks.create_task(publish("acme.b"))
        assert [line for line in received if line.strip()] == [
            b"PUB acme.a 0\r\n",
            b"PUB acme.b 0\r\n",
            b"PING\r\n",
        ]
        await client.flush()
        assert received.count(b"PING\r\n") == 2


def _named(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [each for each in events if each["event"] == name]


def _settings_of_user(server: NatsServer) -> NatsSettings:
    return NatsSettings(server.url.replace("://", "://user:secret@"))


async def _publish_much(client: Client) -> None:
    for _ in range(64):  # MB, more than the socket takes
        await client.publish("acme.orders", b"x" * 1_000_000)


@contextmanager
def _configured(server: NatsServer, tmp_path: Path, **settings: Any) -> Iterator[None]:
    """Have the server reload its configuration with other settings for the length of the context."""
    file, log = tmp_path / "nats" / "nats.conf", tmp_path / "nats" / "nats.log"
    before = file.read_text()

    def load(config: str) -> None:
        reloads = log.read_text().count(RELOADED)
        file.write_text(config)
        os.kill(server.pid, signal.SIGHUP)
        wait_until(lambda: log.read_text().count(RELOADED) > reloads)

    load(json.dumps(json.loads(before) | settings))
    yield
    load(before)


@asynccontextmanager
async def _scripted_server(
    lines: list[bytes], received: list[bytes] | None = None
) -> AsyncIterator[tuple[str, Callable[[], int]]]:
    """Speak NATS' protocol, and say one of `lines` on each connection as soon as it is made.

    What is read is added to `received`. A real server never sends what these tests need.
    """
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.write(b'INFO {"server_id": "test", "version": "2.11.0", "max_payload": 1048576}\r\n')
        with suppress(ConnectionError):
            while line := await reader.readline():
                if received is not None:
                    received.append(line)
                if line == b"PING\r\n":
                    writer.write(b"PONG\r\n")
                    await writer.drain()
                    if lines:
                        await asyncio.sleep(0.05)  # the client reads the first PONG by itself
                        writer.write(lines.pop())
        writer.close()

    server = await asyncio.start_server(serve, LOOPBACK, 0)
    async with server:
        yield f"nats://{LOOPBACK}:{server.sockets[0].getsockname()[1]}", lambda: connections
