"""CloudEvents 1.0: events, their JSON format, and as messages."""

import re
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import quote, unquote

import msgspec
from blake3 import blake3

from postroom.application.messages import NewMessage
from postroom.application.tracing import read_context
from postroom.domain.errors import InvalidRequest
from postroom.domain.names import MAX_ID_CHARS, check_topic

SPECVERSION = "1.0"
REQUIRED = ("id", "source", "type")
"""Attributes that every event has, besides `specversion`."""
ATTRIBUTES = frozenset({*REQUIRED, "specversion", "datacontenttype", "dataschema", "subject", "time"})
"""Attributes that the specification defines; all others are extensions."""
JSON = "application/json"
BYTES = "application/octet-stream"

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NAME = re.compile(r"[a-z0-9]+\Z")
_VALUE = re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]*\Z")
_JSON_TYPE = re.compile(r"[^/;]+/(?:[^;]+\+)?json\s*(?:;|\Z)", re.IGNORECASE)


class NotACloudEvent(InvalidRequest):
    """The attributes belong to something else."""


class CloudEvent(msgspec.Struct, frozen=True):
    """A CloudEvent (CloudEvents 1.0, section 3).

    Arguments:
        attributes: context attributes and extensions by name, in their canonical string form.
        data: bytes of the media type `datacontenttype`; None if the event has no data.

    Raises: InvalidRequest if an attribute is missing, or has an invalid name or value.
    """

    attributes: Mapping[str, str]
    data: bytes | None = None

    def __post_init__(self) -> None:
        if "specversion" not in self.attributes:
            raise NotACloudEvent("This is not a CloudEvent: it has no specversion.")
        version = self.attributes["specversion"]
        if version != SPECVERSION:
            raise InvalidRequest(f"The CloudEvent is of version {version[:20]!r}; only 1.0 can be read.")
        for name in REQUIRED:
            if not self.attributes.get(name):
                raise InvalidRequest(f"The CloudEvent has no {name}.")
        for name, value in self.attributes.items():
            if not is_attribute_name(name):
                raise InvalidRequest(
                    f"The CloudEvent has an attribute {name[:80]!r}; names are lower-case letters and digits."
                )
            if not _VALUE.match(value):
                raise InvalidRequest(f"The {name[:80]} of the CloudEvent has control characters.")
            if not value and name in ATTRIBUTES:
                raise InvalidRequest(f"The {name} of the CloudEvent is empty; omit it.")

    @property
    def time_us(self) -> int | None:
        """Return the `time` in µs since 1970 UTC; None without one.

        Raises: InvalidRequest if it is not RFC 3339.
        """
        text = self.attributes.get("time")
        if text is None:
            return None
        try:
            time = datetime.fromisoformat(text.upper())
            if time.tzinfo is not None:
                return (time.astimezone(UTC) - _EPOCH) // timedelta(microseconds=1)
        except (ValueError, OverflowError):
            pass
        raise InvalidRequest(f"The time {text[:80]!r} of the CloudEvent is not a time in RFC 3339.")

    @property
    def media_type(self) -> str:
        """Return the media type of the data; JSON if the event has none (JSON event format, section 3.1)."""
        return self.attributes.get("datacontenttype", JSON)

    @property
    def has_json(self) -> bool:
        """Return whether the data is JSON according to its media type."""
        return is_json_type(self.media_type)


def is_json_type(media_type: str) -> bool:
    """Return whether content of a media type is JSON, such as `application/vnd.shop+json; charset=utf-8`."""
    return _JSON_TYPE.match(media_type) is not None


def is_attribute_name(name: str) -> bool:
    """Return whether an attribute may have this name (CloudEvents 1.0, section 3.1)."""
    return name != "data" and _NAME.match(name) is not None


BATCH = "This is a batch of CloudEvents; publish each event as a message of its own."

T = TypeVar("T")


class _Fraction(str):
    """A JSON number with a fraction or exponent, as text, because not every one is exactly a float."""

    __slots__ = ()


_encode = msgspec.json.Encoder().encode
_decode_json = msgspec.json.Decoder(float_hook=_Fraction).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def write_json(event: CloudEvent) -> bytes:
    """Return an event as a JSON object (JSON event format, section 3).

    Data that is not JSON, whatever its media type says, is in `data_base64`.
    """
    fields: dict[str, object] = dict(event.attributes)
    if event.data is not None:
        if event.has_json and _is_json(event.data):
            fields["data"] = msgspec.Raw(event.data)
        else:
            fields["data_base64"] = b64encode(event.data).decode()
    return _encode(fields)


def read_json(document: bytes) -> CloudEvent:
    """Return the event in a JSON object (JSON event format, section 3).

    Attributes that are numbers or booleans become text; those that are null are unset. Data in `data_base64`
    without a `datacontenttype` is `application/octet-stream`.

    Raises: InvalidRequest if the document is no event of version 1.0.
    """
    if document.lstrip()[:1] == b"[":
        raise InvalidRequest(BATCH)
    fields = _parse(_decode_fields, document)
    attributes = {
        name: text
        for name, raw in fields.items()
        if name not in ("data", "data_base64")
        and (text := _scalar(_parse(_decode_json, raw), name)) is not None
    }
    if "data_base64" in fields:
        attributes.setdefault("datacontenttype", BYTES)
    event = CloudEvent(attributes)
    return msgspec.structs.replace(event, data=_data(fields, is_json=event.has_json))


def _data(fields: Mapping[str, msgspec.Raw], *, is_json: bool) -> bytes | None:
    """Return an event's data: JSON byte for byte as in the document, or the decoded text or bytes."""
    if "data_base64" in fields:
        if "data" in fields:
            raise InvalidRequest("The CloudEvent has both data and data_base64.")
        try:
            return b64decode(_decode_text(fields["data_base64"]), validate=True)
        except (Base64Error, msgspec.MsgspecError, ValueError, RecursionError):
            raise InvalidRequest("The data_base64 of the CloudEvent is not base64.") from None
    if "data" not in fields:
        return None
    raw = bytes(fields["data"])
    data = _parse(_decode_json, raw)
    return data.encode() if not is_json and type(data) is str else raw


def _is_json(data: bytes) -> bool:
    try:
        _decode_json(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _parse(decode: Callable[[bytes | msgspec.Raw], T], text: bytes | msgspec.Raw) -> T:
    try:
        return decode(text)
    except RecursionError:
        raise InvalidRequest("The JSON of the CloudEvent is nested too deeply.") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The CloudEvent is not valid JSON: {error}.") from error


def _scalar(value: Any, name: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        return str(value)  # also of a fraction, which msgspec does not encode
    if isinstance(value, dict | list):
        kind = "an object" if isinstance(value, dict) else "an array"
        raise InvalidRequest(f"The {name[:80]} of the CloudEvent is {kind}; attributes are text or numbers.")
    return _encode(value).decode()


Mode = Literal["binary", "structured"]
STRUCTURED = "application/cloudevents+json"
PREFIXES = ("ce-", "ce_", "cloudevents_", "cloudevents:")
"""Prefixes of headers with attributes, of all bindings, in lower case."""

_SPECVERSIONS = frozenset(f"{prefix}specversion" for prefix in PREFIXES)
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
        is_percent_encoded: whether the values of headers are, as NATS's are.

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


_FIELDS = ("datacontenttype", "time", "dataschema")
"""Attributes that a message has fields for."""


def new_message(event: CloudEvent) -> NewMessage:
    """Return the message of an event; its other attributes are custom headers named `ce_...`.

    Raises: InvalidRequest for a type that is no topic, or an invalid time.
    """
    attributes = event.attributes
    trace = read_context(attributes.get("traceparent"))
    return NewMessage(
        topic=check_topic(attributes["type"]),
        payload=event.data or b"",
        message_id=event_id(attributes["source"], attributes["id"]),
        sticky_key=_sticky_key(attributes.get("partitionkey")),
        published_at_us=event.time_us,
        content_type=attributes.get("datacontenttype") or (None if event.data is None else JSON),
        schema_url=attributes.get("dataschema"),
        correlation_id=attributes.get("correlationid"),
        causality_parent=attributes.get("causationid"),
        trace_id=trace.trace_id if trace else None,
        span_id=trace.span_id if trace else None,
        attrs={f"ce_{name}": text for name, text in attributes.items() if name not in _FIELDS},
    )


def event_id(source: str, id_: str) -> str:
    """Return `source|id`, which is unique for CloudEvents, or a hash of both if that is not a valid id.

    A source is a URI and contains no `|`, so different pairs have different texts.
    """
    joined = f"{source}|{id_}"
    if "|" not in source and len(joined) <= MAX_ID_CHARS:
        return joined
    return "b3:" + blake3(msgspec.json.encode([source, id_])).hexdigest()


def _sticky_key(key: str | None) -> str | None:
    """Return the sticky key of a partition key, as Kafka's keys become sticky keys."""
    return key if not key or len(key) <= MAX_ID_CHARS else f"b3:{blake3(key.encode()).hexdigest()}"
