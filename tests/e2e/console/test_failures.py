"""Failures of an outbox as people retry them in a browser."""

import asyncio
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from postroom.application.outbox.relay import OutboxSettings
from postroom.domain.errors import InvalidRequest
from tests.e2e.console.conftest import Console
from tests.support.browser import DESKTOP, PHONE, Window, find_problems, overflow
from tests.support.memory_stream import MemoryStream
from tests.support.outboxes import CONTEXT, order_placed, record, relaying

if TYPE_CHECKING:
    from tests.support.fixtures import CreateDatabase

ERROR = "the stream is full of " + "x" * 900


async def _park_all(database: str) -> None:
    async def refuse(subject: str, payload: bytes) -> None:
        raise InvalidRequest(ERROR)

    settings = OutboxSettings(max_attempts=1)
    async with relaying(database, MemoryStream(refuse), settings=settings) as relay:
        await relay.relay_once()


@pytest.fixture(scope="module")
def console(
    tmp_path_factory: pytest.TempPathFactory,
    create_shared_database: "CreateDatabase",
    messaging_template: str,
) -> Iterator[Console]:
    """A console whose settings name an outbox with three parked events."""
    database = create_shared_database(messaging_template)
    record(database, *(order_placed("o" * 200 + str(number), 1) for number in range(3)))
    asyncio.run(_park_all(database))
    messaging = {"database": database, "context": CONTEXT}
    console = Console(tmp_path_factory.mktemp("console"), messaging=messaging)
    with console.server as server:
        console.base = f"{server.address}/console"
        yield console


def test_parked_events_are_found_and_retried(console: Console, windows: Callable[..., Window]) -> None:
    window = windows()
    assert console.sign_in(window, console.issue("ops"), "/outboxes")
    page = window.page
    page.get_by_role("link", name="Outbox sea: errors and retry").click()
    page.get_by_text("the stream is full").first.wait_for()
    assert page.get_by_text("parked", exact=True).count() == 3
    for width, height in (PHONE, DESKTOP):
        page.set_viewport_size({"width": width, "height": height})
        assert overflow(page) <= 0
        for name in ("Retry the chosen", "Retry all that are parked"):
            box = page.get_by_role("button", name=name).bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width
    assert find_problems(page) == []
    page.get_by_role("checkbox").first.check()
    page.get_by_role("button", name="Retry the chosen").click()
    page.get_by_text("1 event will be retried.").wait_for()
    assert page.get_by_text("parked", exact=True).count() == 2  # the other one is due, and has its error
    assert page.get_by_role("checkbox").count() == 3
    window.assert_quiet(console.host)


def test_they_are_retried_without_scripts(console: Console, windows: Callable[..., Window]) -> None:
    window = windows(runs_scripts=False)
    path = f"/outboxes/failures?kind=outbox&name={CONTEXT}"
    assert console.sign_in(window, console.issue("ops"), path)
    window.page.get_by_role("button", name="Retry all that are parked").click()
    window.page.get_by_text("will be retried.").wait_for()
    assert window.page.get_by_text("parked", exact=True).count() == 0
