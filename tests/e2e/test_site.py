"""The built site, in a browser: accessible, searchable, and served by one host."""

import os
import re
import subprocess
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from playwright.sync_api import Browser, expect

from tests.support.browser import PHONE, Window, chromium_or_skip, find_problems, overflow

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[2]
VERSION = "test"
PAGES = ("", "clients/", "reference/api/mailboxes/", "reference/errors/E_SATURATED/", "reference/commands/")
TIMEOUT_SECONDS = 600


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built in strict mode."""
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"POSTROOM_SITE_URL": "https://docs.example", "POSTROOM_REPOSITORY_URL": ""}
    command = ["make", "docs", f"VERSION={VERSION}", f"SITE={folder}"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(site)))
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/{VERSION}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser(address: str) -> Iterator[Browser]:
    with chromium_or_skip() as started:
        yield started


def test_every_page_of_the_documentation_is_built_with_its_markdown_and_its_head(site: Path) -> None:
    folder = site / VERSION
    pages = [file.relative_to(ROOT / "docs") for file in (ROOT / "docs").rglob("*.md")]
    for page in pages:
        name = page.parent if page.name in ("index.md", "README.md") else page.with_suffix("")
        assert (folder / name / "index.html").is_file(), page
        assert (folder / page).is_file(), page
    assert len(pages) > 200
    html = (folder / "clients/index.html").read_text()
    image = re.search(r'og:image" content="https://docs\.example/test/([^"]+)"', html)
    assert image is not None
    assert (folder / image[1]).read_bytes().startswith(b"\x89PNG")
    assert '<meta name="description" content="connect opens a mailbox' in html
    api = (folder / "reference/api/mailboxes/index.html").read_text()
    assert "<code>MailboxMode | None</code>" in api
    assert {"llms.txt", "llms-full.txt", "search.json", "sitemap.xml"} <= {
        file.name for file in folder.iterdir()
    }


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_accessible_in_light_and_dark_and_asks_no_other_host(
    browser: Browser, address: str, path: str
) -> None:
    window = Window(browser)
    page = window.open(f"{address}/{path}")
    assert find_problems(page) == []
    window.assert_quiet(address.split("/")[2])
    window.close()


@pytest.mark.parametrize("path", PAGES)
def test_no_page_scrolls_sideways_on_a_phone(browser: Browser, address: str, path: str) -> None:
    window = Window(browser, PHONE)
    assert overflow(window.open(f"{address}/{path}")) <= 0  # a gutter is kept for the scroll bar
    window.close()


def test_a_search_finds_an_error_code(browser: Browser, address: str) -> None:
    window = Window(browser)
    page = window.open(f"{address}/")
    page.keyboard.press("/")
    page.keyboard.type("E_STALE_RECEIPT")
    expect(page.get_by_role("option").first).to_contain_text("E_STALE_RECEIPT")
    window.close()


def test_code_can_be_copied(browser: Browser, address: str) -> None:
    window = Window(browser)
    page = window.open(f"{address}/clients/")
    expect(page.locator(".md-code__button[data-md-type=copy], .md-clipboard").first).to_be_attached()
    window.close()
