"""What a support person does for a customer, in clicks from the overview."""

import asyncio
import json
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.projections import LocalTaskRunner, rebuild_projections
from postroom.application.messages import NewMessage
from postroom.application.workers.worker import Worker
from postroom.domain.names import DEFAULT_MAILBOX
from postroom.domain.policy import TopicPolicy
from postroom.domain.search import BodyRules
from tests.e2e.console.conftest import Console
from tests.support.browser import Window

TOPIC = "shipments.requested"
ORDERS = 30
CUSTOMER = "Vanterpool"
FAILED = range(0, ORDERS, 3)
"""Numbers of the orders that lack an address."""
FIND, EXPLAIN, REDRIVE, CHECK = 3, 1, 3, 1
"""Clicks that each task may take; typing does not count."""


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """A console over a store with failed orders, whose payloads are indexed."""
    folder = tmp_path_factory.mktemp("support")
    console = Console(folder)
    asyncio.run(fail_orders(folder / "store.db"))
    rebuild_projections(
        str(folder / "store.db"), runner=LocalTaskRunner(), bodies=BodyRules(("shipments.*",))
    )
    with console.server as server:
        console.base = f"{server.address}/console"
        yield console


async def fail_orders(store: Path) -> None:
    """Send orders to a worker that fails for want of an address, or of stock."""
    worker = Worker("shop")

    @worker.consumer(TOPIC)
    def ship(order: dict[str, Any]) -> None:
        if order["number"] in FAILED:
            raise KeyError("address")
        if order["number"] % 3 == 1:
            raise ValueError("out of stock")

    async with open_mailbox(str(store), DEFAULT_MAILBOX) as mailbox:
        await mailbox.set_topic_policy(TOPIC, TopicPolicy(max_attempts=1))
        for number in range(ORDERS):
            body = {"number": number, "customer": CUSTOMER if number == FAILED[-1] else "Quispe"}
            await mailbox.send_message(
                NewMessage(
                    topic=TOPIC,
                    payload=json.dumps(body).encode(),
                    content_type="application/json",
                    message_id=f"order-of-{number}",
                )
            )
        await worker.run(mailbox, once=True)


class Clicks:
    """Counts clicks."""

    def __init__(self) -> None:
        self._count = 0

    def on(self, element: Locator) -> None:
        """Click on an element."""
        element.click()
        self._count += 1

    def take(self) -> int:
        """Return the number of clicks since the last call."""
        count, self._count = self._count, 0
        return count


def test_a_failed_order_is_found_explained_redriven_with_all_like_it_and_checked_in_few_clicks(
    console: Console, windows: Callable[..., Window]
) -> None:
    window, token, clicks = windows(), console.issue("ben@support"), Clicks()
    assert console.sign_in(window, token)
    page = window.page

    clicks.on(page.get_by_placeholder("Message id or words"))
    page.keyboard.type(CUSTOMER)
    page.keyboard.press("Enter")
    page.get_by_text("1 message matches").wait_for()
    clicks.on(page.get_by_role("link", name=f"order-of-{FAILED[-1]}", exact=True))
    page.get_by_role("heading", name="Why it died").wait_for()
    assert clicks.take() <= FIND

    page.get_by_text("KeyError: 'address'", exact=True).first.wait_for()
    page.get_by_text('raise KeyError("address")').wait_for()
    assert clicks.take() <= EXPLAIN

    clicks.on(page.get_by_role("link", name="Dead letters with the same error"))
    clicks.on(page.get_by_role("link", name="Redrive all that match…"))
    page.get_by_role("heading", name=f"Redrive {len(FAILED)} dead letters?").wait_for()
    clicks.on(page.get_by_role("button", name="Start the job"))
    page.get_by_text(f"{len(FAILED)} of {len(FAILED)}").first.wait_for()
    assert clicks.take() <= REDRIVE

    headers = {"Authorization": f"Bearer {token}"}
    body = {"topic": TOPIC, "max_messages": ORDERS}
    received = console.server.call("POST", "/v1/recv", body, headers).json["messages"]
    numbers = sorted(json.loads(b64decode(each["payload_b64"]))["number"] for each in received)
    assert numbers == list(FAILED)
    last = received.pop()
    acked = {"receipts": [each["receipt"] for each in received]}
    assert console.server.call("POST", "/v1/ack", acked, headers).status == 200
    nacked = {"receipts": [last["receipt"]], "reason": "no address again"}
    assert console.server.call("POST", "/v1/nack", nacked, headers).status == 200
    page.get_by_text(f"{len(received)} acked").wait_for()  # the page updates itself
    page.get_by_text("1 dead again").wait_for()
    assert clicks.take() <= CHECK
    window.assert_quiet(console.host)
