"""A call of an action: the mailbox of its caller, and functions that actions share."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from postroom.adapters.sqs.attributes import ACCOUNT, Queue, find_queue, list_queues
from postroom.adapters.sqs.errors import SqsError, invalid_value, missing
from postroom.adapters.sqs.requests import Request
from postroom.application.operations.mailbox import Mailbox
from postroom.application.service import Grant, Service
from postroom.domain.capability.rights import Right


class Call(NamedTuple):
    """A request whose signature and parameters have been checked.

    Arguments:
        mailbox: the mailbox as the caller may use it.
        grant: rights of the caller.
        service: the server; its own mailbox looks up queues, as callers who may only send can't.
        base: URL of the server, as the client has it.
        closed: set when the client is gone.
    """

    mailbox: Mailbox
    grant: Grant
    service: Service
    base: str
    closed: asyncio.Event

    async def queue(self, url: str) -> Queue:
        """Return the queue of a URL; raise SqsError if it does not exist."""
        if not url:
            raise missing("QueueUrl")
        try:
            name = unquote(urlsplit(url).path.rstrip("/").rpartition("/")[2])
        except ValueError:  # a malformed host such as [x
            name = ""
        if not name:
            raise SqsError("InvalidAddress", f"The address {url[:200]} is not valid for this endpoint.")
        return await self.find(name)

    async def find(self, name: str) -> Queue:
        """Return a queue; raise SqsError if it does not exist or the caller may not know it."""
        self.check_covered(name)
        return find_queue(await self.service.mailbox.get_settings(), name)

    async def readable(self, url: str) -> Queue:
        """Return the queue of a URL; raise an error unless the caller may read its attributes."""
        queue = await self.queue(url)
        await self.grant.check(Right.READ_HEADERS)
        return queue

    async def list_all(self) -> list[Queue]:
        """Return the queues that the caller may know, sorted by name."""
        await self.grant.check(Right.READ_HEADERS)
        queues = list_queues(await self.service.mailbox.get_settings())
        return [each for each in queues if self.grant.covers(each.name)]

    def check_covered(self, name: str) -> None:
        """Raise SqsError for a queue that the capability does not cover, whether it exists or not."""
        if not self.grant.covers(name):
            raise SqsError("AccessDeniedException", f"The access key is not for the queue {name[:80]}.", 403)

    def url(self, name: str) -> str:
        """Return the URL of a queue."""
        return f"{self.base}/{ACCOUNT}/{quote(name, safe='')}"


class Action(NamedTuple):
    """An action: the type of its request, and its handler."""

    request: type[Request]
    handler: Callable[[Call, Any], Awaitable[Any]]


Actions = Mapping[str, Action]


def check_range(name: str, value: int | None, least: int, most: int) -> None:
    """Raise SqsError for a number out of its range."""
    if value is not None and not least <= value <= most:
        raise invalid_value(name, value, f"Must be between {least} and {most}, if provided.")
