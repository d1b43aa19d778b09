"""Read an envelope's payload as text, where it is text that anybody may read."""

import json
import re

from postroom.domain.envelope.headers import parse_envelope
from postroom.domain.errors import InvalidRequest

__all__ = ["payload_text"]

_ESCAPES = re.compile(r'(?:\\u[0-9a-fA-F]{4})+|\\["\\/bfnrt]')


def payload_text(blob: bytes, max_chars: int) -> str | None:
    """Return the beginning of an envelope's payload as text; of JSON, with its escapes resolved.

    Text is a payload in UTF-8 whose content type is `text/*`, `*/json`, `*+json` or not given. None for any
    other, for one that is encrypted, compressed or a packed message, and where the bytes are no envelope.

    Arguments:
        blob: the serialized envelope.
        max_chars: characters of the payload to read, an escape counted as it is written.
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
    return _ESCAPES.sub(_unescaped, text) if is_json and "\\" in text else text


def _may_be_text(content_type: str) -> bool:
    media = (content_type or "text/plain").partition(";")[0].strip().lower()
    return media.startswith("text/") or media.endswith(("/json", "+json"))


def _unescaped(escapes: re.Match[str]) -> str:
    text: str = json.loads(f'"{escapes[0]}"')
    return text
