"""Streams over a network or the local socket, beside servers and clients that go or fall silent."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.compose.connect import connect_remote, share_mailbox
from postroom.domain.errors import InvalidRequest, PostroomError, Unavailable
from tests.support.stores import MAILBOX, message
from tests.support.surfaces import served
from tests.support.waiting import SECONDS, until

LONG_MS = 600_000


@pytest.fixture
async def mailbox() -> AsyncIterator[OwnedMailbox]:
    async with open_mailbox("memory:", MAILBOX) as opened:
        yield opened


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_a_stream_goes_on_at_a_server_that_restarts(mailbox: OwnedMailbox, protocol: str) -> None:
    async with AsyncExitStack() as running, asyncio.timeout(SECONDS):
        url = await running.enter_async_context(served(mailbox, protocol))
        async with (
            connect_remote(url, timeout_ms=20_000) as client,
            client.stream_messages("orders", visibility_ms=LONG_MS, heartbeat_ms=250) as stream,
        ):
            await mailbox.send_message(message(b"1"))
            first = await anext(stream)
            await running.aclose()
            async with served(mailbox, protocol, url.rpartition("/")[2]):
                await first.ack()  # its receipt has stayed valid
                await mailbox.send_message(message(b"2"))
                assert (await anext(stream)).payload == b"2"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_a_stream_whose_server_stays_away_ends_with_an_error(
    mailbox: OwnedMailbox, protocol: str
) -> None:
    async with AsyncExitStack() as running, asyncio.timeout(SECONDS):
        url = await running.enter_async_context(served(mailbox, protocol))
        async with (
            connect_remote(url, timeout_ms=300) as client,
            client.stream_messages("orders", heartbeat_ms=250) as stream,
        ):
            waiting = asyncio.create_task(anext(stream))
            await asyncio.sleep(0.1)
            await running.aclose()
            for _ in range(2):
                with pytest.raises(Unavailable) as ended:
                    await waiting
                assert ended.value.retry_after_ms > 0
                waiting = asyncio.create_task(anext(stream))
            waiting.cancel()


@asynccontextmanager
async def http_server(stream: Any) -> AsyncIterator[str]:
    """Serve the name of a mailbox, and a stream of the test's own."""

    async def info(_: web.Request) -> web.Response:
        return web.json_response({"mailbox": MAILBOX})

    app = web.Application()
    app.router.add_get("/v1/mailbox", info)
    app.router.add_post("/v1/recv/stream", stream)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_stream_that_is_silent_is_opened_again() -> None:
    opened = 0

    async def silent(request: web.Request) -> web.StreamResponse:
        nonlocal opened
        opened += 1
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.sleep(SECONDS)
        return response

    async with (
        http_server(silent) as url,
        connect_remote(url, timeout_ms=20_000) as client,
        client.stream_messages("orders", heartbeat_ms=250),
    ):
        await until(lambda: opened > 1)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"<html>\n", InvalidRequest),
        (b'{"receipt": "r.AAAA"}\n', InvalidRequest),
        (b'{"heartbeat": null}\n', InvalidRequest),
        (b"\xff\n", InvalidRequest),
        (b"[" * 200_000 + b"\n", InvalidRequest),
        (b'{"error": {"code": "E_CAP_AUTH", "message": "Who are you?"}}\n', PostroomError),
    ],
)
async def test_a_line_that_is_no_delivery_ends_the_stream_with_an_error(
    line: bytes, error: type[PostroomError]
) -> None:
    async def nonsense(_: web.Request) -> web.Response:
        return web.Response(body=b'{"heartbeat": "2026-11-22T12:00:05.000000Z"}\n' + line)

    async with (
        http_server(nonsense) as url,
        connect_remote(url, timeout_ms=20_000) as client,
        client.stream_messages("orders") as stream,
        asyncio.timeout(SECONDS),
    ):
        with pytest.raises(error):
            await anext(stream)


async def test_the_owner_returns_what_a_process_that_ends_has_not_settled(tmp_path: Path) -> None:
    store = str(tmp_path / "store.db")
    async with open_mailbox(store, MAILBOX) as owner, asyncio.timeout(SECONDS):
        await owner.send_batch([message(payload) for payload in (b"1", b"2", b"3")])
        async with share_mailbox(store, MAILBOX) as shared:
            opening = shared.stream_messages("orders", visibility_ms=LONG_MS)
            stream = await opening.__aenter__()
            received = [await anext(stream) for _ in range(3)]
            await received[0].ack()
        # Its connection is closed, as by a process that was killed, and the stream was not.
        again: list[Any] = []
        while len(again) < 2:
            again += await owner.receive_messages("orders", wait_ms=10_000)
        assert [each.attempt for each in again] == [2, 2]
        await opening.__aexit__(None, None, None)
