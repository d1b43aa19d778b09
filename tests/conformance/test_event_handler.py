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
from postroom.application.tracing import correlate
from postroom.domain.errors import DuplicateInboxMessage, Forbidden, PoisonMessage
from postroom.domain.inbox import HandlerResult
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


async def answer_batch(service: _HttpService, incoming: web.Request) -> web.StreamResponse:
    """Answer each request of an array as `_HttpService` answers it alone."""
    answers = []
    for call in msgspec.json.decode(await incoming.read()):
        service.seen.append(msgspec.convert(call["request"], HandlerRequest))
        answer = service.next_answer()
        answers.append({"status": STATUS[answer], "body": "because", "retry_after": 7 * (answer == "fail")})
    return web.json_response(answers)


@pytest.fixture
def batches(http: _HttpService) -> _HttpService:
    """A service that takes arrays of up to ten requests."""
    http.respond = lambda incoming: answer_batch(http, incoming)
    return http


class TestHttpEventHandlerInBatches(EventHandlerConformance):
    @pytest.fixture
    def service(self, batches: _HttpService) -> Service:
        handler = batches.handler
        batches.handler = lambda **options: handler(batch=10, **options)  # type: ignore[method-assign]
        return batches


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


# -- batches ---


def handle_together(handler: EventHandler, count: int) -> Any:
    return asyncio.gather(*(handler.handle(request(n)) for n in range(count)))


async def test_requests_that_come_together_are_posted_together_and_signed(batches: _HttpService) -> None:
    results = await handle_together(batches.handler(batch=10), 25)
    assert {result.outcome for result in results} == {"processed"}
    assert sorted(len(msgspec.json.decode(body)) for body in batches.bodies) == [5, 10, 10]
    assert sorted(batches.seen, key=lambda each: each.message_id) == [request(n) for n in range(25)]
    for incoming, body in zip(batches.requests, batches.bodies, strict=True):
        verify_signature(incoming.headers, body, KEY)
    assert len({incoming.headers["webhook-id"] for incoming in batches.requests}) == 3


async def test_each_request_of_a_batch_has_its_own_answer_and_headers(batches: _HttpService) -> None:
    batches.answers = ["ok", "poison", "duplicate", "fail", "ok"]
    handler = batches.handler(batch=10)

    async def handle(number: int) -> HandlerResult:
        with correlate(f"call-{number}"):
            return await handler.handle(request(number))

    results = await asyncio.gather(*(handle(n) for n in range(5)))
    outcomes = [result.outcome for result in results]
    assert outcomes == ["processed", "poison", "already_processed", "failed", "processed"]
    assert [result.retry_after_ms for result in results] == [None, None, None, 7_000, None]
    (body,) = batches.bodies
    headers = [call["headers"]["X-Corr-Id"] for call in msgspec.json.decode(body)]
    assert headers == [f"call-{n}" for n in range(5)]


@pytest.mark.parametrize("failure", ["an error", "a closed connection", "too few answers", "no array"])
async def test_a_request_that_fails_its_batch_fails_alone(batches: _HttpService, failure: str) -> None:
    async def respond(incoming: web.Request) -> web.StreamResponse:
        calls = msgspec.json.decode(await incoming.read())
        if all(not call["request"]["message_id"].endswith("3") for call in calls):
            return await answer_batch(batches, incoming)
        if failure == "a closed connection":
            assert incoming.transport is not None
            incoming.transport.abort()
        answers = [{"status": 200}] * (len(calls) - 1)
        if failure == "too few answers":
            return web.json_response(answers)
        return web.json_response({"status": 200}, status=500 if failure == "an error" else 200)

    batches.respond = respond
    results = await handle_together(batches.handler(batch=10), 7)
    assert [result.outcome for result in results] == ["processed"] * 3 + ["failed"] + ["processed"] * 3
    assert len(batches.seen) == 6


@pytest.mark.parametrize("status", [202, 404, 409, 422, 429, 503])
async def test_a_batch_that_is_refused_as_a_whole_is_retried_later_and_no_message_is_poison(
    batches: _HttpService, status: int
) -> None:
    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.json_response({"no": "arrays"}, status=status, headers={"Retry-After": "3"})

    batches.respond = refuse
    results = await handle_together(batches.handler(batch=10), 3)
    assert {result.outcome for result in results} == {"failed"}
    assert {result.retry_after_ms for result in results} == {3_000}
    assert all(result.reason is not None and f"HTTP {status}" in result.reason for result in results)
    assert len(batches.requests) == 1


async def test_large_requests_are_posted_in_smaller_batches(batches: _HttpService) -> None:
    handler = batches.handler(batch=10)
    large = [request(n, {"data": "x" * 100_000}) for n in range(5)]
    results = await asyncio.gather(*(handler.handle(each) for each in large))
    assert {result.outcome for result in results} == {"processed"}
    assert sorted(len(msgspec.json.decode(body)) for body in batches.bodies) == [2, 3]


async def test_a_cancelled_call_leaves_the_others_of_its_batch(batches: _HttpService) -> None:
    handler = batches.handler(batch=10)
    calls = [asyncio.create_task(handler.handle(request(n))) for n in range(3)]
    await asyncio.sleep(0)
    calls[1].cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(results[1], asyncio.CancelledError)
    outcomes = [result.outcome for result in results if not isinstance(result, BaseException)]
    assert outcomes == ["processed", "processed"]
