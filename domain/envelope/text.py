"""Payloads as plain text, for full-text search."""

import json
import re

from postroom.domain.envelope.content import is_json, media_type
from postroom.domain.envelope.headers import parse_envelope
from postroom.domain.errors import InvalidRequest

__all__ = ["payload_text"]

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
