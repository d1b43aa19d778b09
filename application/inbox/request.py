"""Conversion of messages, from a relay or any other publisher, to requests to a handler."""

from functools import lru_cache
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
    """The message can't be read as a request (SDS-047 section 12), and no retry changes that."""


def read_request(message: SourceMessage) -> HandlerRequest:
    """Return the request to a handler (SDS-047 section 12).

    Event type and version are read from the relay's headers, or else from a subject of the form
    `{context}.event.{name}.v{n}`. For any other subject, the type is the whole subject and the version 1. A
    missing message id is empty text.

    Raises: Unreadable if the payload is not JSON.
    """
    headers = message.headers
    try:
        event_subject = EventSubject.parse(message.subject)
    except InvalidRequest:
        event_subject = None
    version = headers.get(EVENT_VERSION, "")
    has_version = version.isdecimal() and len(version) <= MAX_VERSION_DIGITS
    return HandlerRequest(
        message_id=headers.get(MESSAGE_ID, ""),
        subject=message.subject,
        event_type=headers.get(EVENT_TYPE) or (event_subject.name if event_subject else message.subject),
        event_version=int(version) if has_version else event_subject.version if event_subject else 1,
        occurred_at=headers.get(OCCURRED_AT),
        correlation_id=headers.get(CORRELATION_ID),
        causation_id=headers.get(CAUSATION_ID),
        payload=_payload(message),
    )


@lru_cache(maxsize=1_024)  # a delivery asks for it several times
def inbox_id(message_id: str) -> UUID:
    """Return the inbox id for a message id: the same UUID, or a UUID derived from other text.

    Raises: Unreadable if it is too long.
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
