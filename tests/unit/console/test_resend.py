"""What is edited in a form is sent as it was written, and what is not edited as it was."""

from collections.abc import Mapping

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from postroom.adapters.console.resend import BASE64, TEXT, Draft, draft_of, read_draft, to_message
from postroom.application.messages import NewMessage
from postroom.domain.envelope.headers import custom_headers
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.errors import FrameTooLarge, InvalidRequest

ID = "0199d2c4-6f00-7a10-8c21-3b5b0f6f9e01"
VALUES = st.binary(max_size=8) | st.text(max_size=8).map(str.encode)


def envelope(payload: bytes, attrs: Mapping[str, bytes] | None = None, **fields: str) -> PrismEnvelope:
    made = PrismEnvelope()
    made.payload.value = payload
    for name, value in (attrs or {}).items():
        made.extensions[name] = value
    for name, text in fields.items():
        setattr(made.metadata, name, text)
    return made


def as_browser(draft: Draft) -> dict[str, str]:
    """Return the fields that a browser sends of a draft that nobody edited: its lines end with CR LF."""
    fields = {name: getattr(draft, name) for name in Draft._fields if name != "headers"}
    for row, (name, value) in enumerate(draft.rows):
        fields |= {f"header-name-{row}": name, f"header-value-{row}": _lines(value)}
    return fields | {"payload": _lines(draft.payload)}


def _lines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\n", "\r\n")


def resent(original: PrismEnvelope, **edits: str) -> NewMessage:
    draft = draft_of(original, ID, "orders")
    return to_message(read_draft(as_browser(draft) | edits), original, ID, None, "eve")


@given(payload=VALUES, attrs=st.dictionaries(st.text(min_size=1, max_size=3), VALUES, max_size=3))
@example(payload=b"a\rb\r\nc\n", attrs={"a": b"x\ry\n", "b": b"base64:", "c": b"\0"})
@example(payload=b"\n\n leading", attrs={})
@example(payload="\N{RIGHT-TO-LEFT OVERRIDE}".encode(), attrs={"n": "\N{RIGHT-TO-LEFT OVERRIDE}".encode()})
def test_what_is_not_edited_is_sent_as_it_was(payload: bytes, attrs: dict[str, bytes]) -> None:
    original = envelope(payload, attrs)
    try:
        message = resent(original)
    except InvalidRequest as error:
        assert "has a line end or a NUL in" in str(error)  # noqa: PT017  # the only refusal of the form
        return
    assert message.payload == payload
    sent = {name: each if isinstance(each, bytes) else each.encode() for name, each in message.attrs.items()}
    assert custom_headers(sent) == custom_headers(attrs)


def test_the_new_message_is_caused_by_the_original() -> None:
    message = resent(envelope(b"{}", content_type="application/json"), topic="other", payload="[]")
    assert (message.topic, message.payload, message.content_type) == ("other", b"[]", "application/json")
    assert (message.causality_parent, message.correlation_id, message.principal) == (ID, ID, "eve")


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"a\nb", b"a\nb\nc"), (b"a\r\nb", b"a\r\nb\r\nc"), (b"a", b"a\nb\nc")],
    ids=["lf", "crlf", "none"],
)
def test_edited_text_has_the_line_ends_of_the_original(before: bytes, after: bytes) -> None:
    assert resent(envelope(before), payload="a\r\nb\r\nc").payload == after


def test_binary_payloads_and_those_with_invisible_characters_are_edited_in_base64() -> None:
    assert draft_of(envelope(b"\xff"), ID, "t").encoding == BASE64
    assert draft_of(envelope("a\N{RIGHT-TO-LEFT OVERRIDE}b".encode()), ID, "t").encoding == BASE64
    assert draft_of(envelope("שלום\n".encode()), ID, "t").encoding == TEXT
    assert resent(envelope(b"\xff"), payload="/w==\r\n").payload == b"\xff"


@pytest.mark.parametrize(
    ("edits", "error"),
    [
        ({"encoding": BASE64, "payload": "not base64!"}, "not base64"),
        ({"header-name-0": "", "header-value-0": "x"}, "no name"),
        ({"header-name-0": "a", "header-name-1": "a"}, "occurs twice"),
        ({"header-name-0": "a", "header-value-0": "base64:!"}, "not base64"),
        ({"priority": "-1"}, "priority must be a number"),
        ({"ttl_seconds": "1e9"}, "time to live must be a number"),
    ],
    ids=["payload", "nameless", "twice", "header", "priority", "ttl"],
)
def test_a_field_that_is_malformed_is_named(edits: dict[str, str], error: str) -> None:
    with pytest.raises(InvalidRequest, match=error):
        resent(envelope(b"x"), **edits)


def test_payloads_that_can_not_be_edited_are_refused() -> None:
    with pytest.raises(FrameTooLarge, match="postroom send --file"):
        draft_of(envelope(b"x" * 300_000), ID, "t")
    with pytest.raises(InvalidRequest, match="incomplete gzip data"):
        draft_of(envelope(b"x", content_encoding="gzip"), ID, "t")
    with pytest.raises(InvalidRequest, match="201 custom headers"):
        draft_of(envelope(b"x", {str(number): b"" for number in range(201)}), ID, "t")
    encrypted = envelope(b"x")
    encrypted.security.encryption.algorithm = "aes"
    with pytest.raises(InvalidRequest, match="encrypted"):
        draft_of(encrypted, ID, "t")
