import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web

from postroom.adapters.http.event_handler import HttpEventHandler
from postroom.adapters.http.signature import verify_signature
from postroom.adapters.memory.store import FunctionEventHandler
from postroom.application.ports.inbox import EventHandler, HandlerRequest
from postroom.domain.errors import DuplicateInboxMessage, Forbidden, PoisonMessage
from tests.conformance.event_handler import EventHandlerConformance, Service, request

KEY = "0123456789abcdef0123456789abcdef"
STATUS = {"ok": 200, "duplicate": 409, "poison": 422, "fail": 503}


class _HttpService(Service):
    """A real HTTP server on loopback.

    `respond` may be set to what answers instead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.respond: Callable[[web.Request], Any] = self._answer
        self.requests: list[web.Request] = []
        self.bodies: list[bytes] = []
        self.handlers: list[HttpEventHandler] = []
        self.port = 0

    def handler(self, **options: Any) -> EventHandler:
        base = f"http://127.0.0.1:{self.port}/"
        options = {"url": f"{base}handle", "allow": [f"{base} 127.0.0.0/8"], "keys": [KEY]} | options
        handler = HttpEventHandler(options.pop("url"), **options)
        self.handlers.append(handler)
        return handler

    async def serve(self, incoming: web.Request) -> web.StreamResponse:
        self.requests.append(incoming)
        self.bodies.append(await incoming.read())
        response: web.StreamResponse = await self.respond(incoming)
        return response

    async def _answer(self, incoming: web.Request) -> web.StreamResponse:
        self.seen.append(msgspec.json.decode(await incoming.read(), type=HandlerRequest))
        return web.json_response({"said": "because"}, status=STATUS[self.next_answer()])


@pytest.fixture
async def http() -> AsyncIterator[_HttpService]:
    service = _HttpService()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", service.serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    service.port = runner.addresses[0][1]
    yield service
    for handler in service.handlers:
        await handler.close()
    await runner.cleanup()


class TestHttpEventHandler(EventHandlerConformance):
    @pytest.fixture
    def service(self, http: _HttpService) -> Service:
        return http


class _Function(Service):
    def handler(self) -> EventHandler:
        return FunctionEventHandler(self._handle)

    async def _handle(self, request: HandlerRequest) -> None:
        self.seen.append(request)
        match self.next_answer():
            case "duplicate":
                raise DuplicateInboxMessage("because")
            case "poison":
                raise PoisonMessage("because")
            case "fail":
                raise RuntimeError("because")


class TestFunctionEventHandler(EventHandlerConformance):
    @pytest.fixture
    def service(self) -> Service:
        return _Function()


# -- what only HTTP has ---


async def test_the_body_is_what_the_specification_says(http: _HttpService) -> None:
    await http.handler().handle(request())
    assert msgspec.json.decode(http.bodies[0]) == {
        "message_id": "550e8400-e29b-41d4-a716-000000000001",
        "subject": "vibespro.event.vibe_created.v1",
        "event_type": "vibe_created",
        "event_version": 1,
        "occurred_at": "2025-12-28T22:00:00Z",
        "correlation_id": "0193f0f2-0000-7000-8000-000000000001",
        "causation_id": None,
        "payload": {"total": 5},
    }
    assert http.requests[0].method == "POST"
    assert http.requests[0].path == "/handle"
    assert http.requests[0].content_type == "application/json"


async def test_a_payload_that_is_not_json_is_base64_with_its_media_type(http: _HttpService) -> None:
    given = msgspec.structs.replace(request(), payload=b"\x00\xff", content_type="image/png")
    await http.handler().handle(given)
    body = msgspec.json.decode(http.bodies[0])
    assert (body["payload"], body["content_type"]) == ("AP8=", "image/png")
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(http.bodies[0].replace(b"AP8=", b"A"), type=HandlerRequest)


async def test_requests_are_signed_with_every_key(http: _HttpService) -> None:
    old = "fedcba9876543210fedcba9876543210"
    await http.handler(keys=[KEY, old]).handle(request())
    for key in (KEY, old):
        verify_signature(http.requests[0].headers, http.bodies[0], key)


async def test_a_redirect_is_not_followed(http: _HttpService) -> None:
    async def redirect(incoming: web.Request) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": f"http://127.0.0.1:{http.port}/internal"})

    http.respond = redirect
    result = await http.handler().handle(request())
    assert result.outcome == "failed"
    assert result.reason == "HTTP 307"
    assert [each.path for each in http.requests] == ["/handle"]


async def test_proxies_of_the_environment_are_not_used(
    http: _HttpService, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1/")
    assert (await http.handler().handle(request())).outcome == "processed"


async def test_cookies_are_not_kept(http: _HttpService) -> None:
    async def set_cookie(incoming: web.Request) -> web.StreamResponse:
        return web.Response(headers={"Set-Cookie": "session=1"})

    http.respond = set_cookie
    handler = http.handler()
    await handler.handle(request())
    await handler.handle(request())
    assert "Cookie" not in http.requests[1].headers


async def test_a_handler_that_does_not_answer_in_time_has_failed(http: _HttpService) -> None:
    async def hang(incoming: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        raise AssertionError

    http.respond = hang
    result = await http.handler(timeout_ms=50).handle(request())
    assert result.outcome == "failed"
    assert result.reason == f"http://127.0.0.1:{http.port}/handle did not respond within 50 ms"


async def test_a_body_that_drips_does_not_hold_the_worker(http: _HttpService) -> None:
    async def drip(incoming: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(incoming)
        while True:
            await response.write(b".")
            await asyncio.sleep(0.01)

    http.respond = drip
    assert (await http.handler(timeout_ms=100).handle(request())).outcome == "failed"


async def test_a_long_body_is_not_read_to_its_end(http: _HttpService) -> None:
    written = 0

    async def flood(incoming: web.Request) -> web.StreamResponse:
        nonlocal written
        response = web.StreamResponse(status=422)
        await response.prepare(incoming)
        while written < 100_000_000:
            await response.write(b"x" * 100_000)
            written += 100_000
        return response

    http.respond = flood
    result = await http.handler(max_response_bytes=1_000).handle(request())
    assert result.outcome == "poison"
    assert result.reason is not None
    assert len(result.reason) < 600
    assert written < 100_000_000


async def test_a_compressed_body_is_not_inflated(http: _HttpService) -> None:
    async def bomb(incoming: web.Request) -> web.StreamResponse:
        response = web.Response(status=422, body=b"0" * 10_000_000)
        response.enable_compression(web.ContentCoding.gzip)
        return response

    http.respond = bomb
    assert (await http.handler(timeout_ms=5_000).handle(request())).outcome == "poison"
    assert http.requests[0].headers["Accept-Encoding"] == "identity"


async def test_a_handler_may_say_when_to_try_again(http: _HttpService) -> None:
    async def busy(incoming: web.Request) -> web.StreamResponse:
        return web.Response(status=429, headers={"Retry-After": "7"})

    http.respond = busy
    assert (await http.handler().handle(request())).retry_after_ms == 7_000


async def test_a_handler_that_is_not_there_has_failed(http: _HttpService) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/"
        result = await http.handler(url=url, allow=[f"{url} 127.0.0.0/8"]).handle(request())
    assert result.outcome == "failed"
    assert result.reason is not None
    assert "gave no response" in result.reason


async def test_an_answer_that_is_no_http_has_failed(http: _HttpService) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"220 smtp.example.com ESMTP\r\n")
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    result = await http.handler(url=url, allow=[f"{url} 127.0.0.0/8"]).handle(request())
    server.close()
    await server.wait_closed()
    assert result.outcome == "failed"


async def test_a_name_that_leads_to_loopback_is_not_called(http: _HttpService) -> None:
    url = f"http://localhost:{http.port}/"
    result = await http.handler(url=url, allow=[url]).handle(request())
    assert result.outcome == "failed"
    assert result.reason is not None
    assert "not public" in result.reason
    assert http.requests == []
    allowed = http.handler(url=url, allow=[f"{url} 127.0.0.0/8 ::1/128"])
    assert (await allowed.handle(request())).outcome == "processed"


async def test_a_forbidden_address_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(Forbidden, match="allow-list"):
        HttpEventHandler("https://evil.example/", allow=["https://handlers.example.com/"], keys=[KEY])
    with pytest.raises(Forbidden, match="not public"):
        HttpEventHandler("http://169.254.169.254/", allow=["http://169.254.169.254/"], keys=[KEY])


async def test_a_name_server_that_changes_its_mind_gains_nothing(
    http: _HttpService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is public when it is checked, and loopback had it been resolved once more."""
    url = f"http://rebinding.example:{http.port}/"
    answers = ["93.184.216.34", "127.0.0.1"]
    asked: list[str] = []
    connected: list[Any] = []
    loop = asyncio.get_running_loop()
    real = loop.getaddrinfo

    async def getaddrinfo(host: Any, port: Any, **options: Any) -> Any:
        if host != "rebinding.example":
            return await real(host, port, **options)
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answers[len(asked) - 1], port))]

    async def sock_connect(sock: Any, address: Any) -> None:
        connected.append(address[0])
        raise OSError("no way there")

    monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(loop, "sock_connect", sock_connect)
    handler = http.handler(url=url, allow=[url])
    assert (await handler.handle(request())).outcome == "failed"
    assert connected == ["93.184.216.34"]
    assert (await handler.handle(request())).outcome == "failed"
    assert connected == ["93.184.216.34"]
    assert http.requests == []
