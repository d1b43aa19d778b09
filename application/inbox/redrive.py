"""Putting dead letters back: in the order of the stream they came from, one at a time (wolverine#986).

A dead letter is dealt with again under its own message id and in its own inbox row. It is not published
again: that would put it behind everything that came since, give it to every other consumer once more, and
start a new history.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Literal
from uuid import UUID

import msgspec

from postroom.application.inbox.dead_letters import DeadLetterRecord, read_dead_letter
from postroom.application.inbox.worker import ask, lane_of, place
from postroom.application.ports.clock import Clock
from postroom.application.ports.dead_letter_queue import DeadLetterQueue
from postroom.application.ports.event_handler import EventHandler
from postroom.application.ports.inbox_repository import InboxRepository
from postroom.application.ports.source import SourceMessage
from postroom.domain.errors import DuplicateInboxMessage, InvalidRequest
from postroom.domain.subject import check_token

MAX_LETTERS = 10_000
"""Dead letters looked at, at most, to find out which come first: the oldest of them."""

Ending = Literal["processed", "duplicate", "failed", "held"]


class Letter(msgspec.Struct, frozen=True):
    """A dead letter, and the message that carries it."""

    record: DeadLetterRecord
    message: SourceMessage


class Redriven(msgspec.Struct, frozen=True):
    """What became of a dead letter, and why it is still one if it is."""

    letter: Letter
    ending: Ending
    reason: str = ""


class DeadLetterOffice:
    """Look at the dead letters of a context, and put them back.

    Arguments:
        handler: who deals with them; None where they are only looked at.
    """

    def __init__(
        self,
        queue: DeadLetterQueue,
        inbox: InboxRepository,
        handler: EventHandler | None,
        clock: Clock,
        context: str,
    ) -> None:
        self._queue = queue
        self._inbox = inbox
        self._handler = handler
        self._clock = clock
        self._context = check_token(context, "The context")

    async def list(self, subject: str = ">", consumer: str | None = None) -> list[Letter]:
        """Return dead letters in the order in which their messages stood in their stream.

        Arguments:
            subject: the original subjects, `*` and `>` allowed.
            consumer: only those of one durable consumer.
        """
        letters = []
        for message in await self._queue.read(f"{self._context}.dlq.{subject}", MAX_LETTERS):
            try:
                letters.append(Letter(read_dead_letter(message), message))
            except InvalidRequest:  # somebody else's, who knows what to do with it
                continue
        return sorted((each for each in letters if consumer in (None, each.record.consumer)), key=_order)

    async def redrive(self, letters: Sequence[Letter]) -> AsyncIterator[Redriven]:
        """Deal with dead letters again, one after another, and remove those that are processed now.

        When one fails, it and the later ones of its aggregate stay.

        Raises: InvalidRequest when somebody else is redriving.
        """
        failed: set[str] = set()
        async with self._inbox.alone("redrive") as alone:
            if not alone:
                raise InvalidRequest(
                    "Somebody else is putting dead letters back just now; wait until that is done."
                )
            for letter in letters:
                lane = lane_of(letter.record.message)
                if lane in failed:
                    yield Redriven(letter, "held", "an earlier one of its aggregate failed")
                    continue
                redriven = await self._redrive(letter)
                if redriven.ending == "failed":
                    failed.add(lane)
                yield redriven

    async def _redrive(self, letter: Letter) -> Redriven:
        try:
            reason = await self._deliver(letter.record)
        except DuplicateInboxMessage:
            ending: Ending = "duplicate"
        else:
            if reason is not None:
                return Redriven(letter, "failed", reason)
            ending = "processed"
        await self._queue.remove(letter.message)
        return Redriven(letter, ending)

    async def _deliver(self, record: DeadLetterRecord) -> str | None:
        """Hand a dead letter to its handler, and return why that failed, if it did."""
        assert self._handler is not None
        message, message_id = record.message, UUID(record.message_id)
        known = await self._inbox.insert(message_id, message.subject, self._clock.wall(), redrive=True)
        result = await ask(self._handler, message, message_id)
        now = max(self._clock.wall(), known.received_at)
        if result.outcome in ("processed", "already_processed"):
            await self._inbox.mark_processed(message_id, now)
            return None
        reason = result.reason or result.outcome
        await self._inbox.mark_dead_lettered(message_id, reason, now)
        return reason


def _order(letter: Letter) -> tuple[str, tuple[int, ...]]:
    """Return what sorts letters as their messages stood in their stream."""
    return letter.record.stream, place(letter.record.sequence)
