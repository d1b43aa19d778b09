"""CloudEvents as messages of brokers: the protocol bindings, in binary and structured mode."""

import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple
from urllib.parse import quote, unquote

import msgspec

from postroom.application.cloudevents.event import CloudEvent
from postroom.application.cloudevents.json_format import BATCH, read_json, write_json
from postroom.domain.errors import InvalidRequest

Mode = Literal["binary", "structured"]
STRUCTURED = "application/cloudevents+json"
PREFIXES = ("ce-", "ce_", "cloudevents_", "cloudevents:")
"""Prefixes of headers with attributes, of all bindings, in lower case."""

_SPECVERSIONS = frozenset(f"{prefix}specversion" for prefix in PREFIXES)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_STRUCTURED = re.compile(r"application/cloudevents(-batch)?(\+[^;\s]+)?\s*(?:;|\Z)", re.IGNORECASE)
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"\Z')
_ESCAPED = re.compile(r"\\(.)")
_SAFE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')
"""Characters of NATS headers that are not percent-encoded (NATS binding, section 3.1.3.2)."""


class Binding(msgspec.Struct, frozen=True):
    """The headers of a protocol binding.

    Arguments:
        prefix: begins the names of headers with attributes.
        content_type: the header with the media type of the message.
        data_content_type: the header with `datacontenttype` in binary mode.
        is_percent_encoded: whether values are percent-encoded.
    """

    prefix: str
    content_type: str
    data_content_type: str
    is_percent_encoded: bool = False


NATS = Binding("ce-", "Content-Type", "ce-datacontenttype", is_percent_encoded=True)
KAFKA = Binding("ce_", "content-type", "content-type")
AMQP = Binding("cloudEvents_", "Content-Type", "Content-Type")
MAILBOX = Binding("ce_", "Content-Type", "Content-Type")
"""Custom headers of a message; `Content-Type` is its content type."""


class CloudEventMessage(NamedTuple):
    """The payload and the headers of a message with a CloudEvent."""

    payload: bytes
    headers: dict[str, str]


def write_message(event: CloudEvent, binding: Binding, mode: Mode) -> CloudEventMessage:
    """Return the message of an event in binary or structured mode."""
    if mode == "structured":
        return CloudEventMessage(write_json(event), {binding.content_type: STRUCTURED})
    headers = {}
    for name, value in event.attributes.items():
        header = binding.data_content_type if name == "datacontenttype" else f"{binding.prefix}{name}"
        headers[header] = quote(value, safe=_SAFE) if binding.is_percent_encoded else value
    return CloudEventMessage(event.data or b"", headers)


def is_cloud_event(headers: Iterable[tuple[str, str]]) -> bool:
    """Return whether a message with these headers is a CloudEvent in any binding.

    It is one if its content type begins with `application/cloudevents`, or if a header is `specversion` with
    a prefix of `PREFIXES`. Names of headers are compared in lower case.
    """
    for header, value in headers:
        name = header.lower()
        if name in _SPECVERSIONS or (name == "content-type" and _STRUCTURED.match(value)):
            return True
    return False


def read_message(
    headers: Iterable[tuple[str, str]], data: bytes, *, is_percent_encoded: bool = False
) -> CloudEvent:
    """Return the event of a message; see `is_cloud_event`. Of a repeated header, the first counts.

    Arguments:
        is_percent_encoded: whether the values of headers are, as those of NATS.

    Raises: InvalidRequest if the message is no CloudEvent, an invalid one, or one in a batch or in another
        format than JSON.
    """
    content_type = ""
    attributes: dict[str, str] = {}
    for header, value in headers:
        name = header.lower()
        if name == "content-type":
            content_type = content_type or value
        elif prefix := next((each for each in PREFIXES if name.startswith(each)), None):
            attributes.setdefault(name[len(prefix) :], _decode(name, value) if is_percent_encoded else value)
    if match := _STRUCTURED.match(content_type):
        if match[1]:
            raise InvalidRequest(BATCH)
        if (match[2] or "+json").lower() != "+json":
            raise InvalidRequest(f"The CloudEvent has the format {match[0]!r}; only JSON can be read.")
        return read_json(data)
    if content_type:
        attributes.setdefault("datacontenttype", content_type)
    if (time := attributes.get("time", "")).isdecimal():
        attributes["time"] = _rfc_3339(time)
    return CloudEvent(attributes, data or None)


def _rfc_3339(milliseconds: str) -> str:
    """Return a timestamp of AMQP as RFC 3339 (AMQP binding, section 3.1.3.2); itself if it is too large."""
    try:
        return (_EPOCH + timedelta(milliseconds=int(milliseconds))).isoformat()
    except (OverflowError, ValueError):
        return milliseconds


def _decode(name: str, value: str) -> str:
    """Return the value of a NATS header without quotes and percent-encoding (section 3.1.3.2)."""
    if quoted := _QUOTED.match(value):
        value = _ESCAPED.sub(r"\1", quoted[1])
    try:
        return unquote(value, errors="strict") if "%" in value else value
    except UnicodeDecodeError:
        raise InvalidRequest(
            f"The header {name[:80]!r} of the CloudEvent is not percent-encoded UTF-8."
        ) from None
