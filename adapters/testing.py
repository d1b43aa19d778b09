"""Support for the tests of applications: a mailbox in memory, and a pytest fixture.

Packaging maps this file to `postroom/testing.py`. With pytest-asyncio, import the fixture in `conftest.py`:

    from postroom.testing import memory_mailbox
"""

from collections.abc import AsyncIterator

from postroom.adapters.compose.testing import ManualClock, MemoryMailbox, open_memory_mailbox

__all__ = ["ManualClock", "MemoryMailbox", "memory_mailbox", "open_memory_mailbox"]

try:
    import pytest_asyncio
except ImportError:  # `open_memory_mailbox` works without
    pass
else:

    @pytest_asyncio.fixture
    async def memory_mailbox() -> AsyncIterator[MemoryMailbox]:
        """Open an empty mailbox in memory whose clock the test moves."""
        async with open_memory_mailbox() as mailbox:
            yield mailbox
