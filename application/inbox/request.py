"""Requests to a handler, of messages from a relay, CloudEvents or any other publisher; their partitions."""

from functools import lru_cache
from hashlib import blake2b
from typing import Any
from uuid import UUID

import msgspec

from postroom.application.cloudevents import (
    JSON,
    CloudEvent,
    event_id,
    is_cloud_event,
    is_json_type,
    read_message,
)
from postroom.application.outbox.events import (
    AGGREGATE_ID,
    AGGREGATE_TYPE,
    CAUSATION_ID,
    CONTENT_TYPE,
    CORRELATION_ID,
    EVENT_TYPE,
    EVENT_VERSION,
    MESSAGE_ID,
    OCCURRED_AT,
    rfc_3339,
)
from postroom.application.ports.inbox import HandlerRequest
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
    missing message id is empty text. For a CloudEvent, they come from its attributes. A payload with a media
    type other than JSON is bytes; without a media type, it is JSON.

    Raises: Unreadable if a payload is not the JSON that it should be, or for an invalid CloudEvent.
    """
    headers = message.headers
    event = read_cloud_event(message)
    if event is not None:
        return _from_cloud_event(message, event)
    try:
        event_subject = EventSubject.parse(message.subject)
    except InvalidRequest:
        event_subject = None
    version = _version(headers.get(EVENT_VERSION, ""))
    payload, content_type = _payload(message, message.data, headers.get(CONTENT_TYPE) or JSON)
    return HandlerRequest(
        message_id=headers.get(MESSAGE_ID, ""),
        subject=message.subject,
        event_type=headers.get(EVENT_TYPE) or (event_subject.name if event_subject else message.subject),
        event_version=version if version is not None else event_subject.version if event_subject else 1,
        occurred_at=headers.get(OCCURRED_AT),
        correlation_id=headers.get(CORRELATION_ID),
        causation_id=headers.get(CAUSATION_ID),
        payload=payload,
        content_type=content_type,
    )


def read_cloud_event(message: SourceMessage) -> CloudEvent | None:
    """Return the CloudEvent in a message of NATS; None for a message of another format.

    Raises: Unreadable if it is invalid.
    """
    if EVENT_TYPE in message.headers or not is_cloud_event(message.header_pairs):
        return None
    return _read_cloud_event(tuple(message.header_pairs), message.data)


@lru_cache(maxsize=64)  # a delivery asks for it several times
def _read_cloud_event(headers: tuple[tuple[str, str], ...], data: bytes) -> CloudEvent:
    try:
        return read_message(headers, data, is_percent_encoded=True)
    except InvalidRequest as error:
        raise Unreadable(str(error)) from error


def _from_cloud_event(message: SourceMessage, event: CloudEvent) -> HandlerRequest:
    attributes = event.attributes
    try:
        time = event.time_us
    except InvalidRequest as error:
        raise Unreadable(str(error)) from error
    payload, content_type = _payload(message, event.data, event.media_type) if event.data else (None, None)
    return HandlerRequest(
        message_id=message.headers.get(MESSAGE_ID) or event_id(attributes["source"], attributes["id"]),
        subject=message.subject,
        event_type=attributes["type"],
        event_version=_version(attributes.get("eventversion", "")) or 1,
        occurred_at=None if time is None else rfc_3339(time),
        correlation_id=attributes.get("correlationid"),
        causation_id=attributes.get("causationid"),
        payload=payload,
        attributes=dict(attributes),
        content_type=content_type,
    )


def _version(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) <= MAX_VERSION_DIGITS else None


@lru_cache(maxsize=1_024)  # a delivery asks for it several times
def inbox_id(message_id: str) -> UUID:
    """Return the inbox id for a message id: the same UUID, or a UUID derived from other text.

    Raises: Unreadable if it is too long.
    """
    try:
        return UUID(bytes=message_stream("inbox", message_id))
    except InvalidRequest as error:
        raise Unreadable(str(error)) from error


def _payload(message: SourceMessage, data: bytes, media_type: str) -> tuple[Any, str | None]:
    """Return the value of JSON data, or other data with its media type."""
    if not is_json_type(media_type):
        return data, media_type
    try:
        return _decode(data), None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Unreadable(
            f"Message {message.sequence} of {message.subject} is not JSON: {error}; publish it as JSON, or "
            "with its media type as Content-Type."
        ) from error


PARTITIONS = 64
"""Number of partitions of a consumer; it can't change, as the queue stores each message's partition."""


def aggregate_key(message: SourceMessage) -> str | None:
    """Return a message's aggregate, or the source and partition key of a CloudEvent, or None."""
    headers = message.headers
    if AGGREGATE_ID in headers:
        return f"aggregate {headers.get(AGGREGATE_TYPE, '')}/{headers[AGGREGATE_ID]}"
    try:
        event = read_cloud_event(message)
    except Unreadable:
        return None
    key = event.attributes.get("partitionkey") if event is not None else None
    return None if event is None or not key else f"source {event.attributes['source']} {key}"


def lane_of(message: SourceMessage, message_id: UUID) -> int:
    """Return the hash of a message's lane: of the aggregate, or else of the message id."""
    key = aggregate_key(message) or f"id {message_id}"
    digest = blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def partition_of(lane: int) -> int:
    """Return the partition of a lane."""
    return lane % PARTITIONS


def share(workers: int) -> int:
    """Return the maximum number of partitions of each worker."""
    return -(-PARTITIONS // max(workers, 1))
