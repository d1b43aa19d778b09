"""Chromium without a window, and a record of what its pages did."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Dialog,
    Page,
    Request,
    sync_playwright,
)

from postroom.domain.errors import Unavailable
from tests.support.waiting import SECONDS

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""Programs of the browser; the first, without a user interface, takes two thirds of the CPU time."""
TIMEOUT_MS = 60_000
"""Of each action and each expectation: long enough for a machine on which many other processes run."""
DESKTOP, PHONE = (1280, 800), (390, 844)
_PAUSE_MS = 10
_RULES = {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}
_COLOURS = {"type": "rule", "values": ["color-contrast"]}
_OPTIONS = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # nothing leaves the machine
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start Chromium, for synchronous tests only: no event loop may run in the thread until it is closed.

    Raises: Unavailable when the machine has none.
    """
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        raise Unavailable("Chromium was not found; run scripts/ensure-programs.sh.")
    # Its sandbox refuses to run as root.
    options = [*_OPTIONS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=options, timeout=TIMEOUT_MS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def chromium_or_skip() -> Iterator[Browser]:
    """Start Chromium as `chromium` does; skip the test on a machine that has none."""
    with ExitStack() as opened:
        try:
            browser = opened.enter_context(chromium())
        except Unavailable as error:
            pytest.skip(str(error))
        yield browser


class Window:
    """A browser's window with cookies of its own, which records what its pages must not do.

    Attributes:
        errors: errors of scripts, refusals by the Content-Security-Policy, and loads that failed.
        hosts: hosts that were asked for anything.
        dialogs: texts of the dialogs that opened; each is dismissed.
    """

    def __init__(
        self,
        browser: Browser,
        size: tuple[int, int] = DESKTOP,
        *,
        is_dark: bool = False,
        runs_scripts: bool = True,
    ) -> None:
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        self.dialogs: list[str] = []
        self.context: BrowserContext = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme="dark" if is_dark else "light",
            java_script_enabled=runs_scripts,
            reduced_motion="reduce",
            locale="en-GB",
            timezone_id="UTC",
        )
        self.context.set_default_timeout(TIMEOUT_MS)
        self.context.on("console", self._note_console)
        self.context.on("weberror", lambda error: self.errors.append(f"script: {error.error}"))
        self.context.on("dialog", self._dismiss)
        self.context.on("request", self._note_request)
        self.page: Page = self.context.new_page()

    def close(self) -> None:
        """Close it and forget its cookies."""
        self.context.close()

    def open(self, url: str) -> Page:
        """Load a page, and return it once its scripts have run."""
        self.page.goto(url, wait_until="load")
        return self.page

    def wait_until(self, is_true: Callable[[], object], seconds: float = SECONDS) -> None:
        """Return once a condition holds, while events of the page arrive.

        Raises: TimeoutError when it does not hold in time.
        """
        deadline = time.monotonic() + seconds
        while not is_true():
            if time.monotonic() >= deadline:
                raise TimeoutError(f"The condition did not hold within {seconds:g} s.")
            self.page.wait_for_timeout(_PAUSE_MS)

    def assert_quiet(self, *hosts: str) -> None:
        """Raise AssertionError when a page did what none must, or asked another host than these."""
        deeds = (self.errors, self.dialogs, self.hosts - set(hosts))
        assert deeds == ([], [], set()), deeds

    def _note_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(f"{message.type}: {message.text} ({message.location.get('url')})")

    def _note_request(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme != "data":
            self.hosts.add(parts.netloc or parts.scheme)

    def _dismiss(self, dialog: Dialog) -> None:
        self.dialogs.append(dialog.message)
        with suppress(Exception):  # the page may be gone already
            dialog.dismiss()


def find_problems(page: Page) -> list[str]:
    """Return what a page violates of WCAG 2.2 A and AA in light and in dark, and whether it is too wide."""
    problems = [f"{overflow(page)} px too wide"] if overflow(page) > 0 else []
    page.emulate_media(color_scheme="light")
    problems += find_violations(page)
    page.emulate_media(color_scheme="dark")
    return problems + find_violations(page, colours_only=True)


def find_violations(page: Page, *, colours_only: bool = False) -> list[str]:
    """Return what a page violates of WCAG 2.2 A and AA, as axe says: rule, element and reason.

    It removes the rows of tables after the fourth, which are like those before.

    Arguments:
        colours_only: check the rules that depend on the colour scheme.
    """
    if not page.evaluate("'axe' in window"):
        page.evaluate(_axe())
    page.evaluate("document.querySelectorAll('tbody tr:nth-child(n+5)').forEach(row => row.remove())")
    report: dict[str, Any] = page.evaluate(
        "rules => axe.run(document, {runOnly: rules, resultTypes: ['violations'], preload: false})",
        _COLOURS if colours_only else _RULES,
    )
    return [
        f"{violation['id']}: {' '.join(map(str, node['target']))}: {node['failureSummary']}"
        for violation in report["violations"]
        for node in violation["nodes"]
    ]


def overflow(page: Page) -> int:
    """Return by how many pixels a page is wider than its window."""
    width: int = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return width


def _axe() -> str:
    return files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8")
