"""The owner's side of the members of a namespace: calls of clients that know fewer are refused (ADR 0063)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from postroom.application.cluster.members_history import read_history
from postroom.application.ports.mailbox import Mailbox
from postroom.domain.errors import StaleMembers
from postroom.domain.namespace.members import RESERVED_TOPIC, MembersRecord


class MembersFence:
    """Admits the calls of clients that know all members which the mailbox has recorded.

    While members are recorded, no other call is in progress: of the messages of a client with fewer members,
    none comes after the record.

    Arguments:
        mailbox: as its owner may use it.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._records: tuple[MembersRecord, ...] | None = None
        self._calls = 0
        self._recording = asyncio.Lock()
        self._idle = asyncio.Event()

    @asynccontextmanager
    async def admit(self, generation: int | None, topic: str = "") -> AsyncIterator[None]:
        """Make a call that changes the mailbox within the context.

        Arguments:
            generation: number of members that the caller knows; None for a caller that named the mailbox.
            topic: of the messages that it sends.

        Raises: StaleMembers when the mailbox has recorded more.
        """
        if topic == RESERVED_TOPIC:
            async with self._recording:
                while self._calls:
                    self._idle.clear()
                    await self._idle.wait()
                try:
                    yield
                finally:
                    self._records = None
            return
        if generation is None:
            yield
            return
        async with self._recording:
            await self._check(generation)
            self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._idle.set()

    async def _check(self, generation: int) -> None:
        if self._records is None:
            self._records = await read_history(self._mailbox, self._mailbox.name.partition("@")[0])
        recorded = self._records[-1].generation if self._records else 0
        if generation < recorded:
            raise StaleMembers(
                f"The namespace of {self._mailbox.name} has {recorded} mailboxes, but the call chose one of "
                f"{generation}; ask a proxy for its members, and choose again."
            )
