"""The console of a mailbox, served within the test's own process, and a browser without JavaScript."""

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from html import unescape
from typing import Any, NamedTuple

from aiohttp import ClientSession, CookieJar

from postroom.adapters.compose.console import ConsoleSettings, console_mount
from postroom.adapters.compose.serve import unrestricted
from tests.support.surfaces import served

_CSRF = re.compile(r'name="csrf" value="([^"]+)"')


class Answer(NamedTuple):
    """An answer; `path` is where redirects led to."""

    status: int
    headers: Mapping[str, str]
    text: str
    path: str


class Browser:
    """A browser at the console, with cookies, that follows redirects.

    Arguments:
        url: of the console, without a slash at its end.
    """

    def __init__(self, client: ClientSession, url: str) -> None:
        self.client = client
        self.url = url
        self.csrf = ""

    @classmethod
    @asynccontextmanager
    async def another(cls, browser: "Browser") -> AsyncIterator["Browser"]:
        """Yield another browser at the same console, without cookies."""
        async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as client:
            yield cls(client, browser.url)

    async def get(self, path: str = "/", **options: Any) -> Answer:
        """Open a page; remember the CSRF token of its forms."""
        return await self._request("GET", path, **options)

    async def post(self, path: str, **fields: str) -> Answer:
        """Send a form with the CSRF token of the last page that had one."""
        return await self.send(path, {"csrf": self.csrf, **fields})

    async def send(self, path: str, fields: Any, **options: Any) -> Answer:
        """Send a form as it is."""
        return await self._request("POST", path, data=fields, **options)

    async def sign_in(self, token: str, **fields: str) -> Answer:
        """Sign in with a capability token."""
        return await self.send("/sign-in", {"token": token, **fields})

    async def open_link(self, code: str) -> Answer:
        """Open the link of `postroom console`, and press its button; pages are then below another path."""
        await self.get(f"/start?code={code}")
        page = await self.send("/start", {"code": code})
        if page.status == 200:
            self.url = self.url.partition("/console")[0] + page.path.rstrip("/")
        return page

    async def _request(self, method: str, path: str, **options: Any) -> Answer:
        async with self.client.request(method, self.url + path, **options) as response:
            text = await response.text()
            if csrf := _CSRF.search(text):
                self.csrf = unescape(csrf[1])
            return Answer(response.status, response.headers, text, response.url.raw_path_qs)


@asynccontextmanager
async def served_console(
    mailbox: Any,
    *,
    store: str = "memory:",
    access: Any = unrestricted,
    settings: ConsoleSettings | None = None,
    measure: Any = None,
    protection: Any = None,
    http: Any = None,
    address: str = "127.0.0.1:0",
    **options: Any,
) -> AsyncIterator[Browser]:
    """Serve the console of a mailbox, and yield a browser that is not signed in.

    Arguments:
        store: address of the store of its read models, log and audit log.
        access: as of `serve_mailbox`; by default, everybody may do everything, and needs no token.
        http: settings of the HTTP server.
        options: of `console_mount`.
    """
    checked = settings or ConsoleSettings()
    mount = console_mount(store, checked, **options)
    async with (
        served(
            mailbox,
            "http",
            address,
            access=access,
            mount=mount,
            protection=protection,
            settings=http,
            measure=measure,
        ) as url,
        ClientSession(cookie_jar=CookieJar(unsafe=True)) as client,
    ):
        yield Browser(client, url + checked.prefix)
