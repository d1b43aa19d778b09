"""`postroom console` beside another owner of the mailbox, and the settings of the console."""

import json
import sys
from pathlib import Path

import pytest
from aiohttp import ClientSession, CookieJar

from postroom.adapters.compose.connect import connect
from postroom.adapters.compose.console import ConsoleSettings
from postroom.adapters.compose.serve import SurfaceProtection
from postroom.domain.errors import InvalidRequest
from tests.integration.console.conftest import access_of
from tests.support.access import MemoryPlace
from tests.support.messages import message
from tests.support.servers.console import Browser, served_console
from tests.support.servers.process import ServerProcess
from tests.support.waiting import until


async def test_the_command_asks_the_owner_of_the_mailbox_and_serves_the_console_alone(tmp_path: Path) -> None:
    store, log = str(tmp_path / "store.db"), tmp_path / "console.log"
    log.touch()
    postroom = Path(sys.executable).parent / "postroom"
    command: list[str | Path] = [postroom, "--store", store, "--json", "console", "--read-only"]
    process = ServerProcess("postroom console", command, log)
    async with connect(store, "main@local") as owner:
        await owner.send_message(message(topic="orders"))
        epoch = (await owner.get_backlog()).epoch
        process.start(lambda: True)
        try:
            await until(lambda: b"link" in log.read_bytes())
            link = json.loads(log.read_text().splitlines()[-1])["link"]
            url, _, code = link.partition("/start?code=")
            async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as client:
                browser = Browser(client, url)
                assert (await browser.get("/")).status == 401
                page = await browser.open_link(code)
                assert "orders" in page.text
                assert "Pause orders" not in page.text
                assert (await browser.post("/topics/pause", topic="orders")).status == 403
                async with client.get(url.removesuffix("/console") + "/v1/topics") as answer:
                    assert answer.status == 404
        finally:
            process.stop()
        backlog = await owner.get_backlog()
        assert (backlog.epoch, backlog.paused_topics) == (epoch, [])
    assert code not in log.read_text().replace(link, "")


async def test_behind_a_proxy_with_tls_the_cookie_is_secure(place: MemoryPlace) -> None:
    async with served_console(
        place.mailbox, access=access_of(place), protection=SurfaceProtection(behind_proxy=True)
    ) as browser:
        fields = {"token": place.issue()}
        async with browser.client.post(
            browser.url + "/sign-in", data=fields, allow_redirects=False
        ) as answer:
            assert "; Secure" in answer.headers["set-cookie"]


@pytest.mark.parametrize(
    "prefix", ["", "/", "console", "/console/", "//evil", "/a/../b", "/v1", "/metrics/x", "/a b"]
)
def test_a_prefix_that_links_can_not_begin_with_is_refused(prefix: str) -> None:
    with pytest.raises(InvalidRequest, match=r"\[console\]: prefix "):
        ConsoleSettings(prefix=prefix).validate()
