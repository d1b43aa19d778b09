"""The list of members at an owner, which refuses clients with a stale list (ADR 0063)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from postroom.application.cluster.members_history import read_cutoffs, read_history, record_members
from postroom.application.operations.mailbox import Mailbox
from postroom.domain.errors import StaleMembers, Unavailable
from postroom.domain.namespace.members import RESERVED_TOPIC, MembersRecord

RETRY_MS = 500


class MembersFence:
    """Admits the calls of clients that know the members which the mailbox has recorded, as all others have.

    While members are recorded, no other call is in progress: of the messages of a client with fewer members,
    none comes after the record.

    Arguments:
        mailbox: as its owner may use it.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._namespace = mailbox.name.partition("@")[0]
        self._records: tuple[MembersRecord, ...] | None = None
        self._joined = 0
        """Generation that all members are recorded to have recorded."""
        self._calls = 0
        self._recording = asyncio.Lock()
        self._idle = asyncio.Event()

    @asynccontextmanager
    async def admit(self, generation: int | None, topic: str = "") -> AsyncIterator[None]:
        """Make a call that changes the mailbox within the context.

        Arguments:
            generation: number of members that the caller knows; None for a caller that named the mailbox.
            topic: of the messages that it sends.

        Raises: StaleMembers when the mailbox has recorded more; Unavailable when others may not have recorded
            as many yet.
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

    async def check(self, generation: int | None) -> None:
        """Check a call that may wait, as `admit` does when it begins."""
        if generation is not None:
            async with self._recording:
                await self._check(generation)

    async def _check(self, generation: int) -> None:
        if self._records is None:
            self._records = await read_history(self._mailbox, self._namespace)
        if not self._records and generation == 1:
            # Whoever adds another mailbox must see that this one was used alone.
            await record_members(self._mailbox, 0, (self._mailbox.name,))
            self._records = await read_history(self._mailbox, self._namespace)
        recorded = self._records[-1].generation if self._records else 0
        if generation == recorded and await self._is_joined(recorded):
            return
        if generation < recorded:
            raise StaleMembers(
                f"Namespace {self._namespace} has {recorded} mailboxes, but the call chose one of "
                f"{generation}; ask a proxy for its members, and choose again."
            )
        raise Unavailable(
            f"The {generation} mailboxes of namespace {self._namespace} have not recorded each other yet; "
            "repeat the call, or use the namespace once with a token for all topics.",
            RETRY_MS,
        )

    async def _is_joined(self, generation: int) -> bool:
        if self._joined != generation and (
            generation == 1 or await read_cutoffs(self._mailbox, generation) is not None
        ):
            self._joined = generation
        return self._joined == generation
