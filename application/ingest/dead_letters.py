"""Dead letters of ingestion: the message unchanged, and the reason why it could not be stored (RFC-037)."""

import re

from blake3 import blake3

from postroom.application.ports.publisher import Publisher
from postroom.application.ports.source import SourceMessage

MESSAGE_ID = "Nats-Msg-Id"
REASON = "Postroom-Reason"
ORIGINAL_SUBJECT = "Postroom-Original-Subject"
ORIGINAL_SEQUENCE = "Postroom-Original-Sequence"
ORIGINAL_MESSAGE_ID = "Postroom-Original-Msg-Id"
ORIGINAL_KEY = "Postroom-Original-Key"
CONSUMER = "Postroom-Consumer"
DEAD_LETTER_ID = "Postroom-Dead-Letter-Id"
"""Header with an id that dead letters have in common if they were published twice, but for NATS."""
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
"""Headers of a dead letter in addition to those of the message."""

MAX_REASON_CHARS = 1_000
_NAME = re.compile(r"[!-9;-~]+\Z")
_LINE_BREAKS = re.compile(r"[\r\n]+")


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
