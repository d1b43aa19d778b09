"""Attributes of an event: headers that a service adds to those of the outbox."""

import re
from collections.abc import Mapping
from uuid import UUID

from postroom.application.outbox.message import (
    AGGREGATE_ID,
    AGGREGATE_TYPE,
    BAGGAGE,
    CAUSATION_ID,
    CONTENT_TYPE,
    CORRELATION_ID,
    EVENT_TYPE,
    EVENT_VERSION,
    MESSAGE_ID,
    OCCURRED_AT,
    TRACEPARENT,
    TRACESTATE,
)
from postroom.application.outbox.route import EVENT_ID
from postroom.domain.errors import InvalidOutboxEvent

MAX_ATTRIBUTES_BYTES = 16_384
"""Maximum size of all names and values; headers count towards the size limits of messages."""
RESERVED = frozenset(
    name.lower()
    for name in (
        MESSAGE_ID,
        EVENT_ID,
        EVENT_TYPE,
        EVENT_VERSION,
        OCCURRED_AT,
        AGGREGATE_TYPE,
        AGGREGATE_ID,
        CORRELATION_ID,
        CAUSATION_ID,
        CONTENT_TYPE,
        TRACEPARENT,
        TRACESTATE,
        BAGGAGE,
    )
)
"""Headers that the outbox sets itself, in lower case."""
RESERVED_PREFIXES = ("nats-", "postroom-")
"""Prefixes of headers that NATS and Postroom interpret; some of NATS remove earlier messages."""

# Names and values that every target accepts: an HTTP token, and one line of text.
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,255}\Z")
_VALUE = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]*\Z")


def check_attributes(id_: UUID, attributes: object, content_type: object) -> dict[str, str]:
    """Return the headers that an event adds.

    Arguments:
        id_: id of the event, for errors.
        content_type: value of the header `Content-Type`; None adds none.

    Raises: InvalidOutboxEvent for a name or value that a target would refuse, and for a reserved name.
    """
    if not isinstance(attributes, Mapping):
        raise InvalidOutboxEvent(f"Outbox event {id_}: attributes must map names to text.")
    headers: dict[str, str] = {}
    for name, value in attributes.items():
        if not isinstance(name, str) or not _NAME.match(name):
            raise InvalidOutboxEvent(
                f"Outbox event {id_}: the attribute name {name!r:.80} must have 1 to 255 letters, digits and "
                "-_.!#$%&'*+^`|~."
            )
        if name.lower() in RESERVED or name.lower().startswith(RESERVED_PREFIXES):
            raise InvalidOutboxEvent(
                f"Outbox event {id_}: the attribute {name!r:.80} is reserved for the outbox or a target; "
                "rename it."
            )
        headers[name] = _check_value(id_, f"attribute {name}", value)
    if content_type is not None:
        headers[CONTENT_TYPE] = _check_value(id_, "content_type", content_type)
    size = sum(len(name) + len(value.encode()) for name, value in headers.items())
    if size > MAX_ATTRIBUTES_BYTES:
        raise InvalidOutboxEvent(
            f"Outbox event {id_}: its attributes have {size:,} bytes, more than {MAX_ATTRIBUTES_BYTES:,}; "
            "put them into the payload."
        )
    return headers


def _check_value(id_: UUID, what: str, value: object) -> str:
    if not isinstance(value, str) or not _VALUE.match(value):
        raise InvalidOutboxEvent(
            f"Outbox event {id_}: the value of {what} must be text without control characters."
        )
    return value
