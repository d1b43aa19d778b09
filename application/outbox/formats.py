"""Formats in which events are published (Postroom's, CloudEvents 1.0), their attributes and routes."""

import re
import string
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol
from urllib.parse import quote
from uuid import UUID

import msgspec

from postroom.application.cloudevents import (
    ATTRIBUTES,
    BYTES,
    JSON,
    PREFIXES,
    SPECVERSION,
    Binding,
    CloudEvent,
    Mode,
    is_attribute_name,
    write_message,
)
from postroom.application.outbox.events import (
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
    headers_of,
    rfc_3339,
    trace_headers,
)
from postroom.domain.arguments import check_type
from postroom.domain.errors import InvalidOutboxEvent, InvalidRequest
from postroom.domain.outbox import OutboxEvent
from postroom.domain.subject import EventSubject, check_token

FormatName = Literal["postroom", "cloudevents-binary", "cloudevents-structured"]
_MODES: dict[str, Mode] = {"cloudevents-binary": "binary", "cloudevents-structured": "structured"}
_URI = re.compile(r"[!-~]+\Z")


class OutgoingMessage(NamedTuple):
    """The payload and the headers of an event's message."""

    payload: bytes
    headers: dict[str, str]


class MessageFormat(Protocol):
    """The form in which events are published."""

    def write(self, event: OutboxEvent, payload: bytes) -> OutgoingMessage:
        """Return the message of an event; raises InvalidRequest if the format can't express the event."""


class PostroomFormat(msgspec.Struct, frozen=True):
    """The payload as data, all else in headers.

    Arguments:
        id_header: the header with the event's id.
    """

    id_header: str = MESSAGE_ID

    def write(self, event: OutboxEvent, payload: bytes) -> OutgoingMessage:
        """Return the message of an event."""
        headers = headers_of(event)
        headers[self.id_header] = headers.pop(MESSAGE_ID)
        return OutgoingMessage(payload, headers)


class CloudEventsFormat(msgspec.Struct, frozen=True):
    """CloudEvents 1.0 in binary or structured mode (ADR 0091).

    Id and aggregate are in the headers of Postroom, too: targets deduplicate and order by them.

    Arguments:
        source: URI reference, the `source` of every event.
        id_header: the header with the event's id.

    Raises: InvalidRequest for a source that is not a URI reference.
    """

    mode: Mode
    binding: Binding
    source: str
    id_header: str = MESSAGE_ID

    def __post_init__(self) -> None:
        if not _URI.match(check_type("source", self.source, str)):
            raise InvalidRequest(
                f"The source {self.source!r} is not a URI; pass --source, or set source under [outbox], such "
                "as https://shop.example/orders or /shop."
            )

    def write(self, event: OutboxEvent, payload: bytes) -> OutgoingMessage:
        """Return the message of an event.

        Raises: InvalidRequest for an attribute that begins with a prefix of CloudEvents, or a value with
            characters that CloudEvents exclude.
        """
        extensions, headers = _split(event.attributes)
        attributes = _attributes(event, self.source) | extensions
        message = write_message(CloudEvent(attributes, payload), self.binding, self.mode)
        headers |= {
            self.id_header: str(event.id),
            AGGREGATE_TYPE: event.aggregate_type,
            AGGREGATE_ID: event.aggregate_id,
        }
        return OutgoingMessage(message.payload, headers | trace_headers(event) | message.headers)


def new_format(
    name: FormatName, context: str, binding: Binding, *, id_header: str = MESSAGE_ID, source: str = ""
) -> MessageFormat:
    """Return a format by its name in the settings.

    Arguments:
        context: used as source of events (`/context`) if `source` is not set.

    Raises: InvalidRequest for another name, or a source that is not a URI reference.
    """
    if name == "postroom":
        return PostroomFormat(id_header)
    if check_type("format", name, str) not in _MODES:
        raise InvalidRequest(f"The format {name!r} is not one of postroom, {', '.join(_MODES)}.")
    return CloudEventsFormat(_MODES[name], binding, source or f"/{quote(context)}", id_header)


def _attributes(event: OutboxEvent, source: str) -> dict[str, str]:
    """Return the attributes of an event, without the service's."""
    assert event.occurred_at is not None, "rows without a readable time are parked, not published"
    ids = event.correlation
    attributes = {
        "specversion": SPECVERSION,
        "id": str(event.id),
        "source": source,
        "type": event.event_type,
        "subject": f"{event.aggregate_type}/{event.aggregate_id}",
        "time": rfc_3339(event.occurred_at),
        "datacontenttype": event.attributes.get(CONTENT_TYPE) or (BYTES if event.is_binary else JSON),
        "partitionkey": event.aggregate_id,
        "eventversion": str(event.event_version),
    }
    extensions = {
        "correlationid": ids.correlation_id,
        "causationid": ids.causation_id,
        "traceparent": event.traceparent,
        "tracestate": event.tracestate,
    }
    return attributes | {name: value for name, value in extensions.items() if value is not None}


_OWN = (ATTRIBUTES - {"dataschema"}) | {"partitionkey", "eventversion", "correlationid", "causationid"}
"""Attributes of an event that the service can't set."""


def _split(attributes: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the attributes that are extensions of CloudEvents, and those that are headers."""
    extensions: dict[str, str] = {}
    headers: dict[str, str] = {}
    for name, value in attributes.items():
        if name.lower().startswith(PREFIXES):
            raise InvalidRequest(
                f"The attribute {name!r} would be read as an attribute of the CloudEvent itself; name it "
                "differently."
            )
        if name == CONTENT_TYPE:
            continue
        is_extension = is_attribute_name(name) and name not in _OWN
        (extensions if is_extension else headers)[name] = value
    return extensions, headers


SUBJECT = "{context}.event.{event_type}.v{event_version}"
"""The form of SDS-047: one subject for each type of event."""
TOPIC = "{context}.{aggregate_type}"
"""One topic per type of aggregate, so that the events of an aggregate keep their order."""
EVENT_ID = "Event-Id"
"""Header with the id of the event, for targets without a standard header for it."""
FIELDS = ("context", "aggregate_type", "event_type", "event_version")


class EventRoute(msgspec.Struct, frozen=True):
    """The route of the events of a context.

    Arguments:
        context: the bounded context, one token of a subject.
        template: subject, topic or routing key, with `FIELDS` in braces.

    Raises: InvalidRequest for a context that is not a token, or an invalid template.
    """

    context: str
    template: str = SUBJECT

    def __post_init__(self) -> None:
        check_token(self.context, "The context")
        if not self.template or not all(map(_is_field, _fields(self.template))):
            raise InvalidRequest(
                f"The topic {self.template!r} is not a valid template; write text with any of "
                f"{', '.join(f'{{{field}}}' for field in FIELDS)}."
            )

    def name_of(self, event: OutboxEvent) -> str:
        """Return the name for an event; raise InvalidRequest if its type is not a token."""
        return _fill(self.template, self.context, event.aggregate_type, event.event_type, event.event_version)


def _fields(template: str) -> list[str | None]:
    """Return the placeholders of a template, with None for a malformed one."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError:
        return [None]
    return [
        None if spec or conversion else field for _, field, spec, conversion in parts if field is not None
    ]


def _is_field(field: str | None) -> bool:
    return field in FIELDS


@lru_cache(maxsize=4_096)
def _fill(template: str, context: str, aggregate_type: str, event_type: str, event_version: int) -> str:
    subject = EventSubject(context, event_type, event_version)
    if template == SUBJECT:
        return subject.value
    return template.format(
        context=context, aggregate_type=aggregate_type, event_type=event_type, event_version=event_version
    )


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
