"""`/mcp`: the tools over HTTP, for the bearers of capabilities."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from postroom.adapters.mcp.settings import McpSettings
from postroom.application.caller import read_bearer
from postroom.application.remote_errors import retry_after_ms
from postroom.application.service import Service
from postroom.application.threads import cancel_and_wait
from postroom.domain.errors import NotFound, PostroomError, Saturated, Unauthenticated

if TYPE_CHECKING:  # slow to import
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

SESSION: Final = "postroom.session"
"""Key of the scope of a request with the session of its token."""
REFUSAL: Final = "postroom.refusal"
ROUTE: Final = "postroom.route"
RETRY_MS: Final = 1_000
SERVER_ERROR: Final = -32_000
"""Code of JSON-RPC of errors that a server defines."""
METHOD: Final = b"Agents send POST requests; this server begins no messages and keeps no sessions."


class McpApp:
    """ASGI application that checks the capability of each request, and hands it to the SDK.

    A request is answered as a whole and leaves no session behind, so clients can't use up sessions. Requests
    above a number at a time are refused.

    Arguments:
        make_manager: loads the SDK, at the first request: most servers have no agents.
    """

    def __init__(
        self,
        service: Service,
        settings: McpSettings,
        make_manager: Callable[[], Awaitable["StreamableHTTPSessionManager"]],
    ) -> None:
        self._service = service
        self._max_calls = settings.max_calls
        self._make_manager = make_manager
        self._calls = 0
        self._asked = asyncio.Event()
        self._manager: asyncio.Future[StreamableHTTPSessionManager] | None = None

    async def run(self) -> None:
        """Run the SDK from the first request on, until cancelled."""
        self._manager = asyncio.get_running_loop().create_future()
        await self._asked.wait()
        try:
            manager = await self._make_manager()
        except Exception as error:
            self._manager.set_exception(error)
            return
        async with manager.run():
            self._manager.set_result(manager)
            await asyncio.Event().wait()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request; a refusal is an error of JSON-RPC, whose message clients show."""
        scope[ROUTE] = ""
        try:
            await self._serve(scope, receive, send)
        except PostroomError as error:
            self._service.metrics.refused(error)
            await _send_refusal(error, send)

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != f"{scope['root_path']}/":
            raise NotFound(f"There is nothing here; agents call {scope['root_path']}.")
        if REFUSAL in scope:
            raise scope[REFUSAL]
        values = [value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"]
        session = await self._service.open_session(read_bearer(values))
        connection = scope["state"]["connection"]
        connection.set_authenticated(True)
        if scope["method"] != "POST":
            await _refuse_method(send)
            return
        if self._calls >= self._max_calls:
            raise Saturated(
                f"The server answers {self._max_calls} calls of agents at a time; retry shortly.", RETRY_MS
            )
        self._calls += 1
        try:
            await self._answer({**scope, SESSION: session}, receive, send, connection.closed)
        finally:
            self._calls -= 1

    async def _answer(self, scope: Any, receive: Any, send: Any, closed: asyncio.Event) -> None:
        """Answer a request unless its client disconnects first."""
        self._asked.set()
        assert self._manager is not None, "it runs while requests are served"
        manager = await asyncio.shield(self._manager)
        answering = asyncio.create_task(manager.handle_request(scope, receive, send))
        gone = asyncio.create_task(closed.wait())
        try:
            await asyncio.wait([answering, gone], return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                await answering
        finally:
            await cancel_and_wait(answering, gone)


async def _refuse_method(send: Any) -> None:
    await _send(405, [(b"allow", b"POST"), (b"content-type", b"text/plain")], METHOD, send)


async def _send_refusal(error: PostroomError, send: Any) -> None:
    headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
    data: dict[str, Any] = {"code": error.code}
    if isinstance(error, Unauthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    if (wait_ms := retry_after_ms(error)) is not None:
        headers.append((b"retry-after", str(-(-wait_ms // 1_000)).encode()))
        data["retry_after_ms"] = wait_ms
    refusal = {"code": SERVER_ERROR, "message": str(error), "data": data}
    body = msgspec.json.encode({"jsonrpc": "2.0", "id": None, "error": refusal})
    await _send(error.status, headers, body, send)


async def _send(status: int, headers: list[tuple[bytes, bytes]], body: bytes, send: Any) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})
