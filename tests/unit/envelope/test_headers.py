import pytest

from postroom.domain.envelope.headers import extension_bytes, extension_text, extract_mailbox_item
from postroom.domain.envelope.v1.envelope_pb2 import ENCRYPTION_TYPE_SYMMETRIC, PrismEnvelope
from postroom.domain.errors import InvalidRequest

SECRET = "bearer-5f1c2d"

# Field 1000 of the envelope and field 900 of its metadata, which version 1 doesn't have: a length and text.
UNKNOWN_FIELD = bytes.fromhex("c23e03") + b"new"
UNKNOWN_METADATA_FIELD = bytes.fromhex("a23803") + b"new"


def full_envelope() -> PrismEnvelope:
    envelope = PrismEnvelope(envelope_version=1)
    envelope.metadata.message_id = "msg-1"
    envelope.metadata.topic = "admin.users.created"
    envelope.metadata.namespace = "admin"
    envelope.metadata.published_at.seconds = 1_697_000_000
    envelope.metadata.published_at.nanos = 123_999_999
    envelope.metadata.content_type = "application/json"
    envelope.metadata.correlation_id = "corr-1"
    envelope.payload.type_url = "type.example/UserCreated"
    envelope.payload.value = b"sealed"
    envelope.security.publisher_id = "user-123"
    envelope.security.auth_token = SECRET
    envelope.security.encryption.key_id = "key-7"
    envelope.security.encryption.encryption_type = ENCRYPTION_TYPE_SYMMETRIC
    envelope.security.encryption.algorithm = "aes-256-gcm"
    envelope.observability.trace_id = "trace-1"
    envelope.observability.span_id = "span-1"
    envelope.observability.labels["region"] = "eu"
    envelope.schema.schema_url = "schemas.example/user"
    envelope.schema.schema_version = "v2"
    envelope.extensions["tenant"] = b"blue"
    return envelope


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("message_id", "msg-1"),
        ("timestamp", 1_697_000_000_123),
        ("topic", "admin.users.created"),
        ("content_type", "application/json"),
        ("schema_url", "schemas.example/user"),
        ("schema_version", "v2"),
        ("encryption", "aes-256-gcm"),
        ("correlation_id", "corr-1"),
        ("principal", "user-123"),
        ("namespace", "admin"),
        ("trace_id", "trace-1"),
        ("span_id", "span-1"),
        ("custom_headers", {"tenant": "blue", "observability.labels.region": "eu"}),
    ],
)
def test_each_column_of_the_header_table_comes_from_its_envelope_field(column: str, value: object) -> None:
    assert getattr(extract_mailbox_item(full_envelope().SerializeToString()), column) == value


@pytest.mark.parametrize(
    ("sub_message", "columns"),
    [
        ("security", {"principal", "encryption"}),
        ("observability", {"trace_id", "span_id"}),
        ("schema", {"schema_url", "schema_version"}),
    ],
)
def test_a_missing_sub_message_leaves_exactly_its_columns_null(sub_message: str, columns: set[str]) -> None:
    envelope = full_envelope()
    envelope.ClearField(sub_message)
    item = extract_mailbox_item(envelope.SerializeToString())
    assert {name for name in item.__struct_fields__ if getattr(item, name) is None} == columns


def test_security_without_encryption_leaves_only_encryption_null() -> None:
    envelope = full_envelope()
    envelope.security.ClearField("encryption")
    item = extract_mailbox_item(envelope.SerializeToString())
    assert (item.encryption, item.principal) == (None, "user-123")


def test_an_empty_string_is_null_like_a_missing_one() -> None:
    envelope = full_envelope()
    # Written out with no text: metadata.content_type, which a proto3 encoder would have left out.
    blob = envelope.SerializeToString() + bytes.fromhex("12022a00")
    assert extract_mailbox_item(blob).content_type is None


def test_an_envelope_without_a_publish_time_gets_the_time_of_arrival() -> None:
    envelope = full_envelope()
    envelope.metadata.ClearField("published_at")
    assert extract_mailbox_item(envelope.SerializeToString(), received_at=42).timestamp == 42


def test_an_envelope_with_an_impossible_publish_time_gets_the_time_of_arrival() -> None:
    envelope = full_envelope()
    envelope.metadata.published_at.seconds = 2**62
    assert extract_mailbox_item(envelope.SerializeToString(), received_at=42).timestamp == 42


def test_a_publish_time_before_1970_rounds_down_to_its_millisecond() -> None:
    envelope = full_envelope()
    envelope.metadata.published_at.seconds = -1
    envelope.metadata.published_at.nanos = 999_500_000
    assert extract_mailbox_item(envelope.SerializeToString()).timestamp == -1


def test_an_envelope_without_message_id_gets_the_same_one_whenever_its_bytes_come_again() -> None:
    envelope = full_envelope()
    envelope.metadata.ClearField("message_id")
    first = extract_mailbox_item(envelope.SerializeToString())
    again = extract_mailbox_item(envelope.SerializeToString())
    envelope.metadata.topic = "another"
    other = extract_mailbox_item(envelope.SerializeToString())
    assert first.message_id.startswith("b3:")
    assert first.message_id == again.message_id != other.message_id


def test_an_empty_envelope_is_stored_with_null_headers() -> None:
    item = extract_mailbox_item(b"", received_at=7)
    assert (item.timestamp, item.topic, item.principal, item.custom_headers) == (7, "", None, {})


def test_the_stored_blob_is_the_very_bytes_received() -> None:
    # Version last and metadata in two pieces: valid, but no encoder would write it so.
    blob = bytes.fromhex("120312016d") + bytes.fromhex("12030a0131") + bytes.fromhex("0801")
    item = extract_mailbox_item(blob)
    assert (item.message_id, item.topic) == ("1", "m")
    assert item.envelope_blob is blob
    assert item.reconstruct_envelope().SerializeToString() != blob


def test_unknown_fields_survive_in_the_blob_and_in_the_reconstructed_envelope() -> None:
    metadata = full_envelope().metadata.SerializeToString() + UNKNOWN_METADATA_FIELD
    blob = b"\x12" + bytes([len(metadata)]) + metadata + UNKNOWN_FIELD
    item = extract_mailbox_item(blob)
    assert item.envelope_blob == blob
    rebuilt = item.reconstruct_envelope().SerializeToString()
    assert UNKNOWN_FIELD in rebuilt
    assert UNKNOWN_METADATA_FIELD in rebuilt


def test_the_reconstructed_envelope_is_the_one_that_was_stored_but_for_its_auth_token() -> None:
    envelope = full_envelope()
    rebuilt = extract_mailbox_item(envelope.SerializeToString()).reconstruct_envelope()
    envelope.security.ClearField("auth_token")
    assert rebuilt == envelope


def test_the_auth_token_never_surfaces_in_headers_or_repr() -> None:
    item = extract_mailbox_item(full_envelope().SerializeToString())
    assert SECRET.encode() in item.envelope_blob
    headers = {name: getattr(item, name) for name in item.__struct_fields__ if name != "envelope_blob"}
    assert SECRET not in f"{headers} {item!r} {item} {item.reconstruct_envelope()}"


def test_the_repr_shows_every_header_and_the_size_of_the_blob() -> None:
    item = extract_mailbox_item(full_envelope().SerializeToString())
    assert "principal='user-123'" in repr(item)
    assert f"envelope_blob=<{len(item.envelope_blob)} bytes>" in repr(item)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"plain", "plain"),
        ("größe".encode(), "größe"),
        (b"", ""),
        (b"\xff\xfe", "base64://4="),
        (b"base64:aGk=", "base64:YmFzZTY0OmFHaz0="),
        (b"nul\0", "base64:bnVsAA=="),
    ],
)
def test_an_extension_is_text_where_it_is_utf8_and_marked_base64_elsewhere(value: bytes, text: str) -> None:
    assert extension_text(value) == text
    assert extension_bytes(text) == value


def test_bytes_that_are_no_envelope_are_refused_in_one_sentence_that_quotes_none_of_them() -> None:
    with pytest.raises(InvalidRequest, match="envelope of 13 bytes is not a PrismEnvelope") as refusal:
        extract_mailbox_item(SECRET.encode())
    assert SECRET not in str(refusal.value)


def test_labels_are_indexed_as_custom_headers_and_an_extension_of_the_same_name_wins() -> None:
    envelope = PrismEnvelope(envelope_version=1, extensions={"a": b"1", "observability.labels.tier": b"own"})
    envelope.observability.labels.update({"region": "eu", "tier": "gold", "nul": "x\0y"})
    item = extract_mailbox_item(envelope.SerializeToString())
    assert item.custom_headers == {
        "a": "1",
        "observability.labels.region": "eu",
        "observability.labels.tier": "own",
        "observability.labels.nul": "base64:eAB5",
    }
