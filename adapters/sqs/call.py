"""A call of an action: the mailbox of its caller, and what the actions have in common."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from postroom.adapters.sqs.attributes import ACCOUNT, Queue, find_queue
from postroom.adapters.sqs.errors import SqsError, invalid_value, missing
from postroom.adapters.sqs.requests import Request
from postroom.application.operations.mailbox import Mailbox
from postroom.application.service import Service


class Call(NamedTuple):
    """A request whose signature and parameters have been checked.

    Arguments:
        mailbox: the mailbox as the caller may use it.
        service: the server; its own mailbox looks up queues, as callers who may only send can't.
        base: URL of the server, as the client has it.
        closed: set when the client is gone.
    """

    mailbox: Mailbox
    service: Service
    base: str
    closed: asyncio.Event

    async def queue(self, url: str) -> Queue:
        """Return the queue of a URL; raise SqsError for one that does not exist."""
        if not url:
            raise missing("QueueUrl")
        name = unquote(urlsplit(url).path).rstrip("/").rpartition("/")[2]
        if not name:
            raise SqsError("InvalidAddress", f"The address {url[:200]} is not valid for this endpoint.")
        return find_queue(await self.service.mailbox.get_settings(), name)

    def url(self, name: str) -> str:
        """Return the URL of a queue."""
        return f"{self.base}/{ACCOUNT}/{name}"


class Action(NamedTuple):
    """An action: the type of its request, and its handler."""

    request: type[Request]
    handler: Callable[[Call, Any], Awaitable[Any]]


Actions = Mapping[str, Action]


def check_range(name: str, value: int | None, least: int, most: int) -> None:
    """Raise SqsError for a number out of its range."""
    if value is not None and not least <= value <= most:
        raise invalid_value(name, value, f"Must be between {least} and {most}, if provided.")
