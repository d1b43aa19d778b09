"""Pictures of the console for the documentation: `make screenshots` writes docs/images/console-*.png.

The store has traffic of six hours, and messages keep coming while the pictures are taken.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

from playwright.sync_api import Page

from postroom.adapters import compose
from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.compose.access import open_capabilities, open_key_ring
from postroom.adapters.compose.projections import LocalTaskRunner, rebuild_projections
from postroom.adapters.system.clock import SystemClock
from postroom.application.messages import NewMessage
from postroom.domain.capability.rights import Right, Rights
from postroom.domain.policy import TopicPolicy
from postroom.domain.subscription import SubscriptionFilter
from tests.support.browser import Window, chromium
from tests.support.servers.http import PostroomServer

IMAGES: Final = Path(__file__).parents[1] / "docs" / "images"
MAX_BYTES: Final = 150_000
MAILBOX: Final = "shop@eu"
HOURS: Final = 6
STEPS: Final = 240
PER_STEP: Final = 25
LIVE_SECONDS: Final = 25.0
POLICY: Final = TopicPolicy(visibility_ms=30_000, max_attempts=2, backoff_base_ms=50, backoff_max_ms=400)
TOPICS: Final = ("orders.created", "orders.paid", "orders.shipped", "stock.changed", "mail.requested")
SUBSCRIPTIONS: Final = {"audit": "*", "billing": "orders.paid", "mail": "orders.*"}
SHOPS: Final = ("shop-berlin", "shop-lima", "shop-osaka")
ERRORS: Final = (
    "amount is negative",
    "ConnectionError: warehouse.internal:5432 refused the connection",
    "KeyError: 'address' in order",
    "TimeoutError: the mail server did not answer within 30 s",
)


class Picture(NamedTuple):
    """A picture of a page.

    Arguments:
        name: of the file, without `console-` and `.png`.
        path: of the page, within the console; `{dead}` is the id of a dead letter, `{job}` of a redrive job.
        top: selector of what is at the top of the picture.
    """

    name: str
    path: str
    is_dark: bool = False
    top: str = "body"


PICTURES: Final = (
    Picture("overview", "/"),
    Picture("search", "/search?topics=orders.*&principals=shop-lima", top=".chart-frame"),
    Picture("message", "/messages/{dead}"),
    Picture("dead-letters", "/dead-letters"),
    Picture("redrive-job", "/redrives/{job}"),
    Picture("subscriptions", "/subscriptions"),
    Picture("log", "/log"),
    Picture("commit", "/log/commits/1000"),
    Picture("audit", "/audit", is_dark=True),
    Picture("access", "/access"),
    Picture("what-if", "/what-if?topic=orders.created&max_attempts=5&backoff_base_ms=1000"),
)


class PastClock(SystemClock):
    """A clock that the filling of the store moves through the past, on a machine of its own."""

    def __init__(self) -> None:
        self.behind_us = HOURS * 3_600_000_000

    def wall(self) -> int:
        """Return µs since 1970 UTC."""
        return super().wall() - self.behind_us

    def uptime(self) -> int:
        """Return µs since the machine started."""
        return super().uptime() + HOURS * 3_600_000_000 - self.behind_us

    def boot(self) -> str:
        """Return the id of the machine's boot."""
        return "past"


def generate(random: Random, start: int, count: int) -> Iterator[NewMessage]:
    """Yield orders with ids, bodies and headers that differ."""
    for number in range(start, start + count):
        customer = f"customer-{random.randrange(500)}"
        lines = [
            {"sku": f"SKU-{random.randrange(10**5):05}", "quantity": random.randrange(1, 5)}
            for _ in range(random.randrange(1, 4))
        ]
        order = {"order": number, "customer": customer, "amount": round(random.uniform(1, 500), 2)}
        yield NewMessage(
            topic=random.choices(TOPICS, (8, 6, 5, 3, 2))[0],
            payload=json.dumps(order | {"lines": lines}).encode(),
            idem_key=f"order-{number}",
            sticky_key=customer,
            principal=random.choice(SHOPS),
            correlation_id=f"visit-{random.randrange(10**6):06}",
            content_type="application/json",
            attrs={
                "currency": random.choice(("EUR", "PEN", "JPY")),
                "region": random.choice(("eu", "sa", "ap")),
            },
        )


async def consume(mailbox: OwnedMailbox, random: Random, share: float) -> None:
    """Receive messages of all topics; ack most, and fail some."""
    for topic in (*TOPICS, *SUBSCRIPTIONS):
        deliveries = await mailbox.receive_messages(
            topic, max_messages=100, consumer=f"worker-{random.randrange(3)}"
        )
        for delivery in deliveries:
            if random.random() < share:
                reason = random.choices(ERRORS, (5, 9, 3, 1))[0]
                await mailbox.nack_messages([delivery.receipt], reason=reason)
        await mailbox.ack_messages([each.receipt for each in deliveries])


async def fill(store: str) -> None:
    """Send, receive and fail messages over the hours before now."""
    random, clock = Random(37), PastClock()
    vars(compose).update(SystemClock=lambda: clock)  # the store's only clock until it is filled
    async with open_mailbox(store, MAILBOX) as mailbox:
        for topic in TOPICS:
            await mailbox.set_topic_policy(topic, POLICY)
        for name, topic in SUBSCRIPTIONS.items():
            await mailbox.set_topic_policy(name, POLICY)
            await mailbox.set_subscription(name, SubscriptionFilter((topic,)))
        for step in range(STEPS):
            wave = 1 + 0.8 * random.random() * (step % 60) / 60
            await mailbox.send_batch(list(generate(random, step * 100, int(PER_STEP * wave))))
            clock.behind_us -= HOURS * 3_600_000_000 // STEPS // 2
            is_bad = 100 <= step < 130
            await consume(mailbox, random, 0.5 if is_bad else 0.04)
            clock.behind_us -= HOURS * 3_600_000_000 // STEPS // 2
        europe = SubscriptionFilter(("orders.*",), {"region": "eu"})
        await mailbox.set_subscription("reports", europe, start=0)
        await mailbox.pause_topic("billing")
    vars(compose).update(SystemClock=SystemClock)


def talk(call: "Caller", stop: threading.Event) -> None:
    """Send and receive through the server until told to stop."""
    random, start = Random(38), 100_000
    while not stop.wait(0.2):
        batch = [
            {
                "topic": each.topic,
                "payload_b64": b64encode(each.payload).decode(),
                "principal": each.principal,
            }
            for each in generate(random, start, random.randrange(4, 16))
        ]
        start += len(batch)
        call("POST", "/v1/send", batch)
        for topic in TOPICS:
            received = call("POST", "/v1/recv", {"topic": topic, "max_messages": random.randrange(1, 6)})
            for each in received["messages"]:
                outcome = "nack" if random.random() < 0.1 else "ack"
                call("POST", f"/v1/{outcome}", {"receipts": [each["receipt"]]})


def issue(store: str, principal: str, *operations: Right) -> str:
    """Return the token of a capability on all topics."""
    keys = open_key_ring(store)
    with open_capabilities(store, keys) as capabilities:
        if not keys.root_keys():
            capabilities.rotate()
        rights = Rights(("*",), ("*",), operations or tuple(Right))
        return capabilities.issue(principal, rights, lifetime_ms=8 * 3_600_000)


class Caller:
    """A service or person who calls a server.

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


def find_dead_letter(support: Caller) -> str:
    """Return the id of a dead letter, after looking at some messages."""
    letters = support("GET", "/v1/dlq?topic=orders.paid&limit=5")["items"]
    support("GET", "/v1/messages?topics=orders.*&principals=shop-lima&limit=20")
    for each in letters:
        support("GET", f"/v1/messages/{each['message_id']}")
    return str(letters[0]["message_id"])


def start_job(operator: Caller) -> str:
    """Start a redrive job that takes a while; return its id."""
    answer = operator("POST", "/v1/redrives", {"spec": {"topics": ["mail.*", "stock.*"], "rate": 1}})
    return str(answer["job_id"])


def take(page: Page, picture: Picture, base: str, names: dict[str, str]) -> int:
    """Write a picture; return its size."""
    page.emulate_media(color_scheme="dark" if picture.is_dark else "light")
    page.goto(base + picture.path.format(**names), wait_until="load")
    page.wait_for_timeout(1_000)
    page.locator(picture.top).first.evaluate("element => element.scrollIntoView()")
    path = IMAGES / f"console-{picture.name}.png"
    page.screenshot(path=path, animations="disabled", caret="hide")
    if pngquant := shutil.which("pngquant"):
        subprocess.run([pngquant, "--nofs", "--strip", "--force", "--output", path, "256", path], check=True)
    return path.stat().st_size


def main() -> int:
    """Take all pictures, or those named on the command line."""
    names = set(sys.argv[1:])
    pictures = [each for each in PICTURES if not names or each.name in names]
    with TemporaryDirectory(prefix="screenshots-") as folder:
        store = str(Path(folder) / "shop.db")
        asyncio.run(fill(store))
        rebuild_projections(store, runner=LocalTaskRunner())
        return _shoot(Path(folder), store, pictures)


def _shoot(folder: Path, store: str, pictures: list[Picture]) -> int:
    stop, is_too_large = threading.Event(), False
    os.environ["POSTROOM_MAILBOX"] = MAILBOX
    service, operator = issue(store, "shop-service"), issue(store, "anna@ops")
    support = issue(store, "ben@support", Right.READ_HEADERS, Right.READ_PAYLOAD)
    with (
        PostroomServer(folder / "server", store, dev=False) as server,
        chromium() as browser,
        ThreadPoolExecutor() as threads,
    ):
        base = f"{server.address}/console"
        traffic = threads.submit(talk, Caller(server, service), stop)
        names = {
            "dead": find_dead_letter(Caller(server, support)),
            "job": start_job(Caller(server, operator)),
        }
        stop.wait(LIVE_SECONDS)
        window = Window(browser)
        window.open(f"{base}/sign-in")
        window.page.get_by_label("Capability token").fill(operator)
        window.page.get_by_role("button", name="Sign in").click()
        window.page.get_by_role("navigation", name="Pages").first.wait_for()
        for picture in pictures:
            size = take(window.page, picture, base, names)
            print(f"console-{picture.name}.png: {size:,} bytes")
            is_too_large = is_too_large or size > MAX_BYTES
        window.close()
        stop.set()
        traffic.result()
    return 1 if is_too_large else 0


if __name__ == "__main__":
    sys.exit(main())
