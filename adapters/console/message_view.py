"""A message as pages show it: its headers, life and payload."""

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from postroom.application.masking import MASK, NO_MASK, Mask
from postroom.application.messages import MessageResult
from postroom.application.queries.redrive_lineage import DeadLettering, lineage_of
from postroom.application.query_results import Explanation, MessageDetail
from postroom.domain.envelope.build import OpenedEnvelope
from postroom.domain.envelope.content import DecodedPayload, PayloadFormat
from postroom.domain.envelope.headers import MailboxItem
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import MS

MESSAGE, SEARCH = "message", "search"
MAX_EVENTS = 500
"""Number of events in the timeline: the first, and the latest."""
MAX_DEAD_LETTERINGS = 50


class Header(NamedTuple):
    """A header of a message.

    Arguments:
        link: `message` if the value is the id of another message, `search` if it leads to a search.
        parameter: name of the search's parameter for the value.
    """

    name: str
    value: str
    link: str = ""
    parameter: str = ""


class TimelineEntry(NamedTuple):
    """An event of a message.

    Arguments:
        why: the reason of a redelivery, as a sentence; empty for other events.
        job: id of the redrive job that caused the event.
        copy: id of the copy that the job sent.
        original: id of the message that this one is a copy of.
    """

    position: int
    at: str
    event: str
    epoch: int
    text: str
    why: str
    job: str
    copy: str
    original: str


class MessageView(NamedTuple):
    """A message as the page shows it.

    Arguments:
        published_at: µs since 1970 UTC.
        now: the current state, as a sentence.
        is_masked: whether the value of any header is hidden.
        envelope: None if it was altered and can't be parsed.
        omitted: number of events that are not in the timeline.
        dead_letterings: the latest ones.
        original_subject: the subject that it was ingested from; empty if it was sent directly.
        copy_of: id of the message of which a subscription got this copy; empty for any other message.
    """

    id: str
    topic: str
    shard: int
    mailbox: str
    published_at: int
    status: str
    attempt: int
    redriven: int
    reason: str
    last_error: str
    is_intact: bool
    now: str
    headers: tuple[Header, ...]
    custom_headers: tuple[Header, ...]
    timeline: tuple[TimelineEntry, ...]
    omitted: int
    dead_letterings: tuple[DeadLettering, ...]
    original_subject: str
    copy_of: str
    is_masked: bool
    envelope: PrismEnvelope | None


def make_view(detail: MessageDetail, explanation: Explanation, mask: Mask) -> MessageView:
    """Return the view of a message.

    Arguments:
        mask: headers that are hidden from the reader.
    """
    envelope = read_envelope(detail)
    item = mask.hide_item(detail.item)
    lineage = lineage_of(detail)
    subject = lineage.original_subject
    timeline = tuple(_timeline(detail, explanation, mask))
    omitted = max(0, len(timeline) - MAX_EVENTS)
    return MessageView(
        detail.message_id,
        detail.topic,
        detail.shard,
        detail.mailbox,
        item.timestamp * MS,
        detail.status,
        detail.attempt,
        detail.redriven,
        detail.reason or "",
        detail.last_error or "",
        detail.intact,
        explanation.now,
        tuple(_headers(item, envelope, mask)),
        tuple(Header(name, value) for name, value in sorted(item.custom_headers.items())),
        timeline[:1] + timeline[1 + omitted :],
        omitted,
        tuple(lineage.dead_letterings[-MAX_DEAD_LETTERINGS:]),
        subject if subject in item.custom_headers.values() else "",
        detail.copy_of or "",
        hides_headers(detail, envelope, mask),
        envelope,
    )


def read_envelope(detail: MessageDetail) -> PrismEnvelope | None:
    """Return the envelope of a message without its auth token, or None if it can't be parsed."""
    try:
        return detail.item.reconstruct_envelope() if detail.item.envelope_blob else None
    except InvalidRequest:
        return None


def _headers(item: MailboxItem, envelope: PrismEnvelope | None, mask: Mask) -> Iterator[Header]:
    for name, label, link, parameter in _SHOWN:
        value = getattr(item, name)
        if value is not None:
            is_hidden = value == MASK
            yield Header(label, value, "" if is_hidden else link, parameter)
    if envelope is None:
        return
    for name, value in _other_headers(envelope).items():
        is_hidden = mask.covers_header(name)
        link = MESSAGE if name == "causality_parent" and not is_hidden else ""
        yield Header(_OTHERS[name], MASK if is_hidden else value, link)


def hides_headers(detail: MessageDetail, envelope: PrismEnvelope | None, mask: Mask) -> bool:
    """Return whether a mask hides the value of any header of a message."""
    others = {} if envelope is None else _other_headers(envelope)
    return mask.hide_item(detail.item) is not detail.item or any(map(mask.covers_header, others))


def _other_headers(envelope: PrismEnvelope) -> dict[str, str]:
    """Return the headers that are set and not searchable."""
    content = OpenedEnvelope(envelope)
    values = {
        "causality_parent": content.causality_parent,
        "content_encoding": content.content_encoding,
        "payload_type": envelope.payload.type_url or None,
        "ttl_seconds": f"{content.ttl_seconds:,} s" if content.ttl_seconds > 0 else None,
        "priority": str(content.priority),
        "baggage": ", ".join(f"{key}={value}" for key, value in sorted(content.baggage.items())) or None,
    }
    return {name: value for name, value in values.items() if value is not None}


_SHOWN = (
    ("correlation_id", "correlation id", SEARCH, "correlation_id"),
    ("principal", "principal", SEARCH, "principals"),
    ("namespace", "namespace", "", ""),
    ("content_type", "content type", "", ""),
    ("schema_url", "schema", "", ""),
    ("schema_version", "schema version", "", ""),
    ("encryption", "encryption", "", ""),
    ("trace_id", "trace id", SEARCH, "trace_id"),
    ("span_id", "span id", "", ""),
)
_OTHERS = {
    "causality_parent": "caused by",
    "content_encoding": "content encoding",
    "payload_type": "payload type",
    "ttl_seconds": "time to live",
    "priority": "priority",
    "baggage": "baggage",
}


def _timeline(detail: MessageDetail, explanation: Explanation, mask: Mask) -> Iterator[TimelineEntry]:
    events = {entry.position: entry for entry in detail.history}
    reasons = {each.position: each.why for each in explanation.deliveries if each.number > 1}
    for step in explanation.story:
        entry = events.get(step.position)
        facts: Mapping[str, Any] = entry.facts if entry is not None else {}
        text = step.text
        if detail.item.principal and mask.covers_header("principal"):
            text = text.replace(f"Sent by {detail.item.principal} to", f"Sent by {MASK} to")
        yield TimelineEntry(
            step.position,
            step.at,
            entry.event if entry is not None else "",
            entry.epoch if entry is not None else 0,
            text,
            reasons.get(step.position, ""),
            str(facts.get("redrive_job", "")),
            str(facts.get("copy", "")),
            str(facts.get("original", "")),
        )


FOLD_CHARS = 4_000
"""Length of a payload's text above which the rest is collapsed."""
PREVIEW_CHARS = 64 << 10
"""Length of the text that is shown."""
PREVIEW_BYTES = 2 << 10
"""Number of bytes shown of a value that is not text."""
ROW_BYTES = 16
MAX_DECODED_BYTES = 8 << 20
"""Size above which a payload is not decoded: of it, only the first part is looked at."""
MAX_INDENT = 32
_INDENT = 2
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"|[{}\[\],:]|[^\s{}\[\],:"]+')
_WINDOW_BITS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}

_SUFFIXES = {PayloadFormat.JSON: "json", PayloadFormat.TEXT: "txt"}

Decode = Callable[[PrismEnvelope], DecodedPayload]


class HexRow(NamedTuple):
    """Sixteen bytes: the offset of the first, all in hexadecimal, and those that are ASCII as text."""

    offset: str
    digits: str
    text: str


class PayloadPreview(NamedTuple):
    """The first part of a payload.

    Arguments:
        format: how it was decoded; None for one that is hidden as a whole.
        size: bytes as it was sent.
        decoded_size: bytes when decompressed; None if it is not compressed, or that failed.
        text: of JSON and text; the others have rows.
        is_complete: whether this is all of it.
        is_masked: whether some of it is hidden.
        problems: why it could not be decoded or violates its schema, each as a predicate of `the payload`.
    """

    format: PayloadFormat | None
    size: int
    decoded_size: int | None
    text: str | None = None
    rows: tuple[HexRow, ...] = ()
    is_complete: bool = True
    is_masked: bool = False
    problems: tuple[str, ...] = ()

    @property
    def first_part(self) -> str:
        """Return the text that is not collapsed."""
        return (self.text or "")[:FOLD_CHARS]

    @property
    def rest(self) -> str:
        """Return the text that is collapsed."""
        return (self.text or "")[FOLD_CHARS:]


def wrap_result(result: MessageResult) -> PrismEnvelope:
    """Return an envelope with a result as its payload, which is shown as payloads are."""
    envelope = PrismEnvelope()
    envelope.payload.value = result.payload
    envelope.metadata.content_type = result.content_type or ""
    return envelope


def preview_payload(envelope: PrismEnvelope, decode: Decode, mask: Mask = NO_MASK) -> PayloadPreview:
    """Return the first part of a payload.

    Arguments:
        decode: decodes by content type or by schema; not called for large payloads.
        mask: fields that the reader may not see.
    """
    payload = decode_bounded(envelope, decode)
    size = len(envelope.payload.value)
    shown = mask.hide_fields(payload)
    if shown is None:
        return PayloadPreview(None, size, None, is_complete=False, is_masked=True)
    is_compressed = envelope.metadata.content_encoding in _WINDOW_BITS and not payload.problems
    decoded_size = len(payload.data) if is_compressed else None
    view = PayloadPreview(
        shown.format, size, decoded_size, is_masked=shown is not payload, problems=shown.problems
    )
    if shown.text is None:
        rows = tuple(hex_rows(shown.data[:PREVIEW_BYTES]))
        return view._replace(rows=rows, is_complete=len(shown.data) <= PREVIEW_BYTES)
    if shown.format in (PayloadFormat.JSON, PayloadFormat.PROTOBUF):
        text, is_complete = indent_json(shown.text, PREVIEW_CHARS)
    else:
        text, is_complete = shown.text[:PREVIEW_CHARS], len(shown.text) <= PREVIEW_CHARS
    return view._replace(text=text, is_complete=is_complete)


def decode_bounded(envelope: PrismEnvelope, decode: Decode) -> DecodedPayload:
    """Return a decoded payload; of one that is large, when decompressed or not, only the bytes."""
    data, encoding = envelope.payload.value, envelope.metadata.content_encoding
    size = len(data)
    if encoding in _WINDOW_BITS and not envelope.security.HasField("encryption"):
        try:
            decompressor = zlib.decompressobj(_WINDOW_BITS[encoding])
            start = decompressor.decompress(data, MAX_DECODED_BYTES + 1)
        except zlib.error:
            return decode(envelope)  # it tells the problem
        size, data = len(start), (start if len(start) > MAX_DECODED_BYTES else data)
    if size <= MAX_DECODED_BYTES:
        return decode(envelope)
    problem = f"has more than {MAX_DECODED_BYTES >> 20} MiB, and is not decoded here"
    if envelope.security.HasField("encryption"):
        return DecodedPayload(PayloadFormat.ENCRYPTED, data)
    start = data[: 4 * PREVIEW_CHARS + 4]  # more characters than are shown
    try:
        start.decode()
    except UnicodeDecodeError as error:
        if error.start < len(start) - 3:  # else the end of the part divides a character
            return DecodedPayload(PayloadFormat.BINARY, data, problems=(problem,))
    return DecodedPayload(PayloadFormat.TEXT, data, start.decode(errors="replace"), (problem,))


def file_suffix(payload: DecodedPayload, envelope: PrismEnvelope) -> str:
    """Return the file name extension of a payload, never one that a browser would open as a page."""
    if payload.format == PayloadFormat.ENCRYPTED or payload.text is None:
        return "bin"
    if envelope.metadata.content_encoding not in ("", "identity"):
        return "gz" if envelope.metadata.content_encoding == "gzip" else "bin"
    return _SUFFIXES.get(payload.format, "bin")


def indent_json(text: str, limit: int) -> tuple[str, bool]:
    """Return the first part of valid JSON on indented lines, and whether that is all of it.

    Names, numbers and escapes stay as they are written. Levels beyond `MAX_INDENT` are not indented further,
    so that the result is not much longer than the text.

    Arguments:
        limit: number of characters after which it ends.
    """
    parts: list[str] = []
    size = 0
    for part in _indent_tokens(text):
        parts.append(part)
        size += len(part)
        if size > limit:
            return "".join(parts)[:limit], False
    return "".join(parts), True


def _indent_tokens(text: str) -> Iterator[str]:
    depth, before = 0, ""
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in ("}", "]"):
            depth -= 1
            if before not in ("{", "["):
                yield _line(depth)
        elif before in ("{", "[", ","):
            yield _line(depth)
        yield ": " if token == ":" else token
        if token in ("{", "["):
            depth += 1
        before = token


def _line(depth: int) -> str:
    return "\n" + " " * (_INDENT * min(depth, MAX_INDENT))


def hex_rows(data: bytes) -> Iterator[HexRow]:
    """Yield bytes as rows of a hex dump."""
    for start in range(0, len(data), ROW_BYTES):
        row = data[start : start + ROW_BYTES]
        text = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in row)
        yield HexRow(f"{start:08x}", row.hex(" "), text)
