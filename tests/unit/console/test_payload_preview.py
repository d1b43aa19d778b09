"""Previews show the first part of a payload, and never take longer than that is worth."""

import gzip
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.application import payload_preview
from postroom.application.masking import Mask
from postroom.application.payload_preview import (
    PREVIEW_CHARS,
    PayloadPreview,
    indent_json,
    preview_payload,
)
from postroom.domain.envelope.content import PayloadFormat, decode_payload
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=20,
)


def preview(
    payload: bytes, content_type: str = "", encoding: str = "", mask: Mask | None = None
) -> PayloadPreview:
    envelope = PrismEnvelope()
    envelope.payload.value = payload
    envelope.metadata.content_type = content_type
    envelope.metadata.content_encoding = encoding
    return preview_payload(envelope, decode_payload, mask or Mask())


@given(value=JSON)
def test_indented_json_stands_for_the_same_value(value: Any) -> None:
    text, is_complete = indent_json(json.dumps(value), 1 << 20)
    assert is_complete
    assert json.loads(text) == value


def test_json_is_indented_and_its_names_numbers_and_escapes_stay_as_they_are() -> None:
    shown = preview(rb'{"a":1.10,"b":["\u202e",{}],"a":[]}')
    assert shown.format == PayloadFormat.JSON
    assert shown.text == ('{\n  "a": 1.10,\n  "b": [\n    "\\u202e",\n    {}\n  ],\n  "a": []\n}')


@pytest.mark.parametrize(
    "text",
    [
        "[" * 900 + "1," * 5_000 + "1" + "]" * 900,
        json.dumps(["\n" * 1_000_000]),
        json.dumps(["x" * 5_000_000, 1]),
    ],
    ids=["deep", "escapes", "long"],
)
def test_the_first_part_of_large_json_is_shown(text: str) -> None:
    shown = preview(text.encode())
    assert shown.format == PayloadFormat.JSON
    assert len(shown.text or "") <= PREVIEW_CHARS
    assert not shown.is_complete


def test_a_compressed_payload_is_shown_decompressed() -> None:
    shown = preview(gzip.compress(b'{"a": 1}'), "application/json", "gzip")
    assert (shown.text, shown.decoded_size) == ('{\n  "a": 1\n}', 8)


def test_bytes_are_shown_in_hexadecimal() -> None:
    shown = preview(bytes(range(256)) * 10)
    assert shown.text is None
    assert len(shown.rows) == 128
    assert not shown.is_complete
    assert shown.rows[4] == ("00000040", bytes(range(64, 80)).hex(" "), "@ABCDEFGHIJKLMNO")


@pytest.mark.parametrize("size", [payload_preview.MAX_DECODED_BYTES + 1, 60 << 20], ids=["8MiB", "60MiB"])
def test_what_decompresses_to_many_bytes_is_not_decoded(size: int) -> None:
    bomb = gzip.compress(b"[" + b"1," * (size // 2) + b"1]", 1)
    shown = preview(bomb, "application/json", "gzip")
    assert shown.format == PayloadFormat.TEXT
    assert shown.problems == ("has more than 8 MiB, and is not decoded here",)
    assert not shown.is_complete
    assert len(shown.text or "") == PREVIEW_CHARS


def test_a_large_text_is_cut_between_characters() -> None:
    shown = preview("é".encode() * (5 << 20), "text/plain")
    assert shown.format == PayloadFormat.TEXT
    assert shown.text == "é" * PREVIEW_CHARS
    binary = preview(b"\xff" * (payload_preview.MAX_DECODED_BYTES + 1), "text/plain")
    assert binary.format == PayloadFormat.BINARY
    assert binary.rows


def test_what_can_not_be_decoded_says_why() -> None:
    assert preview(b"{", "application/json").problems[0].startswith("is not JSON: ")
    assert preview(b"junk", "", "gzip").problems[0].startswith("is not valid gzip: ")
    assert preview(b"junk", "", "br").problems == ("is encoded with 'br', which is not supported",)


def test_hidden_fields_are_not_shown() -> None:
    mask = Mask(payload_fields=("/card",))
    shown = preview(b'{"card": 4111, "name": "x"}', mask=mask)
    assert shown.is_masked
    assert msgspec.json.decode(shown.text or "") == {"card": "[masked]", "name": "x"}
    whole = preview(b"card 4111", "text/plain", mask=mask)
    assert (whole.format, whole.text, whole.rows, whole.is_masked) == (None, None, (), True)


def test_an_encrypted_payload_is_shown_as_bytes() -> None:
    envelope = PrismEnvelope()
    envelope.payload.value = b'{"a": 1}'
    envelope.security.encryption.algorithm = "aes"
    envelope.metadata.content_encoding = "gzip"
    shown = preview_payload(envelope, decode_payload, Mask(payload_fields=("/a",)))
    assert (shown.format, shown.text, shown.is_masked) == (PayloadFormat.ENCRYPTED, None, False)
    assert shown.rows[0].text == '{"a": 1}'
