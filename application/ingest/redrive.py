"""Operations on dead letters of ingestion: list, redrive to the original subject, discard."""

from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec

from postroom.application.ingest.dead_letters import (
    CONSUMER,
    DEAD_LETTER_HEADERS,
    MESSAGE_ID,
    ORIGINAL_SEQUENCE,
    ORIGINAL_SUBJECT,
    REASON,
)
from postroom.application.ports.dead_letter_queue import DeadLetterQueue
from postroom.application.ports.publisher import Publisher
from postroom.application.ports.source import SourceMessage
from postroom.domain.errors import InvalidRequest, NotFound

MAX_DEAD_LETTERS = 10_000


class IngestDeadLetter(msgspec.Struct, frozen=True):
    """A message that could not be stored.

    Arguments:
        sequence: the dead letter's sequence in its stream.
        original_subject, original_sequence, consumer: origin of the message.
        message: the dead letter with its headers and bytes.
    """

    sequence: str
    original_subject: str
    original_sequence: int
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
        return IngestDeadLetter(
            message.sequence,
            headers[ORIGINAL_SUBJECT],
            int(headers[ORIGINAL_SEQUENCE]),
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
    """

    def __init__(self, queue: DeadLetterQueue, publisher: Publisher, subject: str) -> None:
        self._queue = queue
        self._publisher = publisher
        self._subject = subject

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
            headers = {**letter.headers, MESSAGE_ID: f"redrive:{self._subject}:{letter.sequence}"}
            await self._publisher.publish(letter.original_subject, letter.message.data, headers)
            await self._queue.remove(letter.message)
            yield letter

    async def discard(self, letters: Sequence[IngestDeadLetter]) -> None:
        """Remove dead letters permanently."""
        for letter in letters:
            await self._queue.remove(letter.message)


def _in_order(letters: Sequence[IngestDeadLetter]) -> Sequence[IngestDeadLetter]:
    return sorted(letters, key=lambda letter: letter.original_sequence)
