"""Support for the tests of applications: a mailbox in memory, and a pytest fixture.

Packaging maps this file to `postroom/testing.py`. With pytest-asyncio, the fixture `memory_mailbox` needs no
import: pytest finds it by an entry point.
"""

from contextlib import suppress

from postroom.adapters.compose.testing import ManualClock, MemoryMailbox, open_memory_mailbox

__all__ = ["ManualClock", "MemoryMailbox", "memory_mailbox", "open_memory_mailbox"]

with suppress(ImportError):  # `open_memory_mailbox` works without pytest-asyncio
    from postroom.adapters.pytest_plugin import memory_mailbox
