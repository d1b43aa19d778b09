"""Support for the tests of applications: a mailbox in memory, and pytest fixtures.

With pytest-asyncio, the fixtures `memory_mailbox` and `time_travel` need no import: pytest finds them by an
entry point. It loads this module wherever Postroom is installed, so it imports nothing of Postroom before
something is used.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from postroom.adapters.compose.testing import ManualClock, MemoryMailbox, open_memory_mailbox

__all__ = ["ManualClock", "MemoryMailbox", "memory_mailbox", "open_memory_mailbox", "time_travel"]

try:
    import pytest_asyncio
except ImportError:  # the fixtures are missing then; `open_memory_mailbox` works without
    pass
else:

    @pytest_asyncio.fixture
    async def memory_mailbox() -> "AsyncIterator[MemoryMailbox]":
        """Open an empty mailbox in memory whose clock the test moves."""
        from postroom.adapters.compose.testing import open_memory_mailbox

        async with open_memory_mailbox() as mailbox:
            yield mailbox

    @pytest_asyncio.fixture
    async def time_travel(
        memory_mailbox: "MemoryMailbox",
    ) -> Callable[[float | str | timedelta], Awaitable[None]]:
        """Return a function that moves the clock of `memory_mailbox`, by seconds or a text such as `1h`."""
        return memory_mailbox.clock.advance


if not TYPE_CHECKING:  # a type checker would believe that any name exists

    def __getattr__(name: str) -> Any:
        """Import a public name."""
        if name not in ("ManualClock", "MemoryMailbox", "open_memory_mailbox"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from postroom.adapters.compose import testing

        return getattr(testing, name)
