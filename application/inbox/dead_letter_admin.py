"""Operations on dead letters: list, redrive, discard.

A redrive passes a dead letter to the handler directly, under its id and inbox row. Publishing it again would
put it behind all later messages, deliver it to every other consumer once more, and start a new history.
"""

from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import suppress
from typing import Literal
from uuid import UUID

import msgspec

from postroom.application.inbox.dead_letters import DeadLetterRecord, body_hash, read_dead_letter
from postroom.application.inbox.delivery import call_handler
from postroom.application.inbox.worker import lane_key, stream_position
from postroom.application.outbox.events import CORRELATION_ID
from postroom.application.ports.dead_letters import DeadLetterQueue
from postroom.application.ports.event_log import Clock
from postroom.application.ports.inbox import EventHandler, InboxRepository
from postroom.application.ports.source import SourceMessage
from postroom.application.tracing import REDRIVE, context_of, correlate, tracer
from postroom.domain.errors import DuplicateInboxMessage, InvalidRequest, NotFound
from postroom.domain.subject import check_token

MAX_DEAD_LETTERS = 10_000
"""Maximum number of dead letters read at a time, oldest first."""

RedriveOutcome = Literal["processed", "duplicate", "failed", "held"]


class InboxDeadLetter(msgspec.Struct, frozen=True):
    """A dead letter, and the message that carries it."""

    record: DeadLetterRecord
    message: SourceMessage


class RedriveResult(msgspec.Struct, frozen=True):
    """Outcome of redriving a dead letter, with the reason if it was not removed."""

    letter: InboxDeadLetter
    outcome: RedriveOutcome
    reason: str = ""


class DeadLetterAdmin:
    """Operations on the dead letters of a context.

    Arguments:
        handler: processes redriven messages; None if only listing and discarding.
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

    async def list(
        self, subject: str = ">", consumer: str | None = None, ids: Collection[str] = ()
    ) -> list[InboxDeadLetter]:
        """Return dead letters in the order of their messages in the stream.

        Arguments:
            subject: the original subjects, `*` and `>` allowed.
            consumer: name of a durable consumer; None returns the dead letters of all.
            ids: message ids or original `Nats-Msg-Id`s; empty returns all.

        Raises: NotFound if no dead letter has one of the ids.
        """
        letters = []
        for message in await self._queue.read(f"{self._context}.dlq.{subject}", MAX_DEAD_LETTERS):
            with suppress(InvalidRequest):  # published by another program
                letters.append(InboxDeadLetter(read_dead_letter(message), message))
        letters = [each for each in letters if consumer in (None, each.record.consumer)]
        if ids:
            letters = [each for each in letters if not _ids(each).isdisjoint(ids)]
            missing = set(ids).difference(*map(_ids, letters))
            if missing:
                raise NotFound(f"There is no dead letter {min(missing)}; see postroom inbox dlq list.")
        return sorted(letters, key=_sort_key)

    async def redrive(self, letters: Sequence[InboxDeadLetter]) -> AsyncGenerator[RedriveResult, None]:
        """Handle dead letters again, one after another, and remove those that are processed.

        If one fails, it and the later ones of its aggregate remain dead letters.

        Raises: InvalidRequest while another process changes dead letters.
        """
        failed: set[str] = set()
        async with self._inbox.exclusive("redrive") as locked:
            _require_lock(locked)
            for letter in letters:
                lane = lane_key(letter.record.message)
                if lane in failed:
                    yield RedriveResult(letter, "held", "an earlier one of its aggregate failed")
                    continue
                result = await self._redrive(letter)
                if result.outcome == "failed":
                    failed.add(lane)
                yield result

    async def discard(self, letters: Sequence[InboxDeadLetter], reason: str) -> None:
        """Remove dead letters without processing them, and store each in the history of its message.

        Raises: InvalidRequest while another process changes dead letters.
        """
        async with self._inbox.exclusive("redrive") as locked:
            _require_lock(locked)
            for letter in letters:
                message_id, now = UUID(letter.record.message_id), self._clock.wall()
                with suppress(NotFound):  # the inbox table was created after the dead letter
                    await self._inbox.mark_discarded(message_id, reason, letter.message.data, now)
                await self._queue.remove(letter.message)

    async def _redrive(self, letter: InboxDeadLetter) -> RedriveResult:
        message, id_ = letter.record.message, letter.record.message_id
        caller = context_of(message.headers)
        try:
            with (
                correlate(message.headers.get(CORRELATION_ID) or id_),
                tracer().span(REDRIVE, (message.subject,), message_id=id_, parent=caller),
            ):
                error = await self._deliver(letter.record)
        except DuplicateInboxMessage:
            await self._queue.remove(letter.message)
            return RedriveResult(letter, "duplicate")
        if error is not None:
            return RedriveResult(letter, "failed", error)
        await self._queue.remove(letter.message)
        return RedriveResult(letter, "processed")

    async def _deliver(self, record: DeadLetterRecord) -> str | None:
        """Pass the message of a dead letter to the handler; return the error, or None after success."""
        assert self._handler is not None
        message, message_id = await self._message(record), UUID(record.message_id)
        if message is None:
            return f"its data was too large for the dead letter and has left the stream: {record.omitted}"
        state = await self._inbox.insert(message_id, message.subject, self._clock.wall(), redrive=True)
        result = await call_handler(self._handler, message, message_id)
        now = max(self._clock.wall(), state.received_at)
        if result.outcome in ("processed", "already_processed"):
            await self._inbox.mark_processed(message_id, now)
            return None
        reason = result.reason or result.outcome
        await self._inbox.mark_dead_lettered(message_id, reason, now)
        return reason

    async def _message(self, record: DeadLetterRecord) -> SourceMessage | None:
        """Return the message of a dead letter, from the original stream if the dead letter omits its data."""
        if not record.omitted:
            return record.message
        with suppress(NotFound):
            message = await self._queue.find(record.original_subject, record.sequence)
            if message is not None and body_hash(message.data) == record.body_sha256:
                return message
        return None


def _ids(letter: InboxDeadLetter) -> set[str]:
    return {letter.record.message_id, letter.record.original_message_id}


def _sort_key(letter: InboxDeadLetter) -> tuple[str, tuple[int, ...]]:
    """Return the sort key of a dead letter: the position of its message in the stream."""
    return letter.record.stream, stream_position(letter.record.sequence)


def _require_lock(locked: bool) -> None:
    if not locked:
        raise InvalidRequest("Another process is changing dead letters; try again when it has finished.")
