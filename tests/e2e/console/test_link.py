"""The link of `postroom console` in Chromium, beside a server of another user of the machine."""

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.browser import Window, chromium_or_skip
from tests.support.hostile_store import create_store
from tests.support.servers.process import ServerProcess

START_SECONDS = 60.0


@contextmanager
def console_link(folder: Path) -> Iterator[str]:
    """Run `postroom console`, and yield its link."""
    create_store(folder / "store.db")
    log = folder / "console.log"
    postroom = str(Path(sys.executable).parent / "postroom")
    command = [postroom, "console", "--json", "--store", str(folder / "store.db")]
    process = ServerProcess("postroom console", command, log)
    process.start(lambda: '"link"' in log.read_text(), START_SECONDS)
    try:
        yield next(json.loads(line)["link"] for line in log.read_text().splitlines() if '"link"' in line)
    finally:
        process.stop()


@contextmanager
def foreign_server() -> Iterator[tuple[str, dict[str, str]]]:
    """Serve pages at another port of 127.0.0.1; yield its URL, and the cookies that it got by path."""
    cookies: dict[str, str] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            cookies[self.path] = self.headers.get("Cookie", "")
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<h1>Another user</h1>")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", cookies
        server.shutdown()
        thread.join()


def test_a_server_at_another_port_gets_no_cookie_for_any_path_that_it_can_know(tmp_path: Path) -> None:
    with (
        console_link(tmp_path) as link,
        foreign_server() as (foreign, cookies),
        chromium_or_skip() as browser,
    ):
        window = Window(browser)
        page = window.open(link)
        assert not window.context.cookies()
        page.get_by_role("button", name="Open the console").click()
        page.locator("nav.nav").wait_for()
        inside = urlsplit(page.url).path
        start = urlsplit(link)
        guesses = ["/", "/console", "/console/", f"{start.path}?{start.query}", "/console/messages"]
        for path in guesses:
            window.open(foreign + path)
        assert {path: cookies[path] for path in guesses} == dict.fromkeys(guesses, "")
        window.open(foreign + inside)  # browsers do send cookies to all ports
        assert "postroom-console" in cookies[inside]
        window.open(link.partition("/start")[0] + inside.removeprefix("/console"))
        assert page.locator("nav.nav").count() == 1
        window.close()
