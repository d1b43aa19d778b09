import re
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
from blake3 import blake3
from hypothesis import assume, given
from hypothesis import strategies as st

from postroom.application.mailbox.codec import is_intact
from postroom.application.mailbox.message_factory import MessageFactory
from postroom.application.messages import rfc3339
from postroom.domain.envelope.build import EnvelopeHeaders, make_template, open_envelope, without_auth_token
from postroom.domain.envelope.headers import (
    extension_bytes,
    extension_text,
    extract_mailbox_item,
    parse_envelope,
)
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.envelope.validation import ValidationMode, validate_envelope
from postroom.domain.errors import InvalidRequest
from postroom.domain.mailbox.send_decisions import sent as sent_event
from postroom.domain.message import MessageSent
from postroom.domain.record import Record
from postroom.domain.search import Cursor, topic_matches
from tests.support.envelopes import build_envelope

TOKEN = "bearer-5f1c2d"

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = texts.filter(bool)
optional_texts = st.none() | names
int64s = st.integers(-(2**63), 2**63 - 1)

times = st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999)  # years 1 to 9999

sent_messages = st.fixed_dictionaries(
    {
        "message_id": names,
        "topic": names,
        "namespace": names,
        "published_at_us": times,
        "payload": st.binary(max_size=100),
        "attrs": st.dictionaries(texts, texts | st.binary(max_size=20), max_size=5),
        "priority": st.integers(0, 10),
        "ttl_seconds": st.integers(0, 2**63 - 1),
        "content_type": optional_texts,
        "correlation_id": optional_texts,
        "principal": optional_texts,
        "encryption": optional_texts,
        "trace_id": optional_texts,
        "span_id": optional_texts,
        "schema_url": optional_texts,
        "schema_version": optional_texts,
    }
)


contexts = st.fixed_dictionaries(
    {},
    optional={
        "trace_flags": st.integers(0, 255),
        "trace_state": texts,
        # Of one length, as protobuf's order of names differs where one begins with another.
        "baggage": st.dictionaries(st.text("abé🚀", min_size=3, max_size=3), texts, max_size=4),
        "causality_parent": optional_texts,
    },
)


@st.composite
def envelopes(draw: st.DrawFn) -> bytes:
    """Envelopes as others may write them: any sub-message missing, any number out of range."""
    envelope = PrismEnvelope(envelope_version=draw(st.integers(-1, 3)))
    if draw(st.booleans()):
        envelope.metadata.message_id = draw(texts)
        envelope.metadata.topic = draw(texts)
    if draw(st.booleans()):
        envelope.metadata.published_at.seconds = draw(int64s)
        envelope.metadata.published_at.nanos = draw(st.integers(-(2**31), 2**31 - 1))
    if draw(st.booleans()):
        envelope.security.publisher_id = draw(texts)
        envelope.security.auth_token = draw(st.sampled_from(["", TOKEN]))
    if draw(st.booleans()):
        envelope.observability.trace_id = draw(texts)
    for name, value in draw(st.dictionaries(texts, st.binary(max_size=20), max_size=3)).items():
        envelope.extensions[name] = value
    return envelope.SerializeToString()


@st.composite
def unknown_fields(draw: st.DrawFn) -> bytes:
    """A field of a number that version 1 doesn't have, holding some bytes."""
    value = draw(st.binary(max_size=50))
    tag = draw(st.integers(200, 2_000)) << 3 | 2
    return bytes([tag & 0x7F | 0x80, tag >> 7, len(value)]) + value


@st.composite
def damaged_envelopes(draw: st.DrawFn) -> bytes:
    """Envelopes with a byte changed or the end cut off."""
    blob = bytearray(draw(envelopes()))
    if blob and draw(st.booleans()):
        blob[draw(st.integers(0, len(blob) - 1))] = draw(st.integers(0, 255))
    return bytes(blob[: draw(st.integers(0, len(blob)))])


@given(sent_messages)
def test_what_an_envelope_is_built_from_is_what_it_opens_to_and_is_indexed_by(sent: dict[str, Any]) -> None:
    blob = build_envelope(**sent)
    opened = open_envelope(blob)
    item = extract_mailbox_item(blob)
    wire_attrs = {
        name: value if isinstance(value, bytes) else value.encode() for name, value in sent["attrs"].items()
    }
    assert opened.extensions == wire_attrs
    assert {name: extension_bytes(text) for name, text in opened.attrs.items()} == wire_attrs
    assert item.custom_headers == opened.attrs
    assert item.timestamp == sent["published_at_us"] // 1_000
    for name in ("message_id", "topic", "namespace", "content_type", "correlation_id", "principal"):
        assert getattr(opened, name) == getattr(item, name) == sent[name]
    for name in ("published_at_us", "payload", "priority", "ttl_seconds"):
        assert getattr(opened, name) == sent[name]
    for name in ("encryption", "trace_id", "span_id", "schema_url", "schema_version"):
        assert getattr(item, name) == sent[name]


@given(sent_messages, contexts, st.integers(0, 20_000), times, st.sampled_from([None, "", "call", "Größe"]))
def test_a_template_builds_the_bytes_of_protobuf_which_are_a_valid_envelope(
    sent: dict[str, Any], context: dict[str, Any], more: int, later_us: int, later_id: str | None
) -> None:
    fields = sent | context | {"encryption": None, "payload": sent["payload"] + bytes(more)}
    of_each = {"message_id", "payload", "attrs", "encryption"}
    template = make_template(
        EnvelopeHeaders(**{name: value for name, value in fields.items() if name not in of_each})
    )
    attrs = {name: v if isinstance(v, bytes) else v.encode() for name, v in fields["attrs"].items()}
    built = template.build(fields["message_id"], fields["payload"], attrs)
    assert built == build_envelope(**fields)
    later = template.at(later_us, later_id).build(fields["message_id"], fields["payload"], attrs)
    assert later == build_envelope(**fields | {"published_at_us": later_us, "correlation_id": later_id})
    assert validate_envelope(built).problems == ()


@given(st.binary(max_size=200) | damaged_envelopes(), st.sampled_from(ValidationMode))
def test_any_bytes_are_either_an_envelope_or_refused_as_an_invalid_request(
    blob: bytes, mode: ValidationMode
) -> None:
    readers = (extract_mailbox_item, open_envelope, without_auth_token)
    try:
        for reader in readers:
            reader(blob)
    except InvalidRequest:
        for reader in readers:
            assert is_refused(reader, blob)
        assert not validate_envelope(blob, mode).is_accepted
    else:
        assert validate_envelope(blob, ValidationMode.WARN).is_accepted
        read_all(blob)


def is_refused(reader: Any, blob: bytes) -> bool:
    try:
        reader(blob)
    except InvalidRequest:
        return True
    return False


def read_all(blob: bytes) -> None:
    opened = open_envelope(blob)
    assert all(hasattr(opened, name) for name in dir(opened))
    extract_mailbox_item(blob).reconstruct_envelope()


@given(envelopes())
def test_an_extracted_item_always_fits_the_table(blob: bytes) -> None:
    item = extract_mailbox_item(blob, received_at=1)
    assert item.message_id
    assert -(2**63) <= item.timestamp < 2**63
    assert item.envelope_blob is blob


@given(envelopes(), unknown_fields())
def test_unknown_fields_survive_byte_for_byte(blob: bytes, unknown: bytes) -> None:
    item = extract_mailbox_item(blob + unknown)
    assert item.envelope_blob == blob + unknown
    assert unknown in item.reconstruct_envelope().SerializeToString()
    assert unknown in without_auth_token(blob + unknown)


@given(envelopes())
def test_the_auth_token_is_never_delivered_nor_shown(blob: bytes) -> None:
    delivered = without_auth_token(blob)
    assert TOKEN.encode() not in delivered
    assert (delivered is blob) == (TOKEN.encode() not in blob)
    assert TOKEN not in repr(extract_mailbox_item(blob))
    assert extract_mailbox_item(blob).reconstruct_envelope() == PrismEnvelope.FromString(delivered)


@given(st.binary(max_size=50) | texts.map(str.encode) | texts.map(lambda text: f"base64:{text}".encode()))
def test_the_text_of_an_extension_leads_back_to_its_bytes(value: bytes) -> None:
    text = extension_text(value)
    assert extension_bytes(text) == value
    assert "\0" not in text


@given(int64s, int64s)
def test_a_cursor_survives_its_journey_as_text_that_is_safe_in_a_url(timestamp: int, row: int) -> None:
    text = Cursor(timestamp, row).encode()
    assert Cursor.decode(text) == Cursor(timestamp, row)
    assert re.fullmatch(r"[A-Za-z0-9_-]+", text)


@given(st.text("ab.*", max_size=8), st.text("ab.", max_size=8))
def test_a_glob_matches_what_the_regular_expression_of_it_matches(pattern: str, topic: str) -> None:
    expected = re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), topic) is not None
    assert topic_matches(pattern, topic) == expected


def stored_message(blob: bytes, idem_key: str | None) -> MessageSent:
    """Return the event of an envelope from outside; an envelope that is refused is no example."""
    envelope = parse_envelope(blob)
    envelope.metadata.topic = "orders"
    blob = envelope.SerializeToString(deterministic=True)
    factory = MessageFactory("acme@one", lambda: 1, lambda: UUID(int=7))
    try:
        request = factory.from_envelope(blob, parse_envelope(blob), idem_key=idem_key)
    except InvalidRequest:
        assume(False)
    return sent_event(request.command, 0, 0, 0, 0)


def hashed_parts(message: MessageSent) -> tuple[object, ...]:
    envelope = open_envelope(message.envelope)
    return (
        message.topic,
        envelope.published_at_us,
        message.idem_key,
        envelope.payload,
        dict(envelope.extensions),
    )


def record_of(message: MessageSent, envelope: bytes) -> Record:
    """Return the record of a message with the hash of an envelope."""
    return Record(1, 1, bytes(32), message, 0, blake3(envelope).digest())


@given(envelopes(), st.none() | st.text("ké", min_size=1), st.data())
def test_no_altered_message_passes_its_hashes(blob: bytes, idem_key: str | None, data: st.DataObject) -> None:
    """They cover each bit of the envelope, and what svc-mailbox I-12 names, also by itself (G-7)."""
    message = stored_message(blob, idem_key)
    assert is_intact(record_of(message, message.envelope))
    flipped = bytearray(message.envelope)
    flipped[data.draw(st.integers(0, len(flipped) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    changes: list[dict[str, Any]] = [
        {"envelope": bytes(flipped)},
        {"topic": f"{message.topic}.eu"},
        {"idem_key": f"{message.idem_key}x"},
        {"payload_hash": message.payload_hash[::-1]},
        {"hash_chain": message.hash_chain[::-1]},
    ]
    for change in changes:
        altered = msgspec.structs.replace(message, **change)
        assert not is_intact(record_of(altered, message.envelope))
        with_its_hash = record_of(altered, altered.envelope)
        assert not is_intact(with_its_hash) or hashed_parts(altered) == hashed_parts(message)


@given(st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999))
def test_a_time_is_written_as_its_date_and_time_with_microseconds(time_us: int) -> None:
    time = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=time_us)
    assert rfc3339(time_us) == time.isoformat(timespec="microseconds").replace("+00:00", "Z")
