"""Payloads: decoded by their content encoding and content type, and as plain text for full-text search."""

import json
import re
import zlib
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from postroom.domain.envelope.headers import parse_envelope
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.errors import InvalidRequest

__all__ = [
    "ACCEPTED",
    "DecodedPayload",
    "PayloadFormat",
    "PayloadValidation",
    "decode_json",
    "decode_payload",
    "decompress",
    "is_json",
    "media_type",
    "payload_text",
]

MAX_DECOMPRESSED_BYTES = 64 << 20
"""Limit of a payload's size after decompression."""
_WINDOW_BITS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}


class PayloadFormat(StrEnum):
    """How a payload is decoded."""

    JSON = "json"
    PROTOBUF = "protobuf"
    TEXT = "text"
    BINARY = "binary"
    ENCRYPTED = "encrypted"


class DecodedPayload(NamedTuple):
    """A decoded payload.

    Arguments:
        data: the decompressed bytes; the bytes as sent if they can't be decompressed.
        text: the text of a payload that is text or JSON (also of a protobuf message); None if it could not be
            decoded.
        problems: why it could not be decoded or violates its schema, each as a predicate of `the payload`.
    """

    format: PayloadFormat
    data: bytes
    text: str | None = None
    problems: tuple[str, ...] = ()


def decode_payload(envelope: PrismEnvelope) -> DecodedPayload:
    """Decode a payload by its content encoding and content type.

    Without a content type, it is JSON if it is an object or array, text if it is UTF-8, and else binary.
    """
    payload, metadata = envelope.payload, envelope.metadata
    if envelope.security.HasField("encryption"):
        return DecodedPayload(PayloadFormat.ENCRYPTED, payload.value)
    try:
        data = decompress(payload.value, metadata.content_encoding)
    except InvalidRequest as error:
        return DecodedPayload(PayloadFormat.BINARY, payload.value, problems=(str(error),))
    media = media_type(metadata.content_type)
    if not media:
        return DecodedPayload(PayloadFormat.BINARY, data) if payload.type_url else _guess(data)
    if is_json(media):
        return _json(data)
    return _text(data) if media.startswith("text/") else DecodedPayload(PayloadFormat.BINARY, data)


def decompress(data: bytes, encoding: str) -> bytes:
    """Return a payload decompressed; raise `InvalidRequest` when that fails.

    Arguments:
        encoding: `gzip`, `deflate`, `identity` or empty.
    """
    if encoding in ("", "identity"):
        return data
    if encoding not in _WINDOW_BITS:
        raise InvalidRequest(f"is encoded with {encoding!r}, which is not supported")
    decompressor = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        decompressed = decompressor.decompress(data, MAX_DECOMPRESSED_BYTES)
    except zlib.error as error:
        raise InvalidRequest(f"is not valid {encoding}: {error}") from error
    if len(decompressed) == MAX_DECOMPRESSED_BYTES:
        raise InvalidRequest(f"has more than {MAX_DECOMPRESSED_BYTES} bytes when decompressed")
    if not decompressor.eof or decompressor.unused_data:
        raise InvalidRequest(f"has {'trailing' if decompressor.eof else 'incomplete'} {encoding} data")
    return decompressed


def decode_json(data: bytes) -> Any:
    """Return the value of a JSON payload; raise `InvalidRequest` if it is not JSON."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"is not JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("is JSON that is nested too deeply") from None


def media_type(content_type: str) -> str:
    """Return a content type in lower case without its parameters."""
    return content_type.partition(";")[0].strip().lower()


def is_json(media: str) -> bool:
    """Return whether a media type is JSON."""
    return media.endswith(("/json", "+json"))


def _guess(data: bytes) -> DecodedPayload:
    if data.lstrip()[:1] in (b"{", b"["):
        decoded = _json(data)
        if not decoded.problems:
            return decoded
    decoded = _text(data)
    return DecodedPayload(PayloadFormat.BINARY, data) if decoded.problems else decoded


def _json(data: bytes) -> DecodedPayload:
    try:
        decode_json(data)
        return DecodedPayload(PayloadFormat.JSON, data, data.decode())
    except (InvalidRequest, UnicodeDecodeError) as error:
        problem = str(error) if isinstance(error, InvalidRequest) else "is not UTF-8"
        return DecodedPayload(PayloadFormat.JSON, data, problems=(problem,))


def _text(data: bytes) -> DecodedPayload:
    try:
        return DecodedPayload(PayloadFormat.TEXT, data, data.decode())
    except UnicodeDecodeError:
        return DecodedPayload(PayloadFormat.TEXT, data, problems=("is not UTF-8",))


class PayloadValidation(msgspec.Struct, frozen=True):
    """Whether a payload is accepted, and its problems.

    Arguments:
        problems: one sentence each, with topic and location; in mode `warn` they are accepted.
    """

    is_accepted: bool
    problems: tuple[str, ...] = ()


ACCEPTED = PayloadValidation(True)


_ESCAPES = re.compile(r'(?:\\u[0-9a-fA-F]{4})+|\\["\\/bfnrt]')


def payload_text(blob: bytes, max_chars: int) -> str | None:
    """Return the beginning of an envelope's payload as text, JSON with its escapes resolved.

    A payload is text when it is UTF-8 and its content type is `text/*`, `*/json`, `*+json` or missing. The
    result is None for any other, for an encrypted, compressed or packed payload, and for an invalid envelope.

    Arguments:
        blob: the serialized envelope.
        max_chars: number of characters to read, counted before escapes are resolved.
    """
    try:
        envelope = parse_envelope(blob)
        text = envelope.payload.value.decode()
    except (InvalidRequest, UnicodeDecodeError):
        return None
    content_type = envelope.metadata.content_type
    is_hidden = (
        envelope.security.HasField("encryption")
        or envelope.metadata.content_encoding not in ("", "identity")
        or (envelope.payload.type_url and not content_type)
    )
    if is_hidden or not _may_be_text(content_type):
        return None
    text = text[:max_chars]
    is_json = "json" in content_type.lower() or text.lstrip()[:1] in ("{", "[")
    return _ESCAPES.sub(_unescape, text) if is_json and "\\" in text else text


def _may_be_text(content_type: str) -> bool:
    media = media_type(content_type or "text/plain")
    return media.startswith("text/") or is_json(media)


def _unescape(escapes: re.Match[str]) -> str:
    text: str = json.loads(f'"{escapes[0]}"')
    return text
