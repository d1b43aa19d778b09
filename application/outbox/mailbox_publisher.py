"""The publisher port over a mailbox: each event is sent as a message with the event's id."""

from collections.abc import Mapping

from blake3 import blake3

from postroom.application.messages import NewMessage
from postroom.application.operations.mailbox import Mailbox
from postroom.application.outbox.message import (
    AGGREGATE_ID,
    CAUSATION_ID,
    CONTENT_TYPE,
    CORRELATION_ID,
    TRACEPARENT,
)
from postroom.application.outbox.route import EVENT_ID
from postroom.application.ports.publisher import NotStored, PublishAck
from postroom.application.trace_context import read_context
from postroom.domain.errors import InvalidRequest, Rejected, Saturated, Unavailable
from postroom.domain.names import MAX_ID_CHARS

JSON = "application/json"
_OWN_FIELDS = (EVENT_ID, CONTENT_TYPE, CORRELATION_ID, CAUSATION_ID, TRACEPARENT)
"""Headers that correspond to fields of a message; all others become custom headers."""


class MailboxPublisher:
    """A publisher to the topics of a mailbox, which stores each event once.

    The header `Event-Id` becomes the message id, and `Aggregate-Id` the sticky key.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._count = 0
        self._is_closed = False

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> PublishAck:
        """Send one message to the topic `subject` and return when it is durable; see `Publisher.publish`.

        The sequence number counts the messages of this publisher.
        """
        name = self._mailbox.name
        if self._is_closed:
            raise Unavailable(f"Mailbox {name} can't be sent to: the publisher was closed.")
        try:
            sent = await self._mailbox.send_message(_message(subject, payload, headers))
        except Saturated as error:
            raise NotStored(f"Mailbox {name} is full: {error}", error.retry_after_ms) from error
        except InvalidRequest:
            raise
        except Rejected as error:
            raise InvalidRequest(f"Mailbox {name} refuses a message for topic {subject}: {error}") from error
        self._count += 1
        return PublishAck(name, self._count, sent.duplicate)

    async def close(self) -> None:
        """Refuse further messages; the mailbox stays open."""
        self._is_closed = True


def _message(topic: str, payload: bytes, headers: Mapping[str, str]) -> NewMessage:
    trace = read_context(headers.get(TRACEPARENT))
    return NewMessage(
        topic=topic,
        payload=payload,
        message_id=headers.get(EVENT_ID),
        sticky_key=_sticky_key(headers.get(AGGREGATE_ID)),
        attrs={name: value for name, value in headers.items() if name not in _OWN_FIELDS},
        content_type=headers.get(CONTENT_TYPE, JSON),
        correlation_id=headers.get(CORRELATION_ID),
        causality_parent=headers.get(CAUSATION_ID),
        trace_id=trace.trace_id if trace else None,
        span_id=trace.span_id if trace else None,
    )


def _sticky_key(aggregate_id: str | None) -> str | None:
    """Return the sticky key of an aggregate: its id, or a hash of a long id."""
    if aggregate_id is None or len(aggregate_id) <= MAX_ID_CHARS:
        return aggregate_id
    return f"b3:{blake3(aggregate_id.encode()).hexdigest()}"
