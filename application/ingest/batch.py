"""Storing one batch of messages, whatever the store does meanwhile (RFC-037 error handling).

A store that is down must not make a whole stream into dead letters. So a batch that fails is tried again for
as long as it takes; after `max_retries` its messages are stored one by one, and only one that fails again and
again, while others are stored, is poison.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import msgspec

from postroom.application.commands.send import SendEnvelopes
from postroom.application.ingest.counts import Ingested
from postroom.application.ingest.dead_letters import DeadLetterSubject
from postroom.application.ports.payload_validator import PayloadValidator
from postroom.application.ports.source import Source, SourceMessage
from postroom.application.telemetry import logger
from postroom.domain.envelope.validation import EnvelopeProblem, ValidationMode
from postroom.domain.errors import (
    Fenced,
    InvalidRequest,
    MailboxOwned,
    PostroomError,
    Rejected,
    Saturated,
    Unavailable,
    WrongPosition,
)

PAUSE_BASE_MS, PAUSE_MAX_MS = 100, 5_000
"""Between attempts to reach a store or a stream that is down."""
ASIDE_MS = 60_000
"""When a message comes again that can't be stored, and for which there is no dead-letter subject."""
MAX_PROBLEMS = 100
"""Different problems that are told at once; what else there is is only counted."""
DOWN_AFTER = 3
"""How many messages of one pass fail, and none is stored, before the store counts as down."""
_OVER = (Fenced, WrongPosition, MailboxOwned)


class IngestSettings(msgspec.Struct, frozen=True):
    """Say how messages are taken in.

    Arguments:
        batch_size: messages stored together, at most.
        validation: how closely to look at envelopes.
        max_retries: how often storing is tried again before messages are stored one by one.
    """

    batch_size: int = 100
    validation: ValidationMode = ValidationMode.STRICT
    max_retries: int = 3


class Stopped(Exception):  # no error: it was asked for
    """The ingester was told to stop while a batch could not be stored; the source has its messages still."""


class Batches:
    """What all batches of an ingester share."""

    def __init__(
        self,
        source: Source,
        send_envelopes: SendEnvelopes,
        settings: IngestSettings,
        payloads: PayloadValidator | None,
        dead_letters: DeadLetterSubject | None,
    ) -> None:
        self.counts = Ingested()
        self.stopping = asyncio.Event()
        self._source = source
        self._send_envelopes = send_envelopes
        self._settings = settings
        self._payloads = payloads
        self._dead_letters = dead_letters
        self._problems: dict[tuple[str, str], int] = {}

    async def ingest(self, messages: Sequence[SourceMessage]) -> None:
        """Store messages, then settle them.

        Raises:
            Stopped: it was told to stop before they were stored; they come again.
            Fenced, WrongPosition, MailboxOwned: somebody else owns the mailbox.
        """
        batch = _Batch(messages)
        try:
            await self._store(batch)
        except (Stopped, PostroomError):
            with suppress(Unavailable):
                await self._source.nak(messages, 0)
            raise
        if batch.aside:
            aside = {message.sequence for message in batch.aside}
            messages = [message for message in messages if message.sequence not in aside]
            await self._persist(batch.aside, lambda: self._source.nak(batch.aside, ASIDE_MS))
        await self._persist(messages, lambda: self._source.ack(messages))

    def report_problems(self) -> None:
        """Log what was wrong with messages that were stored all the same, once a kind and topic."""
        problems, self._problems = self._problems, {}
        for (kind, text), times in problems.items():
            logger().warning("ingest.problem", kind=kind, problem=text, messages=times)

    # -- storing ---

    async def _store(self, batch: "_Batch") -> None:
        pending, failures = batch.messages, 0
        while pending:
            try:
                if failures <= self._settings.max_retries:
                    full, retry_after_ms = await self._send(batch, pending)
                else:
                    full, retry_after_ms = await self._send_singly(batch, pending), 0
            except _OVER:
                raise
            except Saturated as saturated:
                full, retry_after_ms = pending, saturated.retry_after_ms
            except Unavailable as error:
                logger().warning("ingest.store_unavailable", error=str(error), messages=len(pending))
                full, retry_after_ms = pending, 0
            pending = full
            if pending:
                if not retry_after_ms:
                    failures += 1
                    self.counts.retries += 1
                await self._pause(pending, retry_after_ms or _backoff_ms(failures))

    async def _send(
        self, batch: "_Batch", messages: Sequence[SourceMessage]
    ) -> tuple[Sequence[SourceMessage], int]:
        """Store messages and deal with those that are refused for good.

        Returns: those that a full mailbox has no room for, and when it may have, in ms.
        """
        found: list[tuple[int, EnvelopeProblem]] = []
        answers = await self._send_envelopes(
            [message.data for message in messages],
            validation=self._settings.validation,
            payloads=self._payloads,
            on_problem=lambda index, problem: found.append((index, problem)),
        )
        full: list[SourceMessage] = []
        retry_after_ms = duplicates = stored = 0
        for message, answer in zip(messages, answers, strict=True):
            if not isinstance(answer, Rejected):
                duplicates += answer.duplicate
                stored += 1
            elif isinstance(answer, Saturated):
                full.append(message)
                retry_after_ms = max(retry_after_ms, answer.retry_after_ms, 1)
            else:
                await self._refuse(batch, message, str(answer))
        self.counts.duplicates += duplicates
        self.counts.stored += stored - duplicates
        for index, problem in found:
            if not isinstance(answers[index], Rejected):
                key = (problem.kind.value, problem.message)
                if key not in self._problems and len(self._problems) >= MAX_PROBLEMS:
                    key = (problem.kind.value, "and others")
                self._problems[key] = self._problems.get(key, 0) + 1
        return full, retry_after_ms

    async def _send_singly(
        self, batch: "_Batch", messages: Sequence[SourceMessage]
    ) -> Sequence[SourceMessage]:
        """Store messages one by one, to find those that fail while others don't; return what is left."""
        left: list[SourceMessage] = []
        stored = False
        for at, message in enumerate(messages):
            if len(left) == DOWN_AFTER and not stored:  # begin with others next time
                return [*messages[at:], *left]
            try:
                full, _ = await self._send(batch, [message])
                left += full
                stored = True
            except _OVER:
                raise
            except Unavailable as error:
                if batch.note_failure(message, self.counts.stored) > self._settings.max_retries:
                    logger().error("ingest.poison", **_described(message), error=str(error))
                    await self._set_apart(batch, message, str(error))
                else:
                    left.append(message)
        return left

    # -- what can't be stored ---

    async def _refuse(self, batch: "_Batch", message: SourceMessage, reason: str) -> None:
        """Dead-letter a message that is refused for what it is, or skip it (RFC-037: skip, log a warning)."""
        if self._dead_letters is not None:
            await self._set_apart(batch, message, reason)
        else:
            logger().warning("ingest.skipped", **_described(message), reason=reason)
            self.counts.skipped += 1

    async def _set_apart(self, batch: "_Batch", message: SourceMessage, reason: str) -> None:
        """Dead-letter a message, or leave it to the source where that isn't possible: never drop it."""
        dead_letters = self._dead_letters
        if dead_letters is not None:
            try:
                await self._persist(batch.messages, lambda: dead_letters.publish(message, reason))
            except InvalidRequest as error:
                logger().error("ingest.dead_letter_refused", **_described(message), error=str(error))
            else:
                logger().warning("ingest.dead_lettered", **_described(message), reason=reason)
                self.counts.dead_lettered += 1
                return
        self.counts.set_aside += 1
        batch.aside.append(message)

    # -- patience ---

    async def _persist(self, messages: Sequence[SourceMessage], act: Callable[[], Awaitable[None]]) -> None:
        """Do what may fail while NATS is away, until it is done."""
        failures = 0
        while True:
            try:
                return await act()
            except Unavailable as error:
                failures += 1
                logger().warning("ingest.source_unavailable", error=str(error))
                await self._pause(messages, _backoff_ms(failures))

    async def _pause(self, messages: Sequence[SourceMessage], ms: int) -> None:
        """Wait, and let the source know that it need not deliver these messages again."""
        if self.stopping.is_set():
            raise Stopped
        with suppress(Unavailable):
            await self._source.keep(messages)
        with suppress(TimeoutError):
            async with asyncio.timeout(ms / 1_000):
                await self.stopping.wait()


class _Batch:
    """Messages that came together, and what is known of those that make trouble."""

    def __init__(self, messages: Sequence[SourceMessage]) -> None:
        self.messages = messages
        self.aside: list[SourceMessage] = []
        self._failures: dict[str, tuple[int, int]] = {}

    def note_failure(self, message: SourceMessage, stored: int) -> int:
        """Return how often a message failed alone, not counting when nothing else was stored in between.

        Arguments:
            stored: how many messages have been stored so far, of all batches.
        """
        failures, stored_then = self._failures.get(message.sequence, (0, -1))
        if stored > stored_then:
            self._failures[message.sequence] = (failures + 1, stored)
            return failures + 1
        return failures


def _described(message: SourceMessage) -> dict[str, object]:
    return {"subject": message.subject, "sequence": message.sequence, "bytes": len(message.data)}


def _backoff_ms(failures: int) -> int:
    return min(PAUSE_MAX_MS, PAUSE_BASE_MS << min(failures - 1, 10))
