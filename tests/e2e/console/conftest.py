from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from playwright.sync_api import Browser

from postroom.adapters.compose.access import open_capabilities, open_key_ring
from postroom.domain.capability.rights import Right, Rights
from tests.support.browser import Window, chromium_or_skip
from tests.support.hostile_store import create_store
from tests.support.servers.http import PostroomServer

ALL = tuple(Right)


class Console:
    """A server with a console over a store with hostile text, which asks for tokens.

    Arguments:
        settings: fields of `[serve]`.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        create_store(folder / "store.db")
        self._store = str(folder / "store.db")
        with open_capabilities(self._store, open_key_ring(self._store)) as capabilities:
            capabilities.rotate()
        self.server = PostroomServer(folder, dev=False, **settings)
        self.base = ""
        """What the addresses of its pages begin with."""

    @property
    def host(self) -> str:
        """Return the host and port that browsers ask."""
        return urlsplit(self.base).netloc

    def issue(
        self, principal: str, operations: Sequence[Right] = ALL, *, lifetime_ms: int = 3_600_000
    ) -> str:
        """Issue a capability on all topics; return its token."""
        rights = Rights(("*",), ("*",), tuple(operations))
        with open_capabilities(self._store, open_key_ring(self._store)) as capabilities:
            return capabilities.issue(principal, rights, lifetime_ms=lifetime_ms)

    def sign_in(self, window: Window, token: str, path: str = "/") -> bool:
        """Sign in, and open a page; return whether the token was accepted."""
        page = window.open(f"{self.base}/sign-in?next={quote(path, safe='')}")
        enter_token(window, token)
        page.locator("nav.nav, [role=alert]").first.wait_for(state="attached")
        return page.locator("nav.nav").count() == 1


def enter_token(window: Window, token: str) -> None:
    """Fill the form of sign-in, and send it."""
    window.page.get_by_label("Capability token").fill(token)
    window.page.get_by_role("button", name="Sign in").click()


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """A console of the file's own; made before the browser, whose event loop excludes others."""
    console = Console(tmp_path_factory.mktemp("console"))
    with console.server as server:
        console.base = f"{server.address}/console"
        yield console


@pytest.fixture(scope="module")
def browser(console: Console) -> Iterator[Browser]:
    """Chromium for the tests of a file, after their console: while it runs, no event loop may."""
    with chromium_or_skip() as started:
        yield started


@pytest.fixture
def windows(browser: Browser) -> Iterator[Callable[..., Window]]:
    """Open windows, which are closed when the test is over."""
    with ExitStack() as opened:

        def open_window(**options: Any) -> Window:
            window = Window(browser, **options)
            opened.callback(window.close)
            return window

        yield open_window
