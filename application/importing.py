"""Read a line of an NDJSON file as a message: a CloudEvent, an envelope, or any JSON with a mapping.

The same line at the same place in a file always gives the same message id: importing it again adds nothing.
"""

import re
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NewType

import msgspec
from blake3 import blake3

from postroom.application.messages import NewMessage
from postroom.domain.errors import InvalidRequest
from postroom.domain.names import MAX_ID_CHARS, check_topic

Envelope = NewType("Envelope", bytes)
Path = tuple[str, ...]
"""Where a field is in a JSON document: names of fields and indexes of arrays, from the outside in."""

_PLACEHOLDER = re.compile(r"\{([^{}]+)\}")
_SEGMENT = re.compile(r"((?:[^.{}]|\{[^{}]+\})+)(\.|\Z)")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}\Z")
_JSON_TYPE = re.compile(r"[^/;]+/(?:[^;]+\+)?json\s*(?:;|\Z)", re.IGNORECASE)
_MICROSECONDS, _MILLISECONDS = 10**14, 10**11  # epochs from here on, else seconds: 10^11 s is the year 5138


class _Fraction(str):
    """A JSON number with a fraction or exponent, in its own spelling: no float holds all of them."""

    __slots__ = ()


_decode = msgspec.json.Decoder(float_hook=_Fraction).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class TopicTemplate:
    """Make a topic from a document's fields, as `github.{event}.{action}` says.

    A segment between dots is left out where a field it names is null or missing.
    """

    def __init__(self, text: str) -> None:
        """Take the template; raise `InvalidRequest` when it is malformed."""
        segments = _SEGMENT.findall(text)
        if not segments or "".join(map("".join, segments)) != text or segments[-1][1]:
            raise InvalidRequest(
                f"The topic template {text!r} is malformed; write it like github.{{event}}.{{action}}."
            )
        self._segments = [_PLACEHOLDER.split(segment) for segment, _ in segments]
        self._paths = [[parse_path(name) for name in parts[1::2]] for parts in self._segments]

    def fill(self, document: object) -> str:
        """Return the topic of a document; raise `InvalidRequest` when nothing of it is left."""
        topic = ".".join(
            segment
            for parts, paths in zip(self._segments, self._paths, strict=True)
            if (segment := _filled(parts, paths, document)) is not None
        )
        if not topic:
            raise InvalidRequest("every field that the topic is made of is null or missing.")
        return check_topic(topic)


class RecordMapping(msgspec.Struct, frozen=True, kw_only=True):
    """Say where a JSON document has what a message needs.

    Arguments:
        headers: by header name; known are `principal`, `correlation_id`, `trace_id`, `span_id` and
            `content_type`, every other name becomes a custom header.
        key: of the sticky key. time: of when it was published. id: of the message id; None makes one.
    """

    topic: TopicTemplate
    headers: Mapping[str, Path] = {}
    key: Path | None = None
    time: Path | None = None
    id: Path | None = None


def parse_path(text: str) -> Path:
    """Return the path that `payload.sender.login` or `commits.0.id` spells, or raise `InvalidRequest`."""
    path = tuple(text.split("."))
    if not all(path):
        raise InvalidRequest(
            f"{text!r} is not a path; write field names with dots between them, like sender.login."
        )
    return path


def read_record(line: bytes, number: int, mapping: RecordMapping | None = None) -> NewMessage | Envelope:
    """Return the message that a line holds.

    Arguments:
        line: without its line ending.
        number: of the line in its file, counted from 1.
        mapping: how to read any JSON document; without it a line is a CloudEvent or an envelope in base64.

    Raises: InvalidRequest saying what is wrong with the line.
    """
    if mapping is not None:
        return _mapped(line, number, mapping)
    if line.lstrip().startswith(b"{"):
        return _cloud_event(line)
    try:
        return Envelope(b64decode(line.strip(), validate=True))
    except Base64Error:
        raise InvalidRequest("it is neither JSON nor an envelope in base64.") from None


def line_id(line: bytes, number: int) -> str:
    """Return the message id of a line that brings none: a UUID (version 8) of its number and content."""
    digits = blake3(b"%d\n%b" % (number, line)).hexdigest(16)
    return f"{digits[:8]}-{digits[8:12]}-8{digits[13:16]}-a{digits[17:20]}-{digits[20:]}"


def time_us(value: object) -> int:
    """Return a time in µs since 1970 UTC.

    Arguments:
        value: RFC 3339 text with its offset, or s, ms or µs since 1970, told apart by their size.

    Raises: InvalidRequest for anything else.
    """
    if isinstance(value, _Fraction):
        value = float(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MICROSECONDS * 10_000:
        unit = 1 if abs(value) >= _MICROSECONDS else 1_000 if abs(value) >= _MILLISECONDS else 1_000_000
        return round(value * unit)
    try:
        time = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise InvalidRequest(
            f"{value!r} is no time; it must be RFC 3339 with an offset, or a number since 1970."
        )
    seconds = int(time.replace(microsecond=0).timestamp())
    return seconds * 1_000_000 + time.microsecond


def _mapped(line: bytes, number: int, mapping: RecordMapping) -> NewMessage:
    document = _decoded(line)
    headers = {
        name: text
        for name, path in mapping.headers.items()
        if (text := _text(document, path, name)) is not None
    }
    id_ = line_id(line, number) if mapping.id is None else _text(document, mapping.id, "the message id")
    if id_ is None:
        raise InvalidRequest(f"it has no message id at {'.'.join(mapping.id or ())}.")
    published = None if mapping.time is None else _find(document, mapping.time)
    return NewMessage(
        topic=mapping.topic.fill(document),
        payload=line,
        message_id=id_,
        sticky_key=None if mapping.key is None else _text(document, mapping.key, "the key"),
        published_at_us=None if published is None else time_us(published),
        principal=headers.pop("principal", None),
        correlation_id=headers.pop("correlation_id", None),
        trace_id=headers.pop("trace_id", None),
        span_id=headers.pop("span_id", None),
        content_type=headers.pop("content_type", None) or "application/json",
        attrs=headers,  # what is left of them
    )


def _cloud_event(line: bytes) -> NewMessage:
    """Read a CloudEvent in structured mode; its context attributes become custom headers named `ce_...`."""
    try:
        fields = _decode_fields(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"it is not valid JSON: {error}.") from error
    if "specversion" not in fields:
        raise InvalidRequest("it is JSON but no CloudEvent; say how to read it with a topic template.")
    context = {
        name: text
        for name, raw in fields.items()
        if name not in ("data", "data_base64") and (text := _scalar(_decode(raw), name)) is not None
    }
    for name in ("id", "source", "type"):
        if not context.get(name):
            raise InvalidRequest(f"it is a CloudEvent without {name}.")
    if context["specversion"] != "1.0":
        raise InvalidRequest(f"it is a CloudEvent of version {context['specversion']}; only 1.0 can be read.")
    content_type = context.pop("datacontenttype", None)
    time = context.pop("time", None)
    trace = _TRACEPARENT.match(context.get("traceparent", ""))
    return NewMessage(
        topic=check_topic(context["type"]),
        payload=_event_data(fields, content_type),
        message_id=_event_id(context["source"], context["id"]),
        sticky_key=context.get("partitionkey"),
        published_at_us=None if time is None else time_us(time),
        content_type=content_type or ("application/json" if "data" in fields else None),
        schema_url=context.pop("dataschema", None),
        correlation_id=context.get("correlationid"),
        causality_parent=context.get("causationid"),
        trace_id=trace[1] if trace else None,
        span_id=trace[2] if trace else None,
        attrs={f"ce_{name}": text for name, text in context.items()},
    )


def _event_id(source: str, id_: str) -> str:
    """Return `source|id`, a pair that CloudEvents makes unique; their hash where that can't be an id.

    A URI, which a source is, holds no bar, so no two pairs share a text.
    """
    joined = f"{source}|{id_}"
    if "|" not in source and len(joined) <= MAX_ID_CHARS:
        return joined
    return "b3:" + blake3(msgspec.json.encode([source, id_])).hexdigest()


def _event_data(fields: Mapping[str, msgspec.Raw], content_type: str | None) -> bytes:
    """Return a CloudEvent's data: JSON exactly as it stands in the line, else the text or bytes it spells."""
    if "data_base64" in fields:
        if "data" in fields:
            raise InvalidRequest("it is a CloudEvent with both data and data_base64.")
        try:
            return b64decode(msgspec.json.decode(fields["data_base64"], type=str), validate=True)
        except (Base64Error, msgspec.MsgspecError):
            raise InvalidRequest("the data_base64 of its CloudEvent is not base64.") from None
    if "data" not in fields:
        return b""
    raw = bytes(fields["data"])
    if content_type is None or _JSON_TYPE.match(content_type):
        return raw
    data = _decode(raw)
    return data.encode() if isinstance(data, str) else raw


def _decoded(line: bytes) -> Any:
    try:
        return _decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"it is not valid JSON: {error}.") from error


def _find(document: Any, path: Path) -> Any:
    """Return what stands at `path`, None where nothing does."""
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


def _filled(parts: list[str], paths: list[Path], document: object) -> str | None:
    filled = parts.copy()
    for index, path in enumerate(paths):
        text = _text(document, path, "the topic")
        if text is None:
            return None
        filled[2 * index + 1] = text
    return "".join(filled)
