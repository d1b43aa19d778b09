"""The console of a SQLite store with dead letters of yesterday."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.system.clock import SystemClock
from tests.support.access import Controlled
from tests.support.dead_letters import MAILBOX, fill
from tests.support.servers.console import Browser, served_console

DAY_US = 24 * 3_600_000_000


class Desk(NamedTuple):
    """A mailbox with access control, and a browser that is signed in with all rights."""

    mailbox: OwnedMailbox
    place: Controlled[Any, Any]
    browser: Browser


def fill_store(folder: Path) -> Path:
    """Return the path of a new store with dead letters."""
    store = folder / "store.db"
    fill(store, start_us=time.time_ns() // 1_000 - DAY_US)
    return store


@asynccontextmanager
async def opened_desk(store: Path, **options: Any) -> AsyncIterator[Desk]:
    """Own the mailbox of a store, and serve its console; options as of `served_console`."""
    async with open_mailbox(str(store), MAILBOX) as mailbox:
        place = Controlled(mailbox, SystemClock())
        access = place.control.open_session
        async with served_console(mailbox, store=str(store), access=lambda *_: access, **options) as browser:
            await browser.sign_in(place.issue())
            yield Desk(mailbox, place, browser)
