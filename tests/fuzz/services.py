"""Mailboxes and services that the targets of surfaces call."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.application.mailbox.settle import DeliveryWindows
from postroom.application.operations.mailbox import Mailbox
from postroom.application.page import Page
from postroom.application.service import Service, SurfaceMetrics, WriteHealth, unrestricted
from postroom.domain.errors import NotFound
from postroom.domain.search import EventFilter, FoundMessage
from tests.fuzz.target import Check

MAILBOX = "acme@one"
INPUTS_PER_MAILBOX = 5_000
"""Inputs after which a mailbox in memory is replaced by an empty one."""


class MailboxCalls(ABC):
    """Calls of a surface over a mailbox in memory, which is replaced before it grows large."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._count = 0
        self._opened = AsyncExitStack()

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator[Check]:
        """Yield the check; the mailbox is closed with the context."""
        with asyncio.Runner() as runner:
            calls = cls(runner)
            try:
                yield calls.check
            finally:
                runner.run(calls._opened.aclose())

    def check(self, data: bytes) -> None:
        """Check an input; replace the mailbox after `INPUTS_PER_MAILBOX` of them."""
        if self._count % INPUTS_PER_MAILBOX == 0:
            self._runner.run(self._reopen())
        self._count += 1
        self.call(data)

    @abstractmethod
    def call(self, data: bytes) -> None:
        """Make the call of an input; raise an error for a defect only."""

    @abstractmethod
    async def serve(self, mailbox: OwnedMailbox, opened: AsyncExitStack) -> None:
        """Call this new mailbox from now on.

        Arguments:
            opened: contexts that are left before the mailbox is closed.
        """

    async def _reopen(self) -> None:
        await self._opened.aclose()
        await self.serve(
            await self._opened.enter_async_context(open_mailbox("memory:", MAILBOX)), self._opened
        )


async def call_app(app: Any, scope: dict[str, Any], body: bytes) -> tuple[int, bytes]:
    """Call an ASGI application; return the status and the body of its answer."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app({"type": "http", **scope, "state": {"connection": Connection()}}, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


class Connection:
    """The connection of a client that stays."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    def set_authenticated(self, is_authenticated: bool) -> None:
        """Accept a valid token; connections are not counted here."""


async def _search(filter_: EventFilter) -> Page[FoundMessage]:
    raise NotFound("There are no read models in memory.")


def stopping_service(mailbox: Mailbox) -> Service:
    """Return a service that stops, so that long polls and streams end at once."""
    stopping = asyncio.Event()
    stopping.set()
    session = unrestricted(mailbox, _search)
    return Service(mailbox, session, stopping, DeliveryWindows(), SurfaceMetrics(), WriteHealth())
