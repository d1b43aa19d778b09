"""Access control over a mailbox in memory, under a clock that the test moves."""

from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import pytest

from postroom.adapters.compose.testing import ManualClock, MemoryMailbox, open_memory_mailbox
from postroom.adapters.key_rings import MemoryKeyRing
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.adapters.recorder import LogRecorder
from postroom.application.access.audit import AuditEntry
from postroom.application.access.authority import Authority
from postroom.application.access.capabilities import Capabilities
from postroom.application.access.control import AccessControl
from postroom.application.access.guard import AccessSettings
from postroom.application.operations.mailbox import Mailbox
from postroom.application.page import Page
from postroom.application.ports.event_log import Clock
from postroom.domain.capability.rights import Caveat, Right, Rights
from postroom.domain.errors import Forbidden, Unauthenticated
from postroom.domain.names import CAPABILITY_LOG
from postroom.domain.search import EventFilter, FoundMessage
from tests.support.messages import MAILBOX

M = TypeVar("M", bound=Mailbox)
C = TypeVar("C", bound=Clock)


class MemoryAuditLog:
    """An audit log in memory."""

    def __init__(self) -> None:
        self.entries: list[AuditEntry] = []

    async def record(self, entries: Sequence[AuditEntry], /) -> None:
        self.entries += entries


class Controlled(Generic[M, C]):
    """A mailbox in memory, the capabilities on it, and what was searched for and recorded."""

    def __init__(self, mailbox: M, clock: C, settings: AccessSettings | None = None) -> None:
        self.mailbox = mailbox
        self.clock = clock
        self.keys = MemoryKeyRing()
        self.log = MemoryEventLog(CAPABILITY_LOG)
        self.capabilities = Capabilities(LogRecorder(self.log, self.clock.wall), self.keys, self.clock.wall)
        self.capabilities.rotate()
        self.audit = MemoryAuditLog()
        self.filters: list[EventFilter] = []
        self.page: Page[FoundMessage] | None = None
        ttl_ms = (settings or AccessSettings()).cap_cache_ttl_ms
        authority = Authority(self.keys, self.capabilities, clock, ttl_ms)
        self.control = AccessControl(mailbox, self._search, authority, self.audit, clock, settings)

    async def _search(self, filter_: EventFilter) -> Page[FoundMessage]:
        self.filters.append(filter_)
        return self.page or await self.mailbox.search_messages(filter_)

    def issue(
        self,
        *caveats: Caveat,
        topics: Sequence[str] = ("*",),
        operations: Sequence[Right] = tuple(Right),
        mailboxes: Sequence[str] = ("*",),
        principal: str = "tester",
        lifetime_ms: int = 3_600_000,
    ) -> str:
        """Issue a capability and return its token."""
        rights = Rights(tuple(mailboxes), tuple(topics), tuple(operations))
        return self.capabilities.issue(principal, rights, caveats, lifetime_ms=lifetime_ms)


MemoryPlace = Controlled[MemoryMailbox, ManualClock]


@asynccontextmanager
async def controlled_mailbox(
    settings: AccessSettings | None = None,
) -> AsyncIterator["Controlled[MemoryMailbox, ManualClock]"]:
    """Open a mailbox in memory with access control."""
    async with open_memory_mailbox(MAILBOX) as mailbox:
        yield Controlled(mailbox, mailbox.clock, settings)


async def mailbox_of(place: MemoryPlace, *arguments: Any, **options: Any) -> Mailbox:
    """Issue a capability, and return the mailbox as its bearer may use it; see `Controlled.issue`."""
    return (await place.control.open_session(place.issue(*arguments, **options))).mailbox


async def reason_of(call: Awaitable[object]) -> str:
    """Return why access control refuses a call."""
    with pytest.raises((Unauthenticated, Forbidden)) as error:
        await call
    return str(error.value.reason)  # type: ignore[attr-defined] # of both


async def first(answers: Awaitable[Any]) -> Any:
    """Return the only answer of a call, or raise it if it is a refusal."""
    (answer,) = await answers
    if isinstance(answer, Exception):
        raise answer
    return answer
