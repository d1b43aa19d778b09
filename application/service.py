"""What network surfaces serve: a mailbox, the search, and whether the service is stopping."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

from postroom.application.delivery_window import DeliveryWindows
from postroom.application.ports.mailbox import Mailbox
from postroom.domain.capability.rights import Operation
from postroom.domain.policy import TopicPolicy
from postroom.domain.search import EventFilter, SearchPage

Search = Callable[[EventFilter], Awaitable[SearchPage]]
"""Search of the read models of a store."""


class Session(NamedTuple):
    """What the bearer of one token may use (svc-mailbox I-8).

    Arguments:
        mailbox: refuses the calls that the token does not permit.
        search: searches the read models for what the token permits.
        require: raises Forbidden unless the token permits an operation on the mailbox as a whole.
    """

    mailbox: Mailbox
    search: Search
    require: Callable[[Operation], None]


OpenSession = Callable[[str | None], Awaitable[Session]]
"""Open the session of a token, or of a caller without one.

Raises: Unauthenticated when the token is missing or invalid.
"""


class Service(NamedTuple):
    """What network surfaces serve.

    Arguments:
        search: searches the read models of the store.
        default_policy: policy of topics that have none of their own.
        stopping: set when the service begins to stop; long polls and streams then end.
        streams: flow control of the streams of all surfaces.
    """

    mailbox: Mailbox
    search: Callable[[EventFilter], Awaitable[SearchPage]]
    default_policy: TopicPolicy
    stopping: asyncio.Event
    streams: DeliveryWindows


Surface = Callable[[Service], AbstractAsyncContextManager[str]]
"""A network surface: it accepts requests within the context, and yields its address.

At the end it stops accepting, finishes the requests in progress within its time limit, and closes.
"""
