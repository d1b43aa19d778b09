"""Import of NDJSON, and of messages that are no envelopes, by a mapping of their fields.

Each line is a CloudEvent, an envelope, or, with a mapping, any JSON document.
The same line at the same line number always gets the same message id, so a repeated import adds nothing.
"""

import re
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NewType, TypeVar

import msgspec
from blake3 import blake3

from postroom.application.cloudevents import BYTES, JSON, NotACloudEvent, new_message, read_json
from postroom.application.messages import NewMessage
from postroom.application.outbox.events import (
    CAUSATION_ID,
    CONTENT_TYPE,
    CORRELATION_ID,
    MESSAGE_ID,
    TRACEPARENT,
)
from postroom.application.outbox.formats import EVENT_ID, RESERVED_PREFIXES
from postroom.application.ports.source import SourceMessage
from postroom.application.tracing import read_context
from postroom.domain.errors import InvalidRequest
from postroom.domain.names import check_topic

T = TypeVar("T")
Envelope = NewType("Envelope", bytes)
Path = tuple[str, ...]
"""Location of a field in a JSON document: field names and array indexes, outermost first."""

_TEXT = "text/plain; charset=utf-8"
_ID_HEADERS = (MESSAGE_ID.lower(), EVENT_ID.lower(), "message_id")
"""Headers with the id that a publisher gave to a message, in lower case; RabbitMQ's property is the last."""
_OWN_HEADERS = frozenset(
    {
        *_ID_HEADERS,
        *(name.lower() for name in (CONTENT_TYPE, CORRELATION_ID, CAUSATION_ID, TRACEPARENT)),
    }
)
"""Headers that correspond to fields of a message; all others become custom headers."""

_PLACEHOLDER = re.compile(r"\{([^{}]+)\}")
_SEGMENT = re.compile(r"((?:[^.{}]|\{[^{}]+\})+)(\.|\Z)")
_NANOSECONDS, _MICROSECONDS, _MILLISECONDS = (
    10**17,
    10**14,
    10**11,
)  # larger numbers are ns, µs or ms, smaller ones s: 10^11 s is the year 5138


class _Fraction(str):
    """A JSON number with a fraction or exponent, as text, because not every one is exactly a float."""

    __slots__ = ()


_decode = msgspec.json.Decoder(float_hook=_Fraction).decode


class TopicTemplate:
    """Template of a topic over a document's fields, such as `github.{event}.{action}`.

    A dot-separated segment is omitted if one of its fields is null or missing.
    """

    def __init__(self, text: str) -> None:
        """Parse the template; raise `InvalidRequest` when it is malformed."""
        segments = _SEGMENT.findall(text)
        if not segments or "".join(map("".join, segments)) != text or segments[-1][1]:
            raise InvalidRequest(
                f"The topic template {text!r} is malformed; write it like github.{{event}}.{{action}}."
            )
        self._segments = [_PLACEHOLDER.split(segment) for segment, _ in segments]
        self._paths = [[parse_path(name) for name in parts[1::2]] for parts in self._segments]

    def fill(self, document: object) -> str:
        """Return the topic of a document; raise `InvalidRequest` if every segment is omitted."""
        topic = ".".join(
            segment
            for parts, paths in zip(self._segments, self._paths, strict=True)
            if (segment := _fill_segment(parts, paths, document)) is not None
        )
        if not topic:
            raise InvalidRequest("every field in the topic template is null or missing.")
        return check_topic(topic)


class RecordMapping(msgspec.Struct, frozen=True, kw_only=True):
    """Mapping from the fields of a JSON document to a message.

    Arguments:
        headers: paths by header name: `principal`, `correlation_id`, `trace_id`, `span_id` and
            `content_type`; any other name becomes a custom header.
        key: path of the sticky key.
        time: path of the publish time.
        id: path of the message id; None derives one from line number and content.
    """

    topic: TopicTemplate
    headers: Mapping[str, Path] = {}
    key: Path | None = None
    time: Path | None = None
    id: Path | None = None


def parse_path(text: str) -> Path:
    """Parse a path such as `payload.sender.login` or `commits.0.id`; raise `InvalidRequest` if malformed."""
    path = tuple(text.split("."))
    if not all(path):
        raise InvalidRequest(
            f"{text!r} is not a path; write field names with dots between them, like sender.login."
        )
    return path


def read_record(line: bytes, number: int, mapping: RecordMapping | None = None) -> NewMessage | Envelope:
    """Return the message in a line.

    Arguments:
        line: without its line ending.
        number: line number in the file, from 1.
        mapping: maps any JSON document; None expects a CloudEvent or an envelope in base64.

    Raises: InvalidRequest for a line that can't be read.
    """
    if mapping is not None:
        new = _apply_mapping(_parse(_decode, line), line, mapping, line_id(line, number))
        return new if new.content_type else msgspec.structs.replace(new, content_type=JSON)
    if line.lstrip().startswith((b"{", b"[")):
        try:
            if line.lstrip().startswith(b"["):
                _parse(_decode, line)
            return new_message(read_json(line))
        except NotACloudEvent:
            raise InvalidRequest("it is JSON but not a CloudEvent; add --topic to import any JSON.") from None
    try:
        return Envelope(b64decode(line.strip(), validate=True))
    except Base64Error:
        raise InvalidRequest("it is neither JSON nor an envelope in base64.") from None


def map_message(message: SourceMessage, mapping: RecordMapping, *, has_places: bool) -> NewMessage:
    """Map a message of a broker to one of a mailbox: any JSON, or text or bytes, which have no fields.

    Its headers become the message's; the mapping takes precedence. Without a path of the message id, the
    publisher's id is used, or else one derived from its place and content.

    Arguments:
        has_places: whether `sequence` is the same for each delivery of a message; otherwise each delivery of
            a message without an id gets an id of its own.

    Raises: InvalidRequest if the topic has no value, or the id is missing.
    """
    document: object = None
    content_type = JSON
    try:
        document = _parse(_decode, message.data)
    except InvalidRequest:
        content_type = _TEXT if _is_text(message.data) else BYTES
    headers = {
        name: value
        for name, value in message.headers.items()
        if not name.lower().startswith(RESERVED_PREFIXES) and name.lower() not in _OWN_HEADERS
    }
    by_name = {name.lower(): value for name, value in reversed(message.header_pairs)}
    id_ = next((by_name[name] for name in _ID_HEADERS if by_name.get(name)), None)
    if id_ is None and has_places:
        id_ = _derive_id(f"{message.subject}\n{message.sequence}", message.data)
    new = _apply_mapping(document, message.data, mapping, id_)
    trace = read_context(by_name.get(TRACEPARENT))
    return msgspec.structs.replace(
        new,
        sticky_key=new.sticky_key if mapping.key is not None else message.sticky_key,
        content_type=new.content_type or by_name.get(CONTENT_TYPE.lower()) or content_type,
        correlation_id=new.correlation_id or by_name.get(CORRELATION_ID.lower()),
        causality_parent=by_name.get(CAUSATION_ID.lower()),
        trace_id=new.trace_id or (trace.trace_id if trace else None),
        span_id=new.span_id or (trace.span_id if trace else None),
        attrs=headers | dict(new.attrs),
    )


def line_id(line: bytes, number: int) -> str:
    """Return the message id for a line without one: a UUID (version 8) derived from number and content."""
    return _derive_id(str(number), line)


def _derive_id(place: str, content: bytes) -> str:
    digits = blake3(b"%b\n%b" % (place.encode(), content)).hexdigest(16)
    return f"{digits[:8]}-{digits[8:12]}-8{digits[13:16]}-a{digits[17:20]}-{digits[20:]}"


def time_us(value: object) -> int:
    """Return a time in µs since 1970 UTC.

    Arguments:
        value: RFC 3339 text with an offset, or s, ms, µs or ns since 1970, distinguished by magnitude.

    Raises: InvalidRequest for anything else.
    """
    if isinstance(value, _Fraction):
        value = float(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _NANOSECONDS * 1_000:
        if abs(value) >= _NANOSECONDS:
            return int(value) // 1_000
        unit = 1 if abs(value) >= _MICROSECONDS else 1_000 if abs(value) >= _MILLISECONDS else 1_000_000
        return round(value * unit)
    try:
        time = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise InvalidRequest(
            f"{value!r} is not a time; write RFC 3339 with an offset, or s, ms, µs or ns since 1970."
        )
    seconds = int(time.replace(microsecond=0).timestamp())
    return seconds * 1_000_000 + time.microsecond


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _apply_mapping(
    document: object, payload: bytes, mapping: RecordMapping, default_id: str | None
) -> NewMessage:
    """Return the message of a document, without a content type unless a header has it."""
    headers = {
        name: text
        for name, path in mapping.headers.items()
        if (text := _text(document, path, name)) is not None
    }
    id_ = default_id if mapping.id is None else _text(document, mapping.id, "the message id")
    if id_ is None and mapping.id is not None:
        raise InvalidRequest(f"it has no message id at {'.'.join(mapping.id)}.")
    published = None if mapping.time is None else _find(document, mapping.time)
    return NewMessage(
        topic=mapping.topic.fill(document),
        payload=payload,
        message_id=id_,
        sticky_key=None if mapping.key is None else _text(document, mapping.key, "the key"),
        published_at_us=None if published is None else time_us(published),
        principal=headers.pop("principal", None),
        correlation_id=headers.pop("correlation_id", None),
        trace_id=headers.pop("trace_id", None),
        span_id=headers.pop("span_id", None),
        content_type=headers.pop("content_type", None),
        attrs=headers,
    )


def _parse(decode: Callable[[bytes | msgspec.Raw], T], text: bytes | msgspec.Raw) -> T:
    try:
        return decode(text)
    except RecursionError:
        raise InvalidRequest("its JSON is nested too deeply.") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"it is not valid JSON: {error}.") from error


def _find(document: Any, path: Path) -> Any:
    """Return the value at `path`, or None."""
    for name in path:
        if isinstance(document, dict):
            document = document.get(name)
        elif isinstance(document, list) and name.isdecimal() and int(name) < len(document):
            document = document[int(name)]
        else:
            return None
    return document


def _text(document: Any, path: Path, what: str) -> str | None:
    return _scalar(_find(document, path), f"{what} ({'.'.join(path)})")


def _scalar(value: Any, what: str) -> str | None:
    """Return a JSON scalar as text, None for null."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, dict | list):
        kind = "an object" if isinstance(value, dict) else "an array"
        raise InvalidRequest(f"{what} is {kind}; it must be text, a number, true or false.")
    return msgspec.json.encode(value).decode()


def _fill_segment(parts: list[str], paths: list[Path], document: object) -> str | None:
    segment = parts.copy()
    for index, path in enumerate(paths):
        text = _text(document, path, "the topic")
        if text is None:
            return None
        segment[2 * index + 1] = text
    return "".join(segment)
