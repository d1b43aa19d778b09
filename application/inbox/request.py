"""What a handler is asked, read from a message as the relay publishes it, or as any other publisher does."""

from typing import Any
from uuid import UUID

import msgspec

from postroom.application.outbox.message import (
    CAUSATION_ID,
    CORRELATION_ID,
    EVENT_TYPE,
    EVENT_VERSION,
    MESSAGE_ID,
    OCCURRED_AT,
)
from postroom.application.ports.event_handler import HandlerRequest
from postroom.application.ports.source import SourceMessage
from postroom.domain.errors import InvalidRequest
from postroom.domain.names import message_stream
from postroom.domain.subject import EventSubject

MAX_VERSION_DIGITS = 9
_decode = msgspec.json.Decoder().decode


class Unreadable(InvalidRequest):
    """A message isn't what SDS-047 section 12 can hand to a handler; it won't get better by trying again."""


def read_request(message: SourceMessage) -> HandlerRequest:
    """Return what the handler is asked about a message (SDS-047 section 12).

    Type and version of the event come from the relay's headers, else from the subject
    `{context}.event.{name}.v{n}`, else the type is the whole subject. The message id is empty where there is
    none.

    Raises: Unreadable when the payload is not JSON.
    """
    headers = message.headers
    try:
        named = EventSubject.parse(message.subject)
    except InvalidRequest:
        named = None
    version = headers.get(EVENT_VERSION, "")
    has_version = version.isdecimal() and len(version) <= MAX_VERSION_DIGITS
    return HandlerRequest(
        message_id=headers.get(MESSAGE_ID, ""),
        subject=message.subject,
        event_type=headers.get(EVENT_TYPE) or (named.name if named else message.subject),
        event_version=int(version) if has_version else named.version if named else 1,
        occurred_at=headers.get(OCCURRED_AT),
        correlation_id=headers.get(CORRELATION_ID),
        causation_id=headers.get(CAUSATION_ID),
        payload=_payload(message),
    )


def inbox_id(message_id: str) -> UUID:
    """Return the id under which an inbox knows a message: its own, or a UUID named after one that is none.

    Raises: Unreadable when it is too long.
    """
    try:
        return UUID(bytes=message_stream("inbox", message_id))
    except InvalidRequest as error:
        raise Unreadable(str(error)) from error


def _payload(message: SourceMessage) -> Any:
    try:
        return _decode(message.data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Unreadable(
            f"Message {message.sequence} of {message.subject} is not JSON: {error}; publish events as JSON."
        ) from error
