"""What network surfaces serve: a mailbox, the search, and whether the service is stopping."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

from postroom.application.delivery_window import DeliveryWindows
from postroom.application.ports.mailbox import Mailbox
from postroom.application.surface_metrics import SurfaceMetrics
from postroom.domain.policy import TopicPolicy
from postroom.domain.search import EventFilter, SearchPage


class Service(NamedTuple):
    """What network surfaces serve.

    Arguments:
        search: searches the read models of the store.
        default_policy: policy of topics that have none of their own.
        stopping: set when the service begins to stop; long polls and streams then end.
        streams: flow control of the streams of all surfaces.
        metrics: of all surfaces and of the mailbox.
    """

    mailbox: Mailbox
    search: Callable[[EventFilter], Awaitable[SearchPage]]
    default_policy: TopicPolicy
    stopping: asyncio.Event
    streams: DeliveryWindows
    metrics: SurfaceMetrics


Surface = Callable[[Service], AbstractAsyncContextManager[str]]
"""A network surface: it accepts requests within the context, and yields its address.

At the end it stops accepting, finishes the requests in progress within its time limit, and closes.
"""
