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
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from playwright.sync_api import Page

from postroom.adapters import compose
from postroom.adapters.compose import Postroom, open_mailbox
from postroom.adapters.compose.projections import LocalRunner, rebuild_projections
from postroom.adapters.system.clock import SystemClock
from postroom.application.messages import NewMessage
from postroom.domain.policy import TopicPolicy
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
    """

    name: str
    path: str
    is_dark: bool = False


PICTURES: Final = (
    Picture("overview", "/"),
    Picture("overview-dark", "/", is_dark=True),
    Picture("search", "/search?topics=orders.*&principals=shop-lima"),
    Picture("message", "/messages/{dead}"),
    Picture("dead-letters", "/dead-letters"),
    Picture("redrive-preview", "/redrives/new?topics=orders.*"),
    Picture("redrive-job", "/redrives/{job}"),
    Picture("log", "/log"),
    Picture("commit", "/log/commits/1000"),
    Picture("verification", "/log/verify?first=1&last=5000"),
    Picture("audit", "/audit", is_dark=True),
    Picture("access", "/access"),
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


async def consume(mailbox: Postroom, random: Random, share: float) -> None:
    """Receive messages of all topics; ack most, and fail some."""
    for topic in TOPICS:
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
        for step in range(STEPS):
            wave = 1 + 0.8 * random.random() * (step % 60) / 60
            await mailbox.send_batch(list(generate(random, step * 100, int(PER_STEP * wave))))
            clock.behind_us -= HOURS * 3_600_000_000 // STEPS // 2
            is_bad = 100 <= step < 130
            await consume(mailbox, random, 0.5 if is_bad else 0.04)
            clock.behind_us -= HOURS * 3_600_000_000 // STEPS // 2
    vars(compose).update(SystemClock=SystemClock)


def talk(server: PostroomServer, stop: threading.Event) -> None:
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
        sent = server.call("POST", "/v1/send", batch)
        assert sent.status == 200, sent.text
        for topic in TOPICS:
            answer = server.call("POST", "/v1/recv", {"topic": topic, "max_messages": random.randrange(1, 6)})
            for each in answer.json["messages"]:
                call = "nack" if random.random() < 0.1 else "ack"
                server.call("POST", f"/v1/{call}", {"receipts": [each["receipt"]]})


def find_dead_letter(server: PostroomServer) -> str:
    """Return the id of a dead letter."""
    return str(server.call("GET", "/v1/dlq?topic=orders.paid&limit=1").json["items"][0]["message_id"])


def start_job(server: PostroomServer) -> str:
    """Start a redrive job that takes a while; return its id."""
    answer = server.call("POST", "/v1/redrives", {"spec": {"topics": ["mail.*", "stock.*"], "rate": 1}})
    assert answer.status == 200, answer.text
    return str(answer.json["job_id"])


def take(page: Page, picture: Picture, base: str, names: dict[str, str]) -> int:
    """Write a picture; return its size."""
    page.emulate_media(color_scheme="dark" if picture.is_dark else "light")
    page.goto(base + picture.path.format(**names), wait_until="load")
    page.wait_for_timeout(1_000)
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
        rebuild_projections(store, runner=LocalRunner())
        return _shoot(Path(folder), store, pictures)


def _shoot(folder: Path, store: str, pictures: list[Picture]) -> int:
    stop, is_too_large = threading.Event(), False
    os.environ["POSTROOM_MAILBOX"] = MAILBOX
    with PostroomServer(folder / "server", store) as server, chromium() as browser:
        talker = threading.Thread(target=talk, args=(server, stop), daemon=True)
        talker.start()
        names = {"dead": find_dead_letter(server), "job": start_job(server)}
        time.sleep(LIVE_SECONDS)
        window = Window(browser)
        for picture in pictures:
            size = take(window.page, picture, f"{server.address}/console", names)
            print(f"console-{picture.name}.png: {size:,} bytes")
            is_too_large = is_too_large or size > MAX_BYTES
        window.close()
        stop.set()
        talker.join()
    return 1 if is_too_large else 0


if __name__ == "__main__":
    sys.exit(main())
