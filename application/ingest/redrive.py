"""Dead letters of ingestion: list, redrive to the original subject, discard."""

import re
from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec
from blake3 import blake3

from postroom.application.ports.dead_letters import DeadLetterQueue
from postroom.application.ports.outbox import Publisher
from postroom.application.ports.source import SourceMessage
from postroom.domain.errors import InvalidRequest, NotFound

MESSAGE_ID = "Nats-Msg-Id"
REASON = "Postroom-Reason"
ORIGINAL_SUBJECT = "Postroom-Original-Subject"
ORIGINAL_SEQUENCE = "Postroom-Original-Sequence"
ORIGINAL_MESSAGE_ID = "Postroom-Original-Msg-Id"
ORIGINAL_KEY = "Postroom-Original-Key"
CONSUMER = "Postroom-Consumer"
DEAD_LETTER_ID = "Postroom-Dead-Letter-Id"
"""Header with the id of a dead letter, equal if it is published twice; NATS has a header of its own."""
DEAD_LETTER_HEADERS = frozenset(
    {
        MESSAGE_ID,
        REASON,
        ORIGINAL_SUBJECT,
        ORIGINAL_SEQUENCE,
        ORIGINAL_MESSAGE_ID,
        ORIGINAL_KEY,
        CONSUMER,
        DEAD_LETTER_ID,
    }
)
"""Headers of a dead letter in addition to the message's."""

MAX_REASON_CHARS = 1_000
_NAME = re.compile(r"[!-9;-~]+\Z")
_LINE_BREAKS = re.compile(r"[\r\n]+")
_SEQUENCE = re.compile(r"\d{1,20}(-\d{1,20})?\Z", re.ASCII)


class DeadLetterSubject:
    """Publisher of messages that can't be stored, with their bytes unchanged.

    Arguments:
        subject: the dead-letter subject, which a stream must store; a topic of Kafka, a stream of Redis, a
            routing key of RabbitMQ.
        consumer: the durable consumer or the consumer group that delivered them.
        id_header: the header with an id that is equal for repeated calls.
    """

    def __init__(
        self, publisher: Publisher, subject: str, consumer: str, *, id_header: str = MESSAGE_ID
    ) -> None:
        self._publisher = publisher
        self._subject = subject
        self._consumer = consumer
        self._id_header = id_header

    async def publish(self, message: SourceMessage, reason: str) -> None:
        """Publish a message and return once a stream has stored it.

        Repeated calls store it once in JetStream, and under the same id elsewhere.

        Raises: InvalidRequest when no stream accepts it, Unavailable when it is unknown whether one did.
        """
        # Headers that begin with Nats- are instructions to the server, such as Nats-Rollup.
        headers = {
            name: _line(value)
            for name, value in message.headers.items()
            if _NAME.match(name) and not name.lower().startswith("nats-") and name not in DEAD_LETTER_HEADERS
        }
        if original_id := _line(message.headers.get(MESSAGE_ID, "")):
            headers[ORIGINAL_MESSAGE_ID] = original_id
        if message.sticky_key is not None:
            headers[ORIGINAL_KEY] = _line(message.sticky_key)
        digest = blake3(message.data).hexdigest(16)
        headers |= {
            REASON: _line(reason)[:MAX_REASON_CHARS],
            ORIGINAL_SUBJECT: message.subject,
            ORIGINAL_SEQUENCE: message.sequence,
            CONSUMER: self._consumer,
            self._id_header: f"dlq:{self._consumer}:{message.sequence}:{digest}",
        }
        await self._publisher.publish(self._subject, message.data, headers)


def _line(text: str) -> str:
    return _LINE_BREAKS.sub(" ", text).strip()


MAX_DEAD_LETTERS = 10_000


class IngestDeadLetter(msgspec.Struct, frozen=True):
    """A message that could not be stored.

    Arguments:
        sequence: the dead letter's sequence in its stream.
        original_subject, original_sequence, consumer: origin of the message; a sequence of Redis is an id of
            an entry, such as `1700000000000-0`.
        message: the dead letter with its headers and bytes.
    """

    sequence: str
    original_subject: str
    original_sequence: int | str
    consumer: str
    reason: str
    message: SourceMessage

    @property
    def headers(self) -> Mapping[str, str]:
        """Return the headers of the original message."""
        return {k: v for k, v in self.message.headers.items() if k not in DEAD_LETTER_HEADERS}


def read_dead_letter(message: SourceMessage) -> IngestDeadLetter:
    """Return the dead letter in a message on the dead-letter subject.

    Raises: InvalidRequest if another program published it.
    """
    headers = message.headers
    try:
        sequence = headers[ORIGINAL_SEQUENCE]
        if not _SEQUENCE.match(sequence):
            raise ValueError
        return IngestDeadLetter(
            message.sequence,
            headers[ORIGINAL_SUBJECT],
            int(sequence) if sequence.isdecimal() else sequence,
            headers[CONSUMER],
            headers[REASON],
            message,
        )
    except (KeyError, ValueError) as error:
        raise InvalidRequest(
            f"Message {message.sequence} of {message.subject} is not a dead letter of postroom ingest; "
            "handle it with the program that published it."
        ) from error


class IngestDeadLetterAdmin:
    """Operations on the dead letters of an ingester.

    Arguments:
        publisher: publishes redriven messages.
        subject: the dead-letter subject.
        id_header: header with the id by which the broker recognises repetitions; None if it does not.
    """

    def __init__(
        self,
        queue: DeadLetterQueue,
        publisher: Publisher,
        subject: str,
        *,
        id_header: str | None = MESSAGE_ID,
    ) -> None:
        self._queue = queue
        self._publisher = publisher
        self._subject = subject
        self._id_header = id_header

    async def list(self, limit: int) -> Sequence[IngestDeadLetter]:
        """Return the oldest dead letters, in the order of their original stream."""
        letters = []
        for message in await self._queue.read(self._subject, min(limit, MAX_DEAD_LETTERS)):
            try:
                letters.append(read_dead_letter(message))
            except InvalidRequest:  # published by another program
                continue
        return _in_order(letters)

    async def find(self, *sequences: str) -> Sequence[IngestDeadLetter]:
        """Return dead letters by sequence, in the order of their original stream.

        Raises: NotFound if one does not exist, InvalidRequest if another program published it.
        """
        letters = []
        for sequence in dict.fromkeys(sequences):
            message = await self._queue.find(self._subject, sequence)
            if message is None:
                raise NotFound(
                    f"There is no dead letter {sequence} at {self._subject}; list them to see their numbers."
                )
            letters.append(read_dead_letter(message))
        return _in_order(letters)

    async def redrive(self, letters: Sequence[IngestDeadLetter]) -> AsyncIterator[IngestDeadLetter]:
        """Publish dead letters to their original subjects, one after another, and remove them.

        Every consumer of that subject receives them again.

        Raises: InvalidRequest when no stream accepts one, Unavailable when it is unknown whether one was
            stored; it and the later ones remain dead letters.
        """
        for letter in letters:
            # A new id: within its duplicate window, the stream would drop the message under its own id.
            headers = dict(letter.headers)
            if self._id_header is not None:
                headers[self._id_header] = f"redrive:{self._subject}:{letter.sequence}"
            await self._publisher.publish(letter.original_subject, letter.message.data, headers)
            await self._queue.remove(letter.message)
            yield letter

    async def discard(self, letters: Sequence[IngestDeadLetter]) -> None:
        """Remove dead letters permanently."""
        for letter in letters:
            await self._queue.remove(letter.message)


def _in_order(letters: Sequence[IngestDeadLetter]) -> Sequence[IngestDeadLetter]:
    return sorted(letters, key=lambda each: [int(part) for part in str(each.original_sequence).split("-")])
