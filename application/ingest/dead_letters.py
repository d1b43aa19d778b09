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
CONSUMER = "Postroom-Consumer"
DEAD_LETTER_HEADERS = frozenset(
    {MESSAGE_ID, REASON, ORIGINAL_SUBJECT, ORIGINAL_SEQUENCE, ORIGINAL_MESSAGE_ID, CONSUMER}
)
"""Headers of a dead letter in addition to those of the message."""

MAX_REASON_CHARS = 1_000
_NAME = re.compile(r"[!-9;-~]+\Z")
_LINE_BREAKS = re.compile(r"[\r\n]+")


class DeadLetterSubject:
    """Publisher of messages that can't be stored, with their bytes unchanged.

    Arguments:
        subject: the dead-letter subject, which a stream must store.
        consumer: the durable consumer that delivered them.
    """

    def __init__(self, publisher: Publisher, subject: str, consumer: str) -> None:
        self._publisher = publisher
        self._subject = subject
        self._consumer = consumer

    async def publish(self, message: SourceMessage, reason: str) -> None:
        """Publish a message and return once a stream has stored it; repeated calls store it once.

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
        digest = blake3(message.data).hexdigest(16)
        headers |= {
            REASON: _line(reason)[:MAX_REASON_CHARS],
            ORIGINAL_SUBJECT: message.subject,
            ORIGINAL_SEQUENCE: message.sequence,
            CONSUMER: self._consumer,
            MESSAGE_ID: f"dlq:{self._consumer}:{message.sequence}:{digest}",
        }
        await self._publisher.publish(self._subject, message.data, headers)


def _line(text: str) -> str:
    return _LINE_BREAKS.sub(" ", text).strip()
