"""The form of a new message, which may begin with the payload and headers of another one."""

import re
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import NamedTuple

from postroom.adapters.console.values import read_duration
from postroom.application.messages import NewMessage
from postroom.application.text import printable
from postroom.domain.envelope.build import OpenedEnvelope
from postroom.domain.envelope.content import decompress
from postroom.domain.envelope.headers import BINARY_PREFIX, extension_bytes, extension_text
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.errors import FrameTooLarge, InvalidRequest, PostroomError
from postroom.domain.message import DEFAULT_PRIORITY, MAX_PRIORITY

MAX_EDIT_BYTES = 256 << 10
"""Size of a payload above which it is not edited in a page."""
MAX_HEADERS = 200
_NOT_IN_FIELDS = frozenset("\r\n\0")
EMPTY_ROWS = 3
"""Number of rows for new headers."""
SENT_BEFORE = (
    "This form was submitted before with other content, so nothing was sent; submit it again to send the "
    "message below."
)
TEXT, BASE64 = "text", "base64"
_LABELS = {
    "deliver_after_ms": "Delay",
    "ttl_seconds": "Time to live in seconds",
    "sticky_key": "Key",
    "content_type": "Content type",
    "correlation_id": "Correlation id",
    "schema_url": "Schema",
    "schema_version": "Schema version",
    "attrs": "Custom headers",
}
"""Labels of the form, by the names of the fields in errors of the mailbox."""
_NAME = re.compile(rf"\b({'|'.join(_LABELS)})\b")


class Draft(NamedTuple):
    """The fields of the form, all of them text.

    Arguments:
        encoding: encoding of the payload, `text` or `base64`.
        headers: names and values of custom headers.
        sticky_key: empty for a copy of another message, as is `delay`.
        delay: a duration such as `2h`, or empty.
    """

    topic: str
    payload: str
    encoding: str = TEXT
    headers: tuple[tuple[str, str], ...] = ()
    content_type: str = ""
    correlation_id: str = ""
    priority: str = str(DEFAULT_PRIORITY)
    ttl_seconds: str = "0"
    schema_url: str = ""
    schema_version: str = ""
    sticky_key: str = ""
    delay: str = ""

    @property
    def rows(self) -> tuple[tuple[str, str], ...]:
        """Return the headers, followed by empty rows."""
        return self.headers + (("", ""),) * EMPTY_ROWS


def explain(error: PostroomError) -> str:
    """Return an error as text that names the fields as the form does."""
    return _NAME.sub(lambda name: f'"{_LABELS[name[0]]}"', str(error))


def draft_of(envelope: PrismEnvelope, id_: str, topic: str) -> Draft:
    """Return a draft with the payload and headers of a message.

    The payload is decompressed, as new messages have no content encoding. It is edited as text if all of its
    characters are visible, else in base64.

    Arguments:
        id_: id of the message, used as correlation id if it has none.

    Raises: InvalidRequest for a payload that is encrypted or can't be decompressed, for too many headers and
        for a header with a line end; FrameTooLarge for a payload of more than `MAX_EDIT_BYTES`.
    """
    message = message_like(envelope, id_, topic)
    if len(message.payload) > MAX_EDIT_BYTES:
        raise FrameTooLarge(
            f"The payload of message {id_} has {len(message.payload):,} bytes; payloads of up to "
            f"{MAX_EDIT_BYTES:,} can be edited here. Download it, edit the file, and send it with postroom "
            "send --file."
        )
    if len(message.attrs) > MAX_HEADERS:
        raise InvalidRequest(
            f"Message {id_} has {len(message.attrs):,} custom headers; up to {MAX_HEADERS} can be edited."
        )
    headers = tuple((name, extension_text(value)) for name, value in _as_bytes(message.attrs).items())
    texts = [message.content_type, message.correlation_id, message.schema_url, message.schema_version]
    for text in (*message.attrs, *filter(None, texts)):
        if not _NOT_IN_FIELDS.isdisjoint(text):
            shown = printable(text, multiline=False)[:80]
            raise InvalidRequest(
                f"A header of message {id_} has a line end or a NUL in {shown!r}, which a form field can't "
                "contain; copy the code for curl or Python, and edit that."
            )
    payload, encoding = _as_text(message.payload)
    return Draft(
        topic,
        payload,
        encoding,
        headers,
        message.content_type or "",
        message.correlation_id or "",
        str(message.priority),
        str(message.ttl_seconds),
        message.schema_url or "",
        message.schema_version or "",
    )


def message_like(envelope: PrismEnvelope, id_: str, topic: str) -> NewMessage:
    """Return a new message with the payload and headers of another one, which is its causality parent.

    Arguments:
        id_: id of the other message, used as correlation id if it has none.

    Raises: InvalidRequest for a payload that is encrypted or can't be decompressed.
    """
    content = OpenedEnvelope(envelope)
    attrs = {name: _as_attr(value) for name, value in sorted(content.extensions.items())}
    return NewMessage(
        topic=topic,
        payload=plain_payload(envelope),
        attrs=attrs,
        ttl_seconds=max(content.ttl_seconds, 0),
        content_type=content.content_type,
        correlation_id=content.correlation_id or id_,
        causality_parent=id_,
        priority=min(max(content.priority, 0), MAX_PRIORITY),
        schema_url=content.schema_url,
        schema_version=content.schema_version,
    )


def plain_payload(envelope: PrismEnvelope) -> bytes:
    """Return the decompressed payload of a message.

    Raises: InvalidRequest for a payload that is encrypted or can't be decompressed.
    """
    if envelope.security.HasField("encryption"):
        raise InvalidRequest(
            "The payload is encrypted, and the console can't encrypt it again; send it from the program that "
            "has the key."
        )
    try:
        return decompress(envelope.payload.value, envelope.metadata.content_encoding)
    except InvalidRequest as error:
        raise InvalidRequest(f"The payload {error}, so it can't be edited; download it instead.") from None


def read_draft(fields: Mapping[str, object]) -> Draft:
    """Return the draft in the fields of a form; missing ones, and files, are empty."""
    form = {name: value for name, value in fields.items() if isinstance(value, str)}
    rows = range(MAX_HEADERS + EMPTY_ROWS)
    names = [(form.get(f"header-name-{row}", ""), form.get(f"header-value-{row}", "")) for row in rows]
    return Draft(
        form.get("topic", "").strip(),
        form.get("payload", ""),
        BASE64 if form.get("encoding") == BASE64 else TEXT,
        tuple((name, value) for name, value in names if name or value),
        form.get("content_type", "").strip(),
        form.get("correlation_id", ""),
        form.get("priority", "").strip(),
        form.get("ttl_seconds", "").strip(),
        form.get("schema_url", "").strip(),
        form.get("schema_version", "").strip(),
        form.get("sticky_key", ""),
        form.get("delay", "").strip(),
    )


def to_message(
    draft: Draft,
    original: PrismEnvelope | None,
    original_id: str | None,
    new_id: str | None,
    principal: str | None,
) -> NewMessage:
    """Return the message of a draft, with the original as its causality parent.

    Browsers submit every line end as CR LF. Unchanged text keeps the line ends of the original; changed text
    gets LF, unless all line ends of the original are CR LF.

    Arguments:
        original, original_id: None for a message that does not copy another one.
        new_id: UUID of the message, so that a form that is submitted twice sends one message; None generates
            one.

    Raises: InvalidRequest naming the malformed field.
    """
    return NewMessage(
        topic=draft.topic,
        payload=_payload(draft, b"" if original is None else plain_payload(original)),
        attrs=_attrs(draft, {} if original is None else OpenedEnvelope(original).extensions),
        message_id=new_id,
        ttl_seconds=_number("The time to live", draft.ttl_seconds),
        content_type=draft.content_type or None,
        correlation_id=draft.correlation_id or None,
        causality_parent=original_id,
        principal=principal,
        priority=_number("The priority", draft.priority, str(DEFAULT_PRIORITY)),
        schema_url=draft.schema_url or None,
        schema_version=draft.schema_version or None,
        sticky_key=draft.sticky_key or None,
        deliver_after_ms=read_duration("The delay", draft.delay) if draft.delay else 0,
    )


def _as_attr(value: bytes) -> str | bytes:
    """Return the value of a header as text, or as bytes if its text would be base64."""
    text = extension_text(value)
    return value if text.startswith(BINARY_PREFIX) else text


def _as_bytes(attrs: Mapping[str, str | bytes]) -> dict[str, bytes]:
    return {name: value if isinstance(value, bytes) else value.encode() for name, value in attrs.items()}


def _is_visible(text: str) -> bool:
    return printable(text) == text


def _as_text(data: bytes) -> tuple[str, str]:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = None
    if text is not None and _is_visible(text.replace("\r\n", "\n")):
        return text, TEXT
    return b64encode(data).decode(), BASE64


def _payload(draft: Draft, original: bytes) -> bytes:
    if draft.encoding == BASE64:
        try:
            return b64decode("".join(draft.payload.split()), validate=True)
        except ValueError:
            raise InvalidRequest("The payload is not base64; correct it, or choose text.") from None
    return _with_line_ends(draft.payload, original).encode()


def _attrs(draft: Draft, original: Mapping[str, bytes]) -> dict[str, str | bytes]:
    attrs: dict[str, str | bytes] = {}
    for name, value in draft.headers:
        if not name:
            raise InvalidRequest(
                f"A header has the value {value[:80]!r} but no name; name the header, or clear the value."
            )
        if name in attrs:
            raise InvalidRequest(f"The header {name[:80]!r} occurs twice; remove one of them.")
        attrs[name] = _attr(name, value, original.get(name, b""))
    return attrs


def _attr(name: str, value: str, original: bytes) -> str | bytes:
    if not value.startswith(BINARY_PREFIX):
        return _with_line_ends(value, original)
    try:
        b64decode(value[len(BINARY_PREFIX) :], validate=True)
        return extension_bytes(value)
    except ValueError:
        raise InvalidRequest(
            f"The value of the header {name[:80]!r} begins with {BINARY_PREFIX} but is not "
            "base64; correct it."
        ) from None


def _with_line_ends(text: str, original: bytes) -> str:
    lines = _lines(text)
    try:
        before = original.decode()
    except UnicodeDecodeError:
        return lines
    if lines == _lines(before):
        return before
    has_crlf = "\r\n" in before and "\n" not in before.replace("\r\n", "")
    return lines.replace("\n", "\r\n") if has_crlf else lines


def _lines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _number(name: str, text: str, default: str = "0") -> int:
    digits = text or default
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 12):
        raise InvalidRequest(f"{name} must be a number without a sign; it was {text[:40]!r}.")
    return int(digits)
