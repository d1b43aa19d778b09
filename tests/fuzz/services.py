"""Services that the targets of network surfaces call."""

import asyncio

from postroom.application.mailbox.settle import DeliveryWindows
from postroom.application.metrics import SurfaceMetrics
from postroom.application.operations.mailbox import Mailbox
from postroom.application.page import Page
from postroom.application.service import Service, WriteHealth, unrestricted
from postroom.domain.errors import NotFound
from postroom.domain.search import EventFilter, FoundMessage

INPUTS_PER_MAILBOX = 5_000
"""Inputs after which a mailbox in memory is replaced by an empty one."""


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
