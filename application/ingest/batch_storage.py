"""Storage of one batch of messages; those that are refused become dead letters (RFC-037 error handling)."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from postroom.application.cloudevents import is_cloud_event, new_message, read_message
from postroom.application.ingest.file_import import map_message
from postroom.application.ingest.namespace import IngestCounts, IngestSettings
from postroom.application.ingest.redrive import DeadLetterSubject
from postroom.application.ingest.settlement import Settlement
from postroom.application.mailbox.send import SendEnvelopes
from postroom.application.messages import NewMessage
from postroom.application.ports.source import PayloadValidator, SourceMessage
from postroom.application.telemetry import logger
from postroom.application.tracing import INGEST, context_of, correlate, tracer
from postroom.domain.envelope.validation import EnvelopeProblem
from postroom.domain.errors import InvalidRequest, Rejected, Saturated

MAX_PROBLEMS = 100
"""Maximum number of distinct problems in one report; others are counted together."""


class Refusals(NamedTuple):
    """Messages that a full mailbox refused, and the time in ms after which to retry them."""

    messages: Sequence[SourceMessage]
    retry_after_ms: int


class BatchStorage:
    """Storage of batches in a mailbox; settles messages that are stored, or never will be.

    Arguments:
        settlement: receives the messages that are stored, dead-lettered or skipped.
    """

    def __init__(
        self,
        send_envelopes: SendEnvelopes,
        settings: IngestSettings,
        payloads: PayloadValidator | None,
        dead_letters: DeadLetterSubject | None,
        settlement: Settlement,
    ) -> None:
        self.counts = IngestCounts()
        self.settings = settings
        self._send_envelopes = send_envelopes
        self._payloads = payloads
        self._dead_letters = dead_letters
        self._settlement = settlement
        self._problems: dict[tuple[str, str], int] = {}

    def reconfigure(self, settings: IngestSettings, payloads: PayloadValidator | None) -> None:
        """Apply other settings and schemas from the next messages on."""
        self.settings = settings
        self._payloads = payloads

    async def store(self, messages: Sequence[SourceMessage]) -> Refusals:
        """Store messages together; dead-letter or skip those that are permanently refused.

        Raises:
            Saturated, Unavailable: nothing was settled, to be called again.
            Stopped: the ingester was stopped while the dead-letter subject could not be reached.
            Fenced, WrongPosition, MailboxOwned: another process owns the mailbox.
        """
        if any(message.is_tombstone for message in messages):
            self._skip_tombstones([message for message in messages if message.is_tombstone])
            messages = [message for message in messages if not message.is_tombstone]
        if not messages:
            return Refusals((), 0)
        links = (context_of(each.headers) for each in messages)
        with (
            correlate(),
            tracer().span(INGEST, (each.subject for each in messages), count=len(messages), links=links),
        ):
            return await self._store(messages)

    async def dead_letter(self, message: SourceMessage, reason: str) -> None:
        """Dead-letter a message; if that is impossible, defer its redelivery, so that it is not lost."""
        dead_letters = self._dead_letters
        if dead_letters is not None:
            try:
                await self._settlement.retry(lambda: dead_letters.publish(message, reason), [message])
            except InvalidRequest as error:
                logger().error("ingest.dead_letter_refused", **_log_fields(message), error=str(error))
            else:
                logger().warning("ingest.dead_lettered", **_log_fields(message), reason=reason)
                self.counts.dead_lettered += 1
                self._settlement.ack([message])
                return
        self.counts.deferred += 1
        self._settlement.defer(message)

    def report_problems(self) -> None:
        """Log the problems of messages that were stored in spite of them, one line per problem."""
        problems, self._problems = self._problems, {}
        for (kind, text), times in problems.items():
            logger().warning("ingest.problem", kind=kind, problem=text, messages=times)

    async def _store(self, messages: Sequence[SourceMessage]) -> Refusals:
        refused: list[tuple[SourceMessage, str]] = []
        contents: list[bytes | NewMessage] = []
        for message in messages:
            try:
                contents.append(self._content(message))
            except InvalidRequest as error:
                refused.append((message, str(error)))
        if refused:
            invalid = {id(message) for message, _ in refused}
            messages = [message for message in messages if id(message) not in invalid]
        problems: list[tuple[int, EnvelopeProblem]] = []
        answers = await self._send_envelopes(
            contents,
            sticky_keys=[message.sticky_key for message in messages],
            validation=self.settings.validation,
            payloads=self._payloads,
            on_problem=lambda index, problem: problems.append((index, problem)),
        )
        stored: list[SourceMessage] = []
        full: list[SourceMessage] = []
        retry_after_ms = duplicates = 0
        for message, answer in zip(messages, answers, strict=True):
            if not isinstance(answer, Rejected):
                duplicates += answer.duplicate
                stored.append(message)
            elif isinstance(answer, Saturated):
                full.append(message)
                retry_after_ms = max(retry_after_ms, answer.retry_after_ms, 1)
            else:
                refused.append((message, str(answer)))
        self.counts.duplicates += duplicates
        self.counts.stored += len(stored) - duplicates
        for index, problem in problems:
            if not isinstance(answers[index], Rejected):
                self._note_problem(problem.kind.value, problem.message)
        self._settlement.ack(stored)
        if refused:
            await asyncio.gather(*(self._refuse(message, reason) for message, reason in refused))
        return Refusals(full, retry_after_ms)

    def _content(self, message: SourceMessage) -> bytes | NewMessage:
        """Return the envelope of a message, or the message of a CloudEvent or of mapped data.

        Raises: InvalidRequest for an invalid CloudEvent, or a message that can't be mapped.
        """
        if self.settings.mapping is not None:
            return map_message(message, self.settings.mapping, has_places=self.settings.has_places)
        headers = message.header_pairs if message.headers else ()
        if not is_cloud_event(headers):
            return message.envelope
        event = read_message(headers, message.data, is_percent_encoded=self.settings.has_encoded_headers)
        return new_message(event)

    async def _refuse(self, message: SourceMessage, reason: str) -> None:
        """Dead-letter a malformed message, or without a dead-letter subject log and skip it (RFC-037)."""
        if self._dead_letters is not None:
            await self.dead_letter(message, reason)
        else:
            logger().warning("ingest.skipped", **_log_fields(message), reason=reason)
            self.counts.skipped += 1
            self._settlement.ack([message])

    def _skip_tombstones(self, tombstones: Sequence[SourceMessage]) -> None:
        """Count tombstones as skipped: the log is never edited, so they have no effect on it."""
        self.counts.skipped += len(tombstones)
        text = "A tombstone has no envelope; it was skipped."
        self._note_problem("tombstone", text, len(tombstones))
        self._settlement.ack(tombstones)

    def _note_problem(self, kind: str, text: str, count: int = 1) -> None:
        key = (kind, text)
        if key not in self._problems and len(self._problems) >= MAX_PROBLEMS:
            key = (kind, "and others")
        self._problems[key] = self._problems.get(key, 0) + count


def log_poison(message: SourceMessage, error: Exception) -> None:
    """Log a message that fails repeatedly while others are stored."""
    logger().error("ingest.poison", **_log_fields(message), error=str(error))


def _log_fields(message: SourceMessage) -> dict[str, object]:
    return {"subject": message.subject, "sequence": message.sequence, "bytes": len(message.data)}
