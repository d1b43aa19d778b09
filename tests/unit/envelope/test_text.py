"""Which payloads are text that anybody may read, and how it reads."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.domain.envelope.content import payload_text
from postroom.domain.envelope.v1.envelope_pb2 import EncryptionType, PrismEnvelope
from tests.support.envelopes import build_envelope


def text_of(payload: bytes, **headers: Any) -> str | None:
    blob = build_envelope(
        message_id="m", topic="t", namespace="", published_at_us=0, payload=payload, attrs={}, **headers
    )
    return payload_text(blob, 100)


@pytest.mark.parametrize(
    "content_type",
    [
        *(None, "text/plain", "TEXT/HTML; charset=utf-8", "application/json", "application/JSON ; x=y"),
        *("application/vnd.api+json", "text/csv"),
    ],
)
def test_a_payload_is_text_if_its_content_type_says_so_or_nothing(content_type: str | None) -> None:
    assert text_of("Grüße".encode(), content_type=content_type) == "Grüße"


@pytest.mark.parametrize(
    ("payload", "headers"),
    [
        (b"hello", {"content_type": "image/png"}),
        (b"hello", {"content_type": "application/x-protobuf"}),
        (b"hello", {"encryption": "aes-256-gcm"}),
        (b"hello", {"content_encoding": "gzip"}),
        (b"\xff\x00", {}),
        (b"\xff\x00", {"content_type": "text/plain"}),
    ],
)
def test_what_is_encrypted_compressed_or_no_text_is_not_read(payload: bytes, headers: dict[str, Any]) -> None:
    assert text_of(payload, **headers) is None


def test_an_encryption_without_a_name_is_one_too() -> None:
    envelope = PrismEnvelope()
    envelope.payload.value = b"hello"
    envelope.security.encryption.encryption_type = EncryptionType.ENCRYPTION_TYPE_SYMMETRIC
    assert payload_text(envelope.SerializeToString(), 100) is None


def test_a_packed_message_is_no_text_unless_its_content_type_says_so() -> None:
    envelope = PrismEnvelope()
    envelope.payload.value = b"hello"
    envelope.payload.type_url = "type.googleapis.com/shop.Order"
    assert payload_text(envelope.SerializeToString(), 100) is None
    envelope.metadata.content_type = "text/plain"
    assert payload_text(envelope.SerializeToString(), 100) == "hello"


@pytest.mark.parametrize(
    ("payload", "headers", "text"),
    [
        (rb'{"a": "x\ny\u00e9"}', {}, '{"a": "x\nyé"}'),
        (rb'["\\n \"\ud83d\ude00\/\ud800"]', {}, '["\\n "😀/\ud800"]'),
        (rb'"x\ty"', {"content_type": "application/json"}, '"x\ty"'),
        (rb"C:\new", {}, r"C:\new"),
        (rb'{"cut": "\u00', {}, r'{"cut": "\u00'),
        (rb'{"odd": "\q"}', {}, r'{"odd": "\q"}'),
    ],
)
def test_the_escapes_of_json_are_resolved(payload: bytes, headers: dict[str, Any], text: str) -> None:
    assert text_of(payload, **headers) == text


def test_only_the_beginning_is_read() -> None:
    assert text_of(b"a" * 1_000) == "a" * 100
    assert text_of(b"") == ""


@given(st.binary())
def test_bytes_that_are_no_envelope_have_no_text_and_break_nothing(blob: bytes) -> None:
    assert payload_text(blob, 100) is None or isinstance(payload_text(blob, 100), str)


@given(st.binary() | st.text().map(lambda text: ('{"' + text + "\\").encode(errors="replace")))
def test_no_payload_breaks_anything(payload: bytes) -> None:
    text_of(payload)
    text_of(payload, content_type="application/json")
