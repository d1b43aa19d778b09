"""`EraseMessages`: remove what a mailbox would still deliver of a subject whose key was destroyed."""

import asyncio
from collections.abc import Iterator, Sequence

from postroom.application.erasure.encryption import read_pseudonym
from postroom.application.mailbox.administer import CHUNK
from postroom.application.mailbox.engine import MailboxEngine
from postroom.domain.arguments import check_text
from postroom.domain.errors import InvalidRequest, Rejected
from postroom.domain.mailbox.commands import Erase
from postroom.domain.message import MessageSent


class EraseMessages:
    """Handler that removes the unsettled messages and dead letters of an erased subject, for the owner."""

    def __init__(self, engine: MailboxEngine) -> None:
        self._engine = engine

    async def __call__(self, pseudonym: str) -> int:
        """Remove the messages, and return how many there were.

        Consumers may still settle those in flight; none comes back or becomes a dead letter.

        Raises: InvalidRequest when the mailbox is not encrypted or the key was not destroyed,
            UnknownPseudonym, Unavailable.
        """
        check_text("pseudonym", pseudonym, 1)
        protection = self._engine.protection
        if protection is None:
            raise InvalidRequest(f"Mailbox {self._engine.name} has no settings of erasure; add them.")
        if (await asyncio.to_thread(protection.keys.resolve, [pseudonym]))[pseudonym] is not None:
            raise InvalidRequest(f"The key of {pseudonym} is not destroyed; run postroom erase.")
        # What was encrypted with the key before it was destroyed is in the mailbox after these two.
        await protection.wait_until_submitted()
        await self._engine.submit([Erase(frozenset())])
        positions = [each.position for each in self._engine.mailbox.messages.values()]
        removed = 0
        for some in _chunks(sorted(positions)):
            streams = await asyncio.to_thread(self._streams_of, pseudonym, some)
            if streams:
                (answer,) = await self._engine.submit([Erase(streams)])
                if isinstance(answer, Rejected):
                    raise answer
                assert isinstance(answer, int)
                removed += answer
        return removed

    def _streams_of(self, pseudonym: str, positions: Sequence[int]) -> frozenset[bytes]:
        sent = [each.event for each in self._engine.log.at_positions(positions).values()]
        return frozenset(
            each.stream
            for each in sent
            if isinstance(each, MessageSent) and read_pseudonym(each) == pseudonym
        )


def _chunks(positions: Sequence[int]) -> Iterator[Sequence[int]]:
    return (positions[start : start + CHUNK] for start in range(0, len(positions), CHUNK))
