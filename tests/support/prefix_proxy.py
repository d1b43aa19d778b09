"""A reverse proxy that serves another server below a path of its own, as those in front of a console do."""

import asyncio
import threading
from contextlib import suppress
from typing import Self

from aiohttp import ClientConnectionResetError, ClientSession, ClientTimeout, web
from multidict import CIMultiDict
from yarl import URL

_HOP_BY_HOP = ("connection", "keep-alive", "transfer-encoding", "upgrade")
_SECONDS = 60.0


class PrefixProxy:
    """A proxy at a free port of loopback, which runs in a thread of its own.

    It removes its prefix from the paths of requests, states it as `X-Forwarded-Prefix`, and sends on all
    else, the client's `Host` included.

    Arguments:
        target: address of the server behind it.
        prefix: path such as `/ops`.
    """

    def __init__(self, target: str, prefix: str) -> None:
        self._target = target
        self._prefix = prefix
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.origin = ""
        """Scheme, host and port."""
        self.refused: list[str] = []
        """Paths outside its prefix that were asked for."""

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_ready.wait(_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_SECONDS)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        timeout = ClientTimeout(total=None, sock_connect=_SECONDS)
        async with ClientSession(timeout=timeout, auto_decompress=False) as self._client:
            runner = web.AppRunner(self._app(), shutdown_timeout=0.1, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.origin = f"http://127.0.0.1:{runner.addresses[0][1]}"
            self._is_ready.set()
            await self._stop.wait()
            await runner.cleanup()

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._forward)
        return app

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        path = request.raw_path
        if not path.startswith(f"{self._prefix}/"):
            self.refused.append(path)
            return web.Response(status=404, text="This path belongs to another service.")
        headers = CIMultiDict(
            (name, value) for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP
        )
        headers["X-Forwarded-Prefix"] = self._prefix
        async with self._client.request(
            request.method,
            URL(self._target + path.removeprefix(self._prefix), encoded=True),
            headers=headers,
            data=await request.read(),
            allow_redirects=False,
        ) as answer:
            response = web.StreamResponse(
                status=answer.status,
                headers=CIMultiDict(
                    (name, value) for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP
                ),
            )
            await response.prepare(request)
            with suppress(ClientConnectionResetError):  # of a browser that leaves a page with a stream
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
            return response
