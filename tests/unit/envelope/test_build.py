from typing import Any

import pytest

from postroom.domain.envelope.build import EnvelopeHeaders, make_template, open_envelope, without_auth_token
from postroom.domain.envelope.headers import extract_mailbox_item
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.errors import InvalidRequest
from tests.support.envelopes import build_envelope

PLAIN: dict[str, Any] = {
    "message_id": "0190aaaa-bbbb-7ccc-8ddd-eeeeffff0000",
    "topic": "orders.created",
    "namespace": "shop",
    "published_at_us": 1_760_000_000_123_456,
    "payload": b"\x00payload",
    "attrs": {"colour": "blue", "raw": b"\xff"},
}

HEADERS: dict[str, Any] = {
    "content_type": "application/json",
    "content_encoding": "gzip",
    "correlation_id": "corr-1",
    "causality_parent": "msg-0",
    "principal": "user-123",
    "encryption": "aes-256-gcm",
    "trace_id": "trace-1",
    "span_id": "span-1",
    "schema_url": "schemas.example/order",
    "schema_version": "v2",
}


def with_token() -> PrismEnvelope:
    envelope = PrismEnvelope.FromString(build_envelope(**PLAIN, **HEADERS))
    envelope.security.auth_token = "bearer-5f1c2d"
    return envelope


def built(**headers: Any) -> bytes:
    template = make_template(
        EnvelopeHeaders(PLAIN["topic"], PLAIN["namespace"], PLAIN["published_at_us"], **headers)
    )
    return template.build(PLAIN["message_id"], PLAIN["payload"], {"colour": b"blue", "raw": b"\xff"})


def test_a_plain_envelope_holds_what_was_sent_and_no_sub_message_it_does_not_need() -> None:
    envelope = PrismEnvelope.FromString(built())
    assert envelope.envelope_version == 1
    assert (envelope.payload.type_url, envelope.payload.value) == ("", b"\x00payload")
    assert dict(envelope.extensions) == {"colour": b"blue", "raw": b"\xff"}
    assert envelope.metadata.published_at.ToMicroseconds() == 1_760_000_000_123_456
    assert not any(envelope.HasField(name) for name in ("security", "observability", "schema"))


def test_an_envelope_without_an_opinion_has_the_contracts_default_priority() -> None:
    assert open_envelope(built()).priority == 5


def test_an_opened_envelope_gives_back_what_it_was_built_from() -> None:
    opened = open_envelope(build_envelope(**PLAIN, **HEADERS, priority=9, ttl_seconds=60))
    assert (opened.message_id, opened.topic, opened.namespace) == (
        PLAIN["message_id"],
        "orders.created",
        "shop",
    )
    assert (opened.payload, opened.published_at_us) == (b"\x00payload", 1_760_000_000_123_456)
    assert (opened.priority, opened.ttl_seconds) == (9, 60)
    assert (opened.content_type, opened.content_encoding) == ("application/json", "gzip")
    assert (opened.correlation_id, opened.causality_parent) == ("corr-1", "msg-0")
    assert opened.principal == "user-123"


def test_attributes_come_back_as_text_and_extensions_as_bytes() -> None:
    opened = open_envelope(build_envelope(**PLAIN))
    assert opened.attrs == {"colour": "blue", "raw": "base64:/w=="}
    assert opened.extensions == {"colour": b"blue", "raw": b"\xff"}


def test_a_header_that_was_not_given_opens_as_none() -> None:
    opened = open_envelope(build_envelope(**PLAIN))
    assert (opened.content_type, opened.content_encoding) == (None, None)
    assert (opened.correlation_id, opened.causality_parent, opened.principal) == (None, None, None)
    assert opened.ttl_seconds == 0


def test_an_envelope_without_a_possible_publish_time_opens_with_none() -> None:
    impossible = PrismEnvelope()
    impossible.metadata.published_at.nanos = -1
    assert open_envelope(b"").published_at_us is None
    assert open_envelope(impossible.SerializeToString()).published_at_us is None


@pytest.mark.parametrize("header", sorted(HEADERS.keys() - {"content_encoding", "causality_parent"}))
def test_each_header_given_is_indexed_and_no_other(header: str) -> None:
    bare = extract_mailbox_item(build_envelope(**PLAIN))
    item = extract_mailbox_item(build_envelope(**PLAIN, **{header: HEADERS[header]}))
    changed = {
        name
        for name in item.__struct_fields__
        if name != "envelope_blob" and getattr(item, name) != getattr(bare, name)
    }
    assert changed == {header}
    assert getattr(item, header) == HEADERS[header]


def test_an_envelope_without_auth_token_is_delivered_as_the_very_same_bytes() -> None:
    for blob in (build_envelope(**PLAIN), build_envelope(**PLAIN, **HEADERS)):
        assert without_auth_token(blob) is blob


def test_an_envelope_with_auth_token_is_delivered_without_it_and_otherwise_whole() -> None:
    unknown_field = bytes.fromhex("c23e03") + b"new"
    delivered = without_auth_token(with_token().SerializeToString() + unknown_field)
    assert b"bearer-5f1c2d" not in delivered
    assert delivered.endswith(unknown_field)
    expected = PrismEnvelope.FromString(build_envelope(**PLAIN, **HEADERS) + unknown_field)
    assert PrismEnvelope.FromString(delivered) == expected


def test_a_token_split_over_two_security_sub_messages_is_found() -> None:
    blob = (
        build_envelope(**PLAIN, **HEADERS)
        + PrismEnvelope(security={"auth_token": "x-y-z"}).SerializeToString()
    )
    assert b"x-y-z" not in without_auth_token(blob)


def test_an_opened_envelope_shows_no_auth_token() -> None:
    opened = open_envelope(with_token().SerializeToString())
    public = {name: getattr(opened, name) for name in dir(opened) if not name.startswith("_")}
    assert "bearer" not in f"{opened!r} {public}"


def test_opening_or_stripping_bytes_that_are_no_envelope_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not a PrismEnvelope"):
        open_envelope(b"junk")
    with pytest.raises(InvalidRequest, match="not a PrismEnvelope"):
        without_auth_token(b"junk")
