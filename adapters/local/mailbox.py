"""The commands and queries of a mailbox that several processes share."""

from collections.abc import Callable
from typing import Any

from postroom.adapters.local.owner_thread import OwnerThread
from postroom.adapters.local.shared import OwnerConnection
from postroom.application.mailbox.administer import CommandHandlers
from postroom.application.mailbox.outgoing import NewId, name_job
from postroom.application.metrics import Metric
from postroom.application.operations.mailbox import Mailbox
from postroom.application.operations.operation import Arguments, Operation, derive
from postroom.application.page import Page
from postroom.application.service import Search
from postroom.domain.errors import Unavailable, WrongMode
from postroom.domain.search import EventFilter, FoundMessage, filter_of_mailbox


@derive(Mailbox)
class SharedMailbox(CommandHandlers, Mailbox):
    """A mailbox whose owner is this process or another; see `Mailbox`."""

    def __init__(
        self,
        owner: OwnerConnection | OwnerThread,
        wall: Callable[[], int],
        new_id: NewId,
        search: Search | None,
    ) -> None:
        """Take the owner, the clock, the generator of ids, and the search of read models, if any."""
        super().__init__(owner, wall, new_id)
        self._owner = owner
        self._new_id = new_id
        self._search = search or self.search_unsettled

    async def erase_messages(self, pseudonym: str) -> int:
        """Remove ready messages and dead letters of a subject whose key was destroyed, and count them."""
        count: int = await self._owner.query("erase_messages", pseudonym)
        return count

    async def search_messages(self, filter_: EventFilter, /) -> Page[FoundMessage]:
        return await self._search(filter_of_mailbox(filter_, self.name))

    async def search_unsettled(self, filter_: EventFilter, /) -> Page[FoundMessage]:
        """Return a page of the unsettled messages that match; they need no read models."""
        page: Page[FoundMessage] = await self._owner.query("search_unsettled", filter_)
        return page

    async def _call(self, operation: Operation, arguments: Arguments) -> Any:
        options = operation.stated(name_job(arguments, self._new_id))
        positional = [options.pop(name) for name in operation.positional]
        return await self._owner.query(operation.name, *positional, **options)

    async def measure(self) -> list[Metric]:
        """Return the metrics of the mailbox, as its owner measures them."""
        metrics: list[Metric] = await self._owner.query("measure")
        return metrics

    async def measure_owned(self) -> list[Metric]:
        """Return the metrics of the mailbox if this process owns it and can use it; else an empty list."""
        if not self._owner.is_here:
            return []
        try:
            return await self.measure()
        except Unavailable:
            return []

    async def check_mode(self, mode: str) -> None:
        """Raise WrongMode unless the mailbox has this mode."""
        actual: str = await self._owner.query("get_mode")
        if actual != mode:
            raise WrongMode(self.name, actual, mode)
