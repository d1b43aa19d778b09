from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from postroom.adapters.compose import OwnedMailbox
from tests.integration.console.dead_letter_store import Desk, fill_store, opened_desk
from tests.support.access import Controlled, MemoryPlace, controlled_mailbox
from tests.support.clocks import ManualClock
from tests.support.messages import message
from tests.support.servers.console import Browser, served_console
from tests.support.stores import copy_store, live, sqlite_place


@pytest.fixture
async def place() -> AsyncIterator[MemoryPlace]:
    """A mailbox in memory with access control and some messages."""
    async with controlled_mailbox() as place:
        await place.mailbox.send_message(message())
        await place.mailbox.send_message(message(topic="payments"))
        yield place


@pytest.fixture
async def browser(place: MemoryPlace) -> AsyncIterator[Browser]:
    """A browser at the console of `place`, which asks for tokens; see `Controlled.issue`."""
    async with served_console(place.mailbox, access=access_of(place)) as browser:
        yield browser


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with dead letters, to be copied and left alone."""
    return fill_store(tmp_path_factory.mktemp("dead"))


@pytest.fixture
async def desk(filled: Path, tmp_path: Path) -> AsyncIterator[Desk]:
    """A console over a copy of `filled`."""
    async with opened_desk(copy_store(filled, tmp_path)) as desk:
        yield desk


def access_of(place: Controlled[Any, Any]) -> Any:
    """Return the access control of a place, for `served_console`."""
    return lambda mailbox, search: place.control.open_session


@pytest.fixture
async def stored(tmp_path: Path) -> AsyncIterator[Controlled[OwnedMailbox, ManualClock]]:
    """A mailbox with some messages in the SQLite file `store.db` of `tmp_path`, with access control."""
    at = sqlite_place(tmp_path)
    async with at.open() as mailbox:
        place = Controlled(mailbox, at.clock)
        await live(mailbox, 9)
        at.clock.advance(60_000)
        await mailbox.send_message(message(topic="payments", message_id="foreign"))
        await mailbox.send_message(message(topic="payments", message_id="a/b?<b>\u202e"))
        yield place


@pytest.fixture
async def stored_browser(
    stored: Controlled[OwnedMailbox, ManualClock], tmp_path: Path
) -> AsyncIterator[Browser]:
    """A browser at the console of `stored`."""
    store = str(tmp_path / "store.db")
    async with served_console(stored.mailbox, store=store, access=access_of(stored)) as browser:
        yield browser
