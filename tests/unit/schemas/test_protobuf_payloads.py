import gzip
import zlib
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_tools import protoc
from hypothesis import given
from hypothesis import strategies as st

from postroom.adapters.schemas.validator import SchemaValidator
from postroom.application.ingest.namespace import PayloadSchema, SchemaFormat
from postroom.domain.envelope import content
from postroom.domain.envelope.content import ACCEPTED, PayloadValidation
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.envelope.validation import ValidationMode
from postroom.domain.errors import InvalidRequest

SOURCE = Path(__file__).with_name("admin.proto")
NAME = "acme.admin.v1.UserCreatedEvent"
TOPIC = "admin.users.created"
SUBJECT = "The payload on admin.users.created"


def compile_proto(target: Path, source: Path, *options: str) -> Path:
    """Return descriptors as protoc writes them."""
    well_known = files("grpc_tools") / "_proto"
    arguments = [
        "protoc",
        f"-I{source.parent}",
        f"-I{well_known}",
        *options,
        f"--descriptor_set_out={target}",
    ]
    assert protoc.main([*arguments, source.name]) == 0
    return target


@pytest.fixture(scope="session")
def descriptors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("descriptors") / "admin.binpb"
    return compile_proto(target, SOURCE, "--include_imports")


@pytest.fixture(scope="session")
def event(descriptors: Path) -> Callable[..., Any]:
    """Make an event as a producer would that has the same descriptors."""
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(descriptors.read_bytes()).file:
        pool.Add(file)
    message: Callable[..., Any] = GetMessageClass(pool.FindMessageTypeByName(NAME))
    return message


def schema(file: Path | None, message_name: str = "UserCreatedEvent", **fields: Any) -> PayloadSchema:
    values: dict[str, Any] = {
        "topic": TOPIC,
        "format": SchemaFormat.PROTOBUF,
        "message_name": message_name,
        "file": file,
        "validation": ValidationMode.STRICT,
        "allows_unknown_fields": False,
    }
    return PayloadSchema(**(values | fields))


def envelope(data: bytes, type_url: str = "", topic: str = TOPIC, encoding: str = "") -> PrismEnvelope:
    made = PrismEnvelope(envelope_version=1)
    made.metadata.message_id, made.metadata.topic = "m-1", topic
    made.metadata.content_encoding = encoding
    made.payload.value, made.payload.type_url = data, type_url
    return made


def problems(file: Path, sent: PrismEnvelope, **fields: Any) -> tuple[str, ...]:
    """Return what strict validation says."""
    result = SchemaValidator([schema(file, **fields)]).validate(sent)
    assert result.is_accepted is (not result.problems)
    return result.problems


# -- valid payloads ---


@pytest.mark.parametrize("name", ["UserCreatedEvent", "v1.UserCreatedEvent", NAME])
def test_a_payload_that_its_message_describes_is_accepted(
    descriptors: Path, event: Callable[..., Any], name: str
) -> None:
    data = event(user_id="u-1", addresses=[{"street": "Long Lane"}]).SerializeToString()
    assert problems(descriptors, envelope(data), message_name=name) == ()


@pytest.mark.parametrize("type_url", [NAME, f"type.googleapis.com/{NAME}", f"acme.example/schemas/{NAME}"])
def test_a_payload_may_name_its_own_type(descriptors: Path, event: Callable[..., Any], type_url: str) -> None:
    assert problems(descriptors, envelope(event(user_id="u-1").SerializeToString(), type_url)) == ()


@pytest.mark.parametrize(
    ("encoding", "encode"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("identity", bytes)]
)
def test_a_compressed_payload_is_opened(
    descriptors: Path, event: Callable[..., Any], encoding: str, encode: Callable[[bytes], bytes]
) -> None:
    good, bad = encode(event(user_id="u-1").SerializeToString()), encode(b"\xff")
    assert problems(descriptors, envelope(good, encoding=encoding)) == ()
    assert problems(descriptors, envelope(bad, encoding=encoding)) == (
        f"{SUBJECT} can't be decoded as {NAME}.",
    )


def test_an_encrypted_payload_is_accepted_unseen(descriptors: Path) -> None:
    sent = envelope(b"\xff")
    sent.security.encryption.algorithm = "aes-256-gcm"
    assert problems(descriptors, sent) == ()


def test_a_publisher_s_name_alone_does_not_make_a_payload_encrypted(descriptors: Path) -> None:
    sent = envelope(b"\xff")
    sent.security.publisher_id = "user-7"
    assert problems(descriptors, sent) != ()


def test_topics_without_a_schema_are_accepted(descriptors: Path) -> None:
    assert problems(descriptors, envelope(b"\xff", topic="admin.users.updated")) == ()


# -- what can be wrong ---


def test_bytes_that_are_no_such_message_are_told(descriptors: Path) -> None:
    assert problems(descriptors, envelope(b"\xff\xff")) == (f"{SUBJECT} can't be decoded as {NAME}.",)


def test_a_missing_required_field_is_named(descriptors: Path) -> None:
    assert problems(descriptors, envelope(b"")) == (f"{SUBJECT} lacks the required field user_id of {NAME}.",)


def test_another_type_s_name_is_told(descriptors: Path, event: Callable[..., Any]) -> None:
    sent = envelope(event(user_id="u-1").SerializeToString(), "type.googleapis.com/acme.admin.v1.Address")
    assert problems(descriptors, sent) == (f"{SUBJECT} has the type acme.admin.v1.Address, not {NAME}.",)


def test_unknown_fields_are_named_by_their_place(descriptors: Path, event: Callable[..., Any]) -> None:
    made = event(user_id="u-1", addresses=[{"street": "a"}, {"street": "b"}])
    made.by_label["home"].street = "c"
    made.addresses[1].MergeFromString(b"\x38\x07")
    made.by_label["home"].MergeFromString(b"\x40\x07")
    made.at.MergeFromString(b"\x48\x07")
    made.MergeFromString(b"\x50\x07")
    sent = envelope(made.SerializeToString())
    unknown = ("number 10", "at.number 9", "addresses[1].number 7", "by_label[...].number 8")
    assert problems(descriptors, sent) == tuple(
        f"{SUBJECT} has a field that {NAME} does not define: {place}." for place in unknown
    )


def test_unknown_fields_are_accepted_where_producers_may_be_newer(
    descriptors: Path, event: Callable[..., Any]
) -> None:
    sent = envelope(event(user_id="u-1").SerializeToString() + b"\x50\x07")
    assert problems(descriptors, sent, allows_unknown_fields=True) == ()


@pytest.mark.parametrize(
    ("data", "encoding", "problem"),
    [
        (b"abc", "br", "is encoded with 'br', which is not supported"),
        (b"abc", "gzip", "is not valid gzip: Error -3 while decompressing data: incorrect header check"),
        (gzip.compress(b"", mtime=0)[:-1], "gzip", "has incomplete gzip data"),
        (gzip.compress(b"", mtime=0) + b"x", "gzip", "has trailing gzip data"),
    ],
)
def test_what_can_t_be_opened_is_told(descriptors: Path, data: bytes, encoding: str, problem: str) -> None:
    assert problems(descriptors, envelope(data, encoding=encoding)) == (f"{SUBJECT} {problem}.",)


def test_a_small_payload_that_opens_to_a_huge_one_is_not_opened_whole(
    descriptors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "MAX_DECOMPRESSED_BYTES", 1_000)
    assert problems(descriptors, envelope(gzip.compress(bytes(5_000)), encoding="gzip")) == (
        f"{SUBJECT} has more than 1000 bytes when decompressed.",
    )


# -- modes and topics ---


def test_in_mode_warn_a_bad_payload_is_accepted_and_told(descriptors: Path) -> None:
    checker = SchemaValidator([schema(descriptors, validation=ValidationMode.WARN)])
    assert checker.validate(envelope(b"\xff")) == PayloadValidation(
        True, (f"{SUBJECT} can't be decoded as {NAME}.",)
    )


def test_in_mode_disabled_nothing_is_checked_nor_read() -> None:
    checker = SchemaValidator([schema(Path("/nowhere"), validation=ValidationMode.DISABLED)])
    assert checker.validate(envelope(b"\xff")) == ACCEPTED


def test_the_first_schema_whose_topic_matches_counts(descriptors: Path) -> None:
    exempt = schema(descriptors, topic="admin.users.*", validation=ValidationMode.DISABLED)
    others = schema(descriptors, topic="admin.*")
    checker = SchemaValidator([exempt, others])
    assert checker.validate(envelope(b"\xff")).is_accepted
    assert not checker.validate(envelope(b"\xff", topic="admin.roles")).is_accepted
    assert not SchemaValidator([others, exempt]).validate(envelope(b"\xff")).is_accepted


# -- what a namespace may get wrong ---


def test_strict_validation_without_a_schema_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"Payloads of topic admin\.users\.created can't be validated"):
        SchemaValidator([schema(None)])


def test_without_a_schema_warn_accepts_everything() -> None:
    checker = SchemaValidator([schema(None, validation=ValidationMode.WARN)])
    assert checker.validate(envelope(b"\xff")) == ACCEPTED


def refusal(file: Path, message_name: str = "UserCreatedEvent") -> str:
    with pytest.raises(InvalidRequest) as refused:
        SchemaValidator([schema(file, message_name)])
    return str(refused.value).replace(str(file), "FILE")


def test_a_message_that_is_not_described_is_told_with_what_is(descriptors: Path) -> None:
    assert refusal(descriptors, "UserCreated") == (
        "FILE contains no message type UserCreated (did you mean UserCreatedEvent?); it has "
        "google.protobuf.Timestamp, acme.admin.v1.UserCreatedEvent, acme.admin.v1.UserCreatedEvent.Address, "
        "acme.admin.v1.Address."
    )


def test_a_name_that_several_messages_have_is_refused(descriptors: Path) -> None:
    assert refusal(descriptors, "Address") == (
        "FILE contains several message types Address; name one of acme.admin.v1.UserCreatedEvent.Address, "
        "acme.admin.v1.Address."
    )
    SchemaValidator([schema(descriptors, "acme.admin.v1.Address")])


def test_descriptors_without_their_imports_are_refused(tmp_path: Path) -> None:
    assert "write them with protoc --include_imports." in refusal(
        compile_proto(tmp_path / "lacking.binpb", SOURCE)
    )


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    assert refusal(SOURCE) == (
        "FILE is protobuf source; compile it with protoc --include_imports --descriptor_set_out=admin.binpb "
        "admin.proto and name that file."
    )
    empty, junk = tmp_path / "empty.binpb", tmp_path / "junk.binpb"
    empty.touch()
    junk.write_bytes(b"\xff")
    assert refusal(empty) == (
        "FILE contains no message type; write it with protoc --include_imports --descriptor_set_out."
    )
    assert refusal(junk) == (
        "FILE is not a FileDescriptorSet; write it with protoc --include_imports --descriptor_set_out."
    )
    assert refusal(tmp_path / "none.binpb") == (
        "The descriptors FILE can't be read: No such file or directory; name a file that exists."
    )


# -- anything ---


@given(
    data=st.binary(max_size=60),
    encoding=st.sampled_from(["", "gzip", "deflate", "br"]),
    type_url=st.text(max_size=10) | st.just(NAME),
)
def test_any_payload_is_accepted_or_told(
    descriptors: Path, data: bytes, encoding: str, type_url: str
) -> None:
    for told in problems(descriptors, envelope(data, type_url, encoding=encoding)):
        assert told.startswith(SUBJECT)
        assert told.endswith(".")
