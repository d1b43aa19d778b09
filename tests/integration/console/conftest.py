from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.access import MemoryPlace, controlled_mailbox
from tests.support.messages import message
from tests.support.servers.console import Browser, served_console


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


def access_of(place: MemoryPlace) -> Any:
    """Return the access control of a place, for `served_console`."""
    return lambda mailbox, search: place.control.open_session
