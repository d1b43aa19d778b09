"""A store in memory, which is lost at the end of the process, and its locks and event handler."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from postroom.adapters.memory.amnesia_log import AmnesiaEventLog
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.ports.inbox import HandlerRequest
from postroom.application.ports.lease_store import Ownership
from postroom.application.ports.outbox import MessageCount
from postroom.application.telemetry import summarize
from postroom.domain.errors import DuplicateInboxMessage, InvalidRequest, MailboxOwned, PoisonMessage
from postroom.domain.inbox import PROCESSED, HandlerResult

POLL_SECONDS = 0.02


class MemoryOwnership(Ownership):
    """Ownership of mailboxes by the engines of this process."""

    directory = None

    def __init__(self) -> None:
        self._owners: dict[str, tuple[str, object]] = {}

    @asynccontextmanager
    async def acquire(self, mailbox: str, owner: str, wait_ms: int) -> AsyncIterator[None]:
        now = asyncio.get_running_loop().time
        deadline = now() + wait_ms / 1_000
        while mailbox in self._owners:
            if now() >= deadline:
                raise MailboxOwned(mailbox, self._owners[mailbox][0])
            await asyncio.sleep(POLL_SECONDS)
        ownership = self._owners[mailbox] = owner, object()
        try:
            yield
        finally:
            if self._owners.get(mailbox) is ownership:
                del self._owners[mailbox]

    async def owner(self, mailbox: str) -> str | None:
        return self._owners[mailbox][0] if mailbox in self._owners else None

    async def incumbent(self, mailbox: str) -> str | None:
        return repr(self._owners[mailbox]) if mailbox in self._owners else None

    async def evict(self, mailbox: str, incumbent: str) -> None:
        if await self.incumbent(mailbox) == incumbent:
            del self._owners[mailbox]


class MemoryStore:
    """A store in memory, without read models; see `Store`."""

    where = "memory:"

    def event_log(self, mailbox: str, **_: Any) -> MemoryEventLog:
        """Return a new, empty log; see `Store.event_log`."""
        return MemoryEventLog(mailbox)

    def message_outbox(self, _mailbox: str) -> None:
        """Return None: no transaction can record messages here; see `Store.message_outbox`."""

    def has_message_outbox(self) -> bool:
        """Return False; see `Store.has_message_outbox`."""
        return False

    def count_messages(self) -> list[MessageCount]:
        """Return an empty list: no transaction can record messages here; see `Store.count_messages`."""
        return []

    def ownership(self) -> MemoryOwnership:
        """Return the ownership of mailboxes; see `Store.ownership`."""
        return MemoryOwnership()

    identity = where

    def socket_path(self, mailbox: str) -> None:
        """Return None: other processes can't reach the store; see `Store.socket_path`."""

    def existing_log(self, mailbox: str) -> NoReturn:
        """Raise InvalidRequest: other processes can't read the store; see `Store.existing_log`."""
        raise InvalidRequest(
            "A store in memory can only be used by the process that opened it; name a file or a "
            "postgresql:// URL."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_, **__: self.existing_log("")


class AmnesiaStore(MemoryStore):
    """A store in memory whose logs forget settled messages."""

    def event_log(self, mailbox: str, **_: Any) -> AmnesiaEventLog:
        """Return a new, empty log; see `Store.event_log`."""
        return AmnesiaEventLog(mailbox)


class FunctionEventHandler:
    """Handler that calls a coroutine function, such as the result of `pipeline`.

    Returning means processed. `DuplicateInboxMessage` means already processed, `PoisonMessage` poison, and
    any other error is a failure that is retried.

    Arguments:
        timeout_ms: time after which the function is cancelled and has failed; None for no limit.
    """

    def __init__(
        self, function: Callable[[HandlerRequest], Awaitable[Any]], *, timeout_ms: int | None = None
    ) -> None:
        self._function = function
        self._timeout_ms = timeout_ms

    async def handle(self, request: HandlerRequest) -> HandlerResult:
        """Call the function and return the result."""
        limit = asyncio.timeout(self._timeout_ms and self._timeout_ms / 1_000)
        try:
            async with limit:
                await self._function(request)
        except DuplicateInboxMessage:
            return HandlerResult("already_processed")
        except PoisonMessage as error:
            return HandlerResult("poison", str(error))
        except Exception as error:
            if limit.expired():
                return HandlerResult("failed", f"the handler did not return within {self._timeout_ms:,} ms")
            return HandlerResult("failed", summarize(error))
        return PROCESSED

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""
