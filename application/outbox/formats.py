"""Formats in which events are published: that of Postroom, and CloudEvents 1.0."""

import re
from typing import Literal, NamedTuple, Protocol
from urllib.parse import quote

import msgspec

from postroom.application.cloudevents.event import (
    ATTRIBUTES,
    BYTES,
    JSON,
    SPECVERSION,
    CloudEvent,
    is_attribute_name,
)
from postroom.application.cloudevents.message import PREFIXES, Binding, Mode, write_message
from postroom.application.outbox.message import (
    AGGREGATE_ID,
    AGGREGATE_TYPE,
    CONTENT_TYPE,
    MESSAGE_ID,
    headers_of,
    rfc_3339,
    trace_headers,
)
from postroom.domain.arguments import check_type
from postroom.domain.errors import InvalidRequest
from postroom.domain.outbox import OutboxEvent

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
    """Return the attributes of an event, without those of the service."""
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
                f"The attribute {name!r} would be read as one of the CloudEvent; name it differently."
            )
        if name == CONTENT_TYPE:
            continue
        is_extension = is_attribute_name(name) and name not in _OWN
        (extensions if is_extension else headers)[name] = value
    return extensions, headers
