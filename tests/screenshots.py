"""Pictures of the console for the documentation: `make screenshots` writes docs/images/console/*.webp.

Every page that is a route of the console is taken in a wide and a narrow window, in light and in dark, over
the shop of `postroom demo --console`, which goes on while the pictures are taken. A new page that needs
parameters needs an entry in `PATHS`; else the script says that it has no picture.
"""

import asyncio
import os
import sys
from base64 import b64decode
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from pkgutil import iter_modules
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from playwright.sync_api import Page

from postroom.adapters.cli.demo_shop import MAILBOX, build_views, fill_shop
from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.access import open_capabilities, open_key_ring
from postroom.adapters.console import pages
from postroom.application.messages import NewMessage
from postroom.domain.capability.rights import Right, Rights
from postroom.domain.policy import TopicPolicy
from tests.support.browser import DESKTOP, PHONE, Window, chromium
from tests.support.servers.http import PostroomServer
from tests.support.servers.process import ServerProcess
from tests.support.waiting import SECONDS

IMAGES: Final = Path(__file__).parents[1] / "docs" / "images" / "console"
QUALITY: Final = 55
MAX_BYTES: Final = 90_000
LIVE_SECONDS: Final = 45.0
SIZES: Final = (DESKTOP, PHONE)
SIGN_IN: Final = "sign-in"
INSTANCES: Final = "instances"
WORKER: Final = "postroom.adapters.cli.demo_shop:worker"
PATHS: Final = {
    "/": "overview=/",
    "/topics/show": "topic=/topics/show?name=orders.paid&period=24h",
    "/topics/policy": "topic-policy=/topics/policy?name=orders.paid",
    "/topics/purge": "topic-purge=/topics/purge?name=orders.paid",
    "/send": "send=/send?topic=orders.created",
    "/consumers/worker": "worker=/consumers/worker?id={worker}",
    "/outboxes/failures": "failures=/outboxes/failures?kind=recorded&name={store}",
    "/search": "search=/search?topics=orders.*&principals=shop-lima",
    "/messages": "message-by-id=/messages",
    "/messages/{id:path}": "message=/messages/{dead}",
    "/message/resend": "message-resend=/message/resend?id={dead}",
    "/message/{action}": "message-reschedule=/message/reschedule?id={waiting}",
    "/log/commits": "commits=/log/commits",
    "/log/commits/{position}": "commit=/log/commits/1000",
    "/log/events/{position}": "event=/log/events/1000",
    "/log/verify": "log-verify=/log/verify?from=1",
    "/redrives/select": "redrive-select=/redrives/select?action=cancel&topics=mail.*&statuses=ready",
    "/redrives/preview": "redrive-preview=/redrives/preview?topics=orders.*",
    "/redrives/{job_id}": "redrive-job=/redrives/{job}",
    "/redrives/{job_id}/{action}": "redrive-undo=/redrives/{job}/undo",
    "/subscriptions/rewind": "subscription-rewind=/subscriptions/rewind?name=billing",
    "/subscriptions/delete": "subscription-delete=/subscriptions/delete?name=billing",
    "/schedules/delete": "schedule-delete=/schedules/delete?name=newsletter",
    "/tail": "tail=/tail?topics=orders.*",
    "/timeline": "timeline=/timeline?correlation_id={request}",
    "/compare": "compare=/compare?id={dead}&id={other}",
    "/searches/{search_id}/delete": "search-delete=/searches/{search}/delete",
    "/what-if": "what-if=/what-if?topic=orders.paid&max_attempts=5&backoff_base_ms=1000",
}
"""Name of the picture and path of a page, by route, for those that are not the route itself."""


NO_PAGES: Final = (
    "/live",
    "/tail/live",
    "/search/export",
    "/search/suggestions/{field}",
    "/message/payload",
)
"""Routes of streams, files and parts of pages."""


HIDE_FOLDERS: Final = r"""() => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = texts.nextNode(); text; text = texts.nextNode()) {
    text.data = text.data.replaceAll(/\/\S*\/(\w+\.db)/g, "$1");
  }
}"""
"""Shows stores without their folder, which is one of this machine."""


class Picture(NamedTuple):
    """A page to be taken.

    Arguments:
        name: of the files, before size and scheme.
        path: within the console; `{dead}` and `{waiting}` are ids of messages, `{job}` of a redrive job.
    """

    name: str
    path: str


def list_pictures() -> Iterator[Picture]:
    """Yield the pages of the console: the sign-in, every route of a GET, and the page of all instances."""
    yield Picture(SIGN_IN, "/sign-in")
    for module in iter_modules(pages.__path__):
        for route in getattr(import_module(f"{pages.__name__}.{module.name}"), "ROUTES", ()):
            if "GET" in route.methods and route.path not in NO_PAGES:
                name, _, path = PATHS.get(route.path, f"={route.path}").partition("=")
                yield Picture(name or route.path.strip("/").replace("/", "-"), path)
    yield Picture(INSTANCES, "/instances/")


def issue(store: str, principal: str, *operations: Right) -> str:
    """Return the token of a capability on all topics."""
    keys = open_key_ring(store)
    with open_capabilities(store, keys) as capabilities:
        if not keys.root_keys():
            capabilities.rotate()
        rights = Rights(("*",), ("*",), operations or tuple(Right))
        return capabilities.issue(principal, rights, lifetime_ms=8 * 3_600_000)


class Caller:
    """A person who calls a server.

    Arguments:
        token: the capability.
    """

    def __init__(self, server: PostroomServer, token: str) -> None:
        self._server = server
        self._headers = {"Authorization": f"Bearer {token}"}

    def __call__(self, method: str, path: str, body: object = None) -> Any:
        """Make a call; return the JSON of its answer."""
        answer = self._server.call(method, path, body, self._headers)
        assert answer.status == 200, answer.text
        return answer.json


def find_names(support: Caller, operator: Caller) -> dict[str, str]:
    """Return the ids of paths, after some reads that the audit log shows."""
    letters = support("GET", "/v1/dlq?topic=orders.paid&limit=5")["items"]
    waiting = support("GET", "/v1/messages?topics=mail.reminders&limit=1")["items"]
    details = [support("GET", f"/v1/messages/{each['message_id']}") for each in letters]
    spec = {"topics": ["orders.*", "mail.*", "billing"], "rate": 1}
    job = operator("POST", "/v1/redrives", {"spec": spec})
    saved = operator(
        "POST", "/v1/searches", {"name": "Failed orders", "query": "topics=orders.*&statuses=dead"}
    )
    return {
        "search": saved["search_id"],
        "dead": letters[-1]["message_id"],
        "other": letters[0]["message_id"],
        "request": details[-1]["item"]["correlation_id"],
        "worker": next((each["id"] for each in support("GET", "/v1/workers")["workers"]), ""),
        "waiting": waiting[0]["message_id"],
        "job": job["job_id"],
    }


def is_page(page: Page, url: str) -> bool:
    """Return whether a URL is a page, not a part of one or a file; say so if it is an error."""
    answer = page.request.get(url, timeout=SECONDS * 1_000)
    if answer.status >= 400:
        print(f"{url} answers {answer.status}: it has no picture; name its parameters in PATHS.")
        return False
    is_html = answer.headers.get("content-type", "").startswith("text/html")
    return is_html and answer.status == 200 and "<!doctype html>" in answer.text()


def take(page: Page, picture: Picture, url: str, folder: Path) -> int:
    """Write the pictures of a page; return the size of the largest."""
    session, largest = page.context.new_cdp_session(page), 0
    for (width, height), scheme in product(SIZES, ("light", "dark")):
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        if (width, scheme) in ((DESKTOP[0], "light"), (PHONE[0], "light")):
            page.goto(url, wait_until="load")
            page.wait_for_timeout(700)
        page.evaluate(HIDE_FOLDERS)
        shot = session.send("Page.captureScreenshot", {"format": "webp", "quality": QUALITY})
        data = b64decode(shot["data"])
        (IMAGES / f"{picture.name}-{width}-{scheme}.webp").write_bytes(data)
        largest = max(largest, len(data))
        if folder != IMAGES:  # whole pages, to be looked at
            page.screenshot(path=folder / f"{picture.name}-{width}-{scheme}.png", full_page=True)
    return largest


def main(arguments: Sequence[str]) -> int:
    """Take all pictures, or those named on the command line; a folder gets pictures of whole pages, too."""
    names = {each for each in arguments if "/" not in each}
    folder = next((Path(each) for each in arguments if "/" in each), IMAGES)
    for each in (IMAGES, folder):
        each.mkdir(parents=True, exist_ok=True)
    pictures = [each for each in list_pictures() if not names or each.name in names]
    os.environ["POSTROOM_MAILBOX"] = MAILBOX
    with TemporaryDirectory(prefix="screenshots-") as place:
        store = str(Path(place) / "shop.db")
        asyncio.run(fill_shop(store))
        build_views(store)
        of_one = [each for each in pictures if each.name != INSTANCES]
        is_bad = bool(of_one and _shoot(Path(place), store, of_one, folder))
        for picture in pictures:
            if picture.name == INSTANCES:
                is_bad = _shoot_instances(Path(place), store, picture, folder) or is_bad
        return int(is_bad)


def _shoot_instances(place: Path, store: str, picture: Picture, folder: Path) -> bool:
    """Take the page of all instances: the shop, a warehouse, one without a session, and one that is down."""
    warehouse = str(place / "warehouse.db")
    asyncio.run(fill_warehouse(warehouse))
    instances = {"warehouse": warehouse, "payroll": warehouse, "archive": str(place / "archive.db")}
    tables = {"console.instances": instances}
    tokens = {"": issue(store, "anna@ops"), "/instances/warehouse": issue(warehouse, "anna@ops")}
    with (
        PostroomServer(place / "instances", store, dev=False, tables=tables) as server,
        chromium() as browser,
    ):
        window, base = Window(browser), f"{server.address}/console"
        for at, token in tokens.items():
            url = f"{base}{at}/sign-in"
            window.wait_until(partial(_is_open, window, url))
            window.open(url)
            sign_in(window, token)
        size = take(window.page, picture, base + picture.path, folder)
        print(f"{picture.name}: {size:,} bytes at most")
        window.close()
    return size > MAX_BYTES


def _is_open(window: Window, url: str) -> bool:
    return window.page.request.get(url).status == 200


async def fill_warehouse(store: str) -> None:
    """Make a mailbox with some messages, of which one is a dead letter and one in flight."""
    async with open_mailbox(store, MAILBOX) as mailbox:
        await mailbox.set_topic_policy("parcels", TopicPolicy(max_attempts=1))
        await mailbox.send_batch([NewMessage(topic="parcels", payload=b"{}") for _ in range(28)])
        failed, _ = await mailbox.receive_messages("parcels", max_messages=2)
        await failed.nack(reason="The label printer is out of paper.")


def _shoot(place: Path, store: str, pictures: Sequence[Picture], folder: Path) -> int:
    operator = issue(store, "anna@ops")
    support = issue(store, "ben@support", Right.READ_HEADERS, Right.READ_PAYLOAD)
    program = Path(sys.executable).parent / "postroom"
    work = ServerProcess("work", [program, "work", WORKER, "--store", store], place / "work.log")
    follow = ServerProcess("follow", [program, "views", "follow", "--store", store], place / "follow.log")
    is_bad = False
    with PostroomServer(place / "server", store, dev=False) as server:
        for each in (work, follow):
            each.start(lambda: True, SECONDS)
        try:
            with chromium() as browser:
                window, base = Window(browser), f"{server.address}/console"
                window.page.wait_for_timeout(LIVE_SECONDS * 1_000)
                names = find_names(Caller(server, support), Caller(server, operator))
                names["store"] = quote(store)
                if pictures[0].name != SIGN_IN:
                    window.open(f"{base}/sign-in")
                    sign_in(window, operator)
                for picture in pictures:
                    url = base + picture.path.format(**names)
                    if not is_page(window.page, url):
                        continue
                    size = take(window.page, picture, url, folder)
                    print(f"{picture.name}: {size:,} bytes at most")
                    is_bad = is_bad or size > MAX_BYTES
                    if picture.name == SIGN_IN:
                        sign_in(window, operator)
                window.close()
        finally:
            for each in (work, follow):
                each.stop()
    return 1 if is_bad else 0


def sign_in(window: Window, token: str) -> None:
    """Sign in at the page that is open."""
    window.page.get_by_label("Capability token").fill(token)
    window.page.get_by_role("button", name="Sign in").click()
    window.page.locator("nav.nav").wait_for(state="attached")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
