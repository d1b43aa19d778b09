"""Dead letters of ingestion: a message as it came, and why it could not be stored (RFC-037)."""

import re

from blake3 import blake3

from postroom.application.ports.publisher import Publisher
from postroom.application.ports.source import SourceMessage

REASON = "Postroom-Reason"
ORIGINAL_SUBJECT = "Postroom-Original-Subject"
ORIGINAL_SEQUENCE = "Postroom-Original-Sequence"
CONSUMER = "Postroom-Consumer"

MAX_REASON_CHARS = 1_000
_NAME = re.compile(r"[!-9;-~]+\Z")
_LINE_BREAKS = re.compile(r"[\r\n]+")


class DeadLetterSubject:
    """Publish messages that can't be stored, with their bytes unchanged.

    Arguments:
        subject: where to; a stream has to keep it.
        consumer: the durable consumer that they were delivered by.
    """

    def __init__(self, publisher: Publisher, subject: str, consumer: str) -> None:
        self._publisher = publisher
        self._subject = subject
        self._consumer = consumer

    async def publish(self, message: SourceMessage, reason: str) -> None:
        """Publish a message and return once a stream has stored it; the same one again adds nothing.

        Raises: InvalidRequest when no stream takes it, Unavailable when it is unknown whether one did.
        """
        # What begins with Nats- orders the server to do something, such as to roll a subject up.
        headers = {
            name: _line(value)
            for name, value in message.headers.items()
            if _NAME.match(name) and not name.lower().startswith("nats-")
        }
        digest = blake3(message.data).hexdigest(16)
        headers |= {
            REASON: _line(reason)[:MAX_REASON_CHARS],
            ORIGINAL_SUBJECT: message.subject,
            ORIGINAL_SEQUENCE: message.sequence,
            CONSUMER: self._consumer,
            "Nats-Msg-Id": f"dlq:{self._consumer}:{message.sequence}:{digest}",
        }
        await self._publisher.publish(self._subject, message.data, headers)


def _line(text: str) -> str:
    return _LINE_BREAKS.sub(" ", text).strip()
