"""The first part of a payload, as surfaces show it to people and agents: decoded, masked, bounded."""

import re
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from postroom.application.masking import NO_MASK, Mask
from postroom.application.messages import MessageResult
from postroom.application.query_results import MessageDetail
from postroom.domain.envelope.content import DecodedPayload, PayloadFormat
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.errors import InvalidRequest

FOLD_CHARS = 4_000
"""Length of a payload's text above which the rest is collapsed."""
PREVIEW_CHARS = 64 << 10
"""Length of the text that is shown."""
PREVIEW_BYTES = 2 << 10
"""Number of bytes shown of a value that is not text."""
ROW_BYTES = 16
MAX_DECODED_BYTES = 8 << 20
"""Size above which a payload is not decoded: only its first part is shown."""
MAX_INDENT = 32
_INDENT = 2
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"|[{}\[\],:]|[^\s{}\[\],:"]+')
_WINDOW_BITS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}

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
        text: text of JSON and text payloads; other payloads have rows.
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


def read_envelope(detail: MessageDetail) -> PrismEnvelope | None:
    """Return the envelope of a message without its auth token, or None if it can't be parsed."""
    try:
        return detail.item.reconstruct_envelope() if detail.item.envelope_blob else None
    except InvalidRequest:
        return None


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
    """Return a decoded payload; only the bytes of one that is large, compressed or decompressed."""
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
