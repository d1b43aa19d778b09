"""Ingestion of one batch of messages, through outages of the store (RFC-037 error handling).

An outage of the store must not dead-letter a whole stream. A failed batch is retried without limit; after
`max_retries` its messages are stored one by one, and only a message that fails repeatedly while others are
stored counts as poison.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import msgspec

from postroom.application.background import wait_at_most
from postroom.application.backoff import OutageBackoff
from postroom.application.correlation import correlate
from postroom.application.ingest.counts import IngestCounts
from postroom.application.ingest.dead_letters import DeadLetterSubject
from postroom.application.mailbox.send import SendEnvelopes
from postroom.application.ports.payload_validator import PayloadValidator
from postroom.application.ports.source import Source, SourceMessage
from postroom.application.telemetry import logger
from postroom.application.trace_context import context_of
from postroom.application.tracing import INGEST, tracer
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
from postroom.domain.policy import backoff_ms

DEFER_MS = 60_000
"""Delay until the redelivery of a message that can't be stored and has no dead-letter subject."""
MAX_PROBLEMS = 100
"""Maximum number of distinct problems in one report; others are counted together."""
DOWN_AFTER = 3
"""Number of failures in one pass, without a success, after which the store is assumed to be down."""
BACKOFF = OutageBackoff(100, 5_000)
_OWNERSHIP_LOST = (Fenced, WrongPosition, MailboxOwned)


class IngestSettings(msgspec.Struct, frozen=True):
    """Settings of an ingester.

    Arguments:
        batch_size: messages stored together, at most.
        validation: how strictly envelopes are validated.
        max_retries: retries of a batch before its messages are stored one by one.
    """

    batch_size: int = 100
    validation: ValidationMode = ValidationMode.STRICT
    max_retries: int = 3


class Stopped(Exception):  # not an error
    """The ingester was stopped while a batch could not be stored; the source redelivers its messages."""


class BatchIngester:
    """Ingestion of batches; several may be in progress at once.

    Arguments:
        jitter: returns uniform random numbers in [0, 1).
    """

    def __init__(
        self,
        source: Source,
        send_envelopes: SendEnvelopes,
        settings: IngestSettings,
        payloads: PayloadValidator | None,
        dead_letters: DeadLetterSubject | None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.counts = IngestCounts()
        self.stopping = asyncio.Event()
        self._source = source
        self._send_envelopes = send_envelopes
        self._settings = settings
        self._payloads = payloads
        self._dead_letters = dead_letters
        self._jitter = jitter
        self._problems: dict[tuple[str, str], int] = {}

    def reconfigure(self, settings: IngestSettings, payloads: PayloadValidator | None) -> None:
        """Apply other settings and schemas from the next messages on."""
        self._settings = settings
        self._payloads = payloads

    async def ingest(self, messages: Sequence[SourceMessage]) -> None:
        """Store messages, then settle them.

        Raises:
            Stopped: the ingester was stopped before the messages were stored; they are redelivered.
            Fenced, WrongPosition, MailboxOwned: another process owns the mailbox.
        """
        links = (context_of(each.headers) for each in messages)
        with (
            correlate(),
            tracer().span(INGEST, (each.subject for each in messages), count=len(messages), links=links),
        ):
            await self._ingest(messages)

    async def _ingest(self, messages: Sequence[SourceMessage]) -> None:
        batch = _Batch([message for message in messages if not message.is_tombstone])
        self._skip_tombstones(len(messages) - len(batch.messages))
        try:
            await self._store(batch)
        except (Stopped, PostroomError):
            with suppress(Unavailable):
                await self._source.nack(messages, 0)
            raise
        if batch.deferred:
            deferred = {message.sequence for message in batch.deferred}
            messages = [message for message in messages if message.sequence not in deferred]
            await self._retry(batch.deferred, lambda: self._source.nack(batch.deferred, DEFER_MS))
        await self._retry(messages, lambda: self._source.ack(messages))

    def report_problems(self) -> None:
        """Log the problems of messages that were stored in spite of them, one line per problem."""
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
            except _OWNERSHIP_LOST:
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
                await self._pause(pending, retry_after_ms or self._backoff_ms(failures))

    async def _send(
        self, batch: "_Batch", messages: Sequence[SourceMessage]
    ) -> tuple[Sequence[SourceMessage], int]:
        """Store messages; dead-letter or skip those that are permanently refused.

        Returns: the messages refused by a full mailbox, and the time in ms after which to retry them.
        """
        problems: list[tuple[int, EnvelopeProblem]] = []
        answers = await self._send_envelopes(
            [message.envelope for message in messages],
            sticky_keys=[message.sticky_key for message in messages],
            validation=self._settings.validation,
            payloads=self._payloads,
            on_problem=lambda index, problem: problems.append((index, problem)),
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
        for index, problem in problems:
            if not isinstance(answers[index], Rejected):
                self._note_problem(problem.kind.value, problem.message)
        return full, retry_after_ms

    def _note_problem(self, kind: str, text: str, count: int = 1) -> None:
        key = (kind, text)
        if key not in self._problems and len(self._problems) >= MAX_PROBLEMS:
            key = (kind, "and others")
        self._problems[key] = self._problems.get(key, 0) + count

    async def _send_singly(
        self, batch: "_Batch", messages: Sequence[SourceMessage]
    ) -> Sequence[SourceMessage]:
        """Store messages one by one, to isolate those that always fail; return those to retry."""
        remaining: list[SourceMessage] = []
        stored = False
        for at, message in enumerate(messages):
            if len(remaining) == DOWN_AFTER and not stored:  # try the others first next time
                return [*messages[at:], *remaining]
            try:
                full, _ = await self._send(batch, [message])
                remaining += full
                stored = True
            except _OWNERSHIP_LOST:
                raise
            except Unavailable as error:
                if batch.count_failure(message, self.counts.stored) > self._settings.max_retries:
                    logger().error("ingest.poison", **_log_fields(message), error=str(error))
                    await self._dead_letter(batch, message, str(error))
                else:
                    remaining.append(message)
        return remaining

    # -- messages that can't be stored ---

    def _skip_tombstones(self, count: int) -> None:
        """Count tombstones as skipped: the log is never edited, so they have no effect on it."""
        if count:
            self.counts.skipped += count
            self._note_problem("tombstone", "A tombstone has no envelope; it was skipped.", count)

    async def _refuse(self, batch: "_Batch", message: SourceMessage, reason: str) -> None:
        """Dead-letter a malformed message, or without a dead-letter subject log and skip it (RFC-037)."""
        if self._dead_letters is not None:
            await self._dead_letter(batch, message, reason)
        else:
            logger().warning("ingest.skipped", **_log_fields(message), reason=reason)
            self.counts.skipped += 1

    async def _dead_letter(self, batch: "_Batch", message: SourceMessage, reason: str) -> None:
        """Dead-letter a message; if that is impossible, defer its redelivery, so that it is not lost."""
        dead_letters = self._dead_letters
        if dead_letters is not None:
            try:
                await self._retry(batch.messages, lambda: dead_letters.publish(message, reason))
            except InvalidRequest as error:
                logger().error("ingest.dead_letter_refused", **_log_fields(message), error=str(error))
            else:
                logger().warning("ingest.dead_lettered", **_log_fields(message), reason=reason)
                self.counts.dead_lettered += 1
                return
        self.counts.deferred += 1
        batch.deferred.append(message)

    # -- retries ---

    async def _retry(self, messages: Sequence[SourceMessage], action: Callable[[], Awaitable[None]]) -> None:
        """Retry an action until the source is available."""
        failures = 0
        while True:
            try:
                return await action()
            except Unavailable as error:
                failures += 1
                logger().warning("ingest.source_unavailable", error=str(error))
                await self._pause(messages, self._backoff_ms(failures))

    async def _pause(self, messages: Sequence[SourceMessage], ms: int) -> None:
        """Wait, and extend the deadlines of these messages; raise `Stopped` when stopped."""
        if self.stopping.is_set():
            raise Stopped
        with suppress(Unavailable):
            await self._source.extend(messages)
        await wait_at_most(ms / 1_000, self.stopping.wait())

    def _backoff_ms(self, failures: int) -> int:
        return backoff_ms(BACKOFF, failures, self._jitter())


class _Batch:
    """A batch of messages, with the number of failures of each."""

    def __init__(self, messages: Sequence[SourceMessage]) -> None:
        self.messages = messages
        self.deferred: list[SourceMessage] = []
        self._failures: dict[str, tuple[int, int]] = {}

    def count_failure(self, message: SourceMessage, stored: int) -> int:
        """Count a failure of a single message if others were stored since the last one; return the count.

        Arguments:
            stored: number of messages stored so far, of all batches.
        """
        failures, stored_before = self._failures.get(message.sequence, (0, -1))
        if stored > stored_before:
            self._failures[message.sequence] = (failures + 1, stored)
            return failures + 1
        return failures


def _log_fields(message: SourceMessage) -> dict[str, object]:
    return {"subject": message.subject, "sequence": message.sequence, "bytes": len(message.data)}
