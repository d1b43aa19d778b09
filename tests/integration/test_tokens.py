"""A client's token is sent with each call, and is in no log, error or repr."""

import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from aiohttp import web

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.connect import connect, connect_remote
from postroom.adapters.compose.serve import (
    HttpSettings,
    open_grpc_surface,
    open_http_surface,
    serve_mailbox,
    unrestricted,
)
from postroom.domain.errors import InvalidRequest, PostroomError
from tests.support.stores import MAILBOX, message

CANARY = "canary-5f1c2d"
BEARER = f"Bearer {CANARY}"


@asynccontextmanager
async def http_recorder(seen: list[str]) -> AsyncIterator[str]:
    """Serve HTTP that notes the tokens of requests, and answers with what aiohttp can't read."""

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers.get("Authorization", ""))
        assert request.transport is not None
        request.transport.write(b"no HTTP\r\n\r\n")
        request.transport.close()
        return web.Response()

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def grpc_recorder(seen: list[str]) -> AsyncIterator[str]:
    """Serve gRPC that notes the tokens of calls, and implements none of them."""

    class Notes(grpc.aio.ServerInterceptor):
        async def intercept_service(
            self, continuation: Callable[..., Awaitable[Any]], details: grpc.HandlerCallDetails
        ) -> Any:
            metadata = dict(details.invocation_metadata or ())
            seen.append(str(metadata.get("authorization", "")))
            return await continuation(details)

    server = grpc.aio.server(interceptors=[Notes()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.mark.parametrize("recorder", [http_recorder, grpc_recorder], ids=["http", "grpc"])
async def test_a_token_is_sent_with_each_call_and_shown_nowhere(
    recorder: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    seen: list[str] = []
    async with recorder(seen) as url:
        connection = connect(url, timeout_ms=300, token=CANARY)
        with pytest.raises(PostroomError) as refused:
            async with connection:
                pass
    assert seen
    assert set(seen) == {BEARER}
    shown = [repr(connection), *traceback.format_exception(refused.value), caplog.text]
    assert CANARY not in "".join(shown)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_a_server_that_asks_for_no_tokens_ignores_them(
    protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="postroom")
    surface = (
        open_http_surface("127.0.0.1:0", HttpSettings())
        if protocol == "http"
        else open_grpc_surface("127.0.0.1:0")
    )
    async with (
        open_mailbox("memory:", MAILBOX) as owned,
        serve_mailbox("memory:", owned, [surface], access=unrestricted) as (url,),
        connect(url, timeout_ms=20_000, token=CANARY) as mailbox,
        mailbox.stream_messages("orders") as stream,
    ):
        await mailbox.send_message(message())
        await (await anext(stream)).ack()
        with pytest.raises(InvalidRequest) as refused:
            await mailbox.receive_messages("no spaces")
        shown = [repr(mailbox), repr(stream), *traceback.format_exception(refused.value), caplog.text]
    assert CANARY not in "".join(shown)


@pytest.mark.parametrize("token", ["", "with space", "line\nbreak", "ümlaut", "x" * 5_000, 5, b"bytes"])
async def test_a_malformed_token_is_refused_without_being_shown(token: Any) -> None:
    with pytest.raises(InvalidRequest, match="token must be text") as refused:
        async with connect_remote("http://127.0.0.1:1", timeout_ms=100, token=token):
            pass
    assert str(token) == "" or str(token) not in str(refused.value)


async def test_a_store_takes_no_token() -> None:
    with pytest.raises(InvalidRequest, match="takes no token"):
        async with connect("memory:", token=CANARY):
            pass
