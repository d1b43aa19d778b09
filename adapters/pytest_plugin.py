"""Plugin of pytest with the fixture `memory_mailbox`, which pytest finds by an entry point.

It imports nothing of Postroom before a test uses the fixture: pytest loads it wherever Postroom is installed.
"""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from postroom.adapters.compose.testing import MemoryMailbox

try:
    import pytest_asyncio
except ImportError:  # the fixture is missing then; `open_memory_mailbox` works without
    pass
else:

    @pytest_asyncio.fixture
    async def memory_mailbox() -> "AsyncIterator[MemoryMailbox]":
        """Open an empty mailbox in memory whose clock the test moves."""
        from postroom.adapters.compose.testing import open_memory_mailbox

        async with open_memory_mailbox() as mailbox:
            yield mailbox
