"""Rows of `postroom_payloads`: payloads decoded by content type or schema, bad ones with a reason."""

import gzip
import json
import pickle
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from pyspark.sql import types as t

from postroom.adapters.compose.spark import PostroomPayloads
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.errors import InvalidRequest
from postroom.projections.spark import payload_rows
from tests.conformance.records import append, created, sent
from tests.projections.stored_logs import rows
from tests.unit.schemas.test_protobuf_payloads import NAME, SOURCE, compile_proto

MAILBOX = "acme@one"
USERS, ORDERS, OTHER = "admin.users.created", "orders", "other"
JSON = "application/json"


def envelope(
    topic: str, data: bytes, content_type: str = "", encoding: str = "", encryption: str = ""
) -> PrismEnvelope:
    """Return an envelope of a payload."""
    made = PrismEnvelope(envelope_version=1)
    made.metadata.topic, made.metadata.content_type = topic, content_type
    made.metadata.content_encoding = encoding
    made.payload.value = data
    if encryption:
        made.security.encryption.algorithm = encryption
    return made


def write(store: Path, *envelopes: PrismEnvelope | bytes) -> str:
    """Write a log of messages with these envelopes, and return its store."""
    events = [
        replace(
            sent(number, envelope=each if isinstance(each, bytes) else each.SerializeToString()),
            topic=OTHER if isinstance(each, bytes) else each.metadata.topic,
        )
        for number, each in enumerate(envelopes, 1)
    ]
    with closing(SqliteEventLog(store, MAILBOX, durability="relaxed")) as log:
        append(log, [created(MAILBOX), *events])
    return str(store)


def read(store: str, names: str, payload: t.DataType | None = None, **options: str) -> list[dict[str, Any]]:
    """Return columns of all messages, as Spark's tasks read them."""
    source = PostroomPayloads({"path": store, "columns": names, "driver": "python"} | options)
    schema = source.schema()
    if payload is not None:
        schema = t.StructType(
            [t.StructField(each.name, payload) if each.name == "payload" else each for each in schema]
        )
    reader = pickle.loads(pickle.dumps(source.reader(schema)))
    return [row for part in reader.partitions() for row in rows(reader.read(part))]


def values(read_rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in read_rows]


def test_payloads_are_decoded_by_their_content_type(tmp_path: Path) -> None:
    store = write(
        tmp_path / "store.db",
        envelope(OTHER, b'{"n": 1}', "application/json; charset=utf-8"),
        envelope(OTHER, b"[1]", "application/vnd.acme+JSON"),
        envelope(OTHER, "grüß".encode(), "text/plain"),
        envelope(OTHER, b"\x00\xff", "image/png"),
        envelope(OTHER, gzip.compress(b"{}"), JSON, "gzip"),
        envelope(OTHER, b"\xff\x01", JSON, encryption="aes-256-gcm"),
        envelope(OTHER, b' {"n": 2}'),
        envelope(OTHER, b"{not json"),
        envelope(OTHER, b"\xff"),
    )
    assert values(read(store, "format,payload,reason,data")) == [
        ("json", '{"n": 1}', None, b'{"n": 1}'),
        ("json", "[1]", None, b"[1]"),
        ("text", "grüß", None, "grüß".encode()),
        ("binary", None, None, b"\x00\xff"),
        ("json", "{}", None, b"{}"),
        ("encrypted", None, None, b"\xff\x01"),
        ("json", ' {"n": 2}', None, b' {"n": 2}'),
        ("text", "{not json", None, b"{not json"),
        ("binary", None, None, b"\xff"),
    ]
    assert values(read(store, "position,topic", topic="oth*"))[0] == (2, OTHER)
    assert len(read(store, "message_id", from_position="4")) == 7


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store of payloads that are not what they say."""
    return write(
        tmp_path_factory.mktemp("bad") / "store.db",
        envelope(OTHER, b"{", JSON),
        envelope(OTHER, b"\xff", "text/plain"),
        envelope(OTHER, b'"\xff"', JSON),
        envelope(OTHER, b"[" * 100_000, JSON),
        envelope(OTHER, b"{}", JSON, "br"),
        envelope(OTHER, b"{}", JSON, "gzip"),
        b"\xff\xff",
        envelope(OTHER, b"{}", JSON),
    )


def test_a_bad_payload_has_a_reason_and_the_others_are_read(bad: str) -> None:
    read_rows = read(bad, "format,payload,reason")
    assert [row["reason"] for row in read_rows] == [
        "The payload is not JSON: Input data was truncated.",
        "The payload is not UTF-8.",
        read_rows[2]["reason"],
        "The payload is JSON that is nested too deeply.",
        "The payload is encoded with 'br', which is not supported.",
        "The payload is not valid gzip: Error -3 while decompressing data: incorrect header check.",
        "The envelope is not a PrismEnvelope.",
        None,
    ]
    assert "is not JSON" in read_rows[2]["reason"]
    assert [row["payload"] for row in read_rows] == [None] * 7 + ["{}"]


def test_mode_failfast_ends_at_the_first_bad_payload_and_names_it(bad: str) -> None:
    expected = rf"Message 0.* at position 2 of mailbox {MAILBOX}: The payload is not JSON"
    for names in ("payload", "position"):
        with pytest.raises(InvalidRequest, match=expected):
            read(bad, names, mode="FAILFAST")
    assert values(read(bad, "payload", mode="failfast", from_position="9")) == [("{}",)]
    with pytest.raises(
        InvalidRequest, match="mode of postroom_payloads is 'dropmalformed'; expected permiss"
    ):
        read(bad, "payload", mode="dropmalformed")


# -- JSON of a declared type ---

ORDER = (
    t.StructType()
    .add("id", "long")
    .add("at", "timestamp")
    .add("price", "decimal(10,2)")
    .add("lines", t.ArrayType(t.StructType().add("article", "string").add("count", "integer")))
)


def typed(tmp_path: Path, *payloads: bytes, type_: t.DataType = ORDER) -> list[tuple[Any, ...]]:
    """Return payloads of a declared type, and their reasons."""
    store = write(tmp_path / "store.db", *[envelope(OTHER, each, JSON) for each in payloads])
    return values(read(store, "payload,reason", type_))


def test_json_has_the_declared_type(tmp_path: Path) -> None:
    order = (
        b'{"id": 7, "at": "2026-11-23T04:00:00+02:00", "price": 1.10, "lines": [{"article": "a"}], "x": 1}'
    )
    (whole, reason), (empty, _) = typed(tmp_path, order, b"{}")
    assert whole["at"].isoformat() == "2026-11-23T02:00:00+00:00"
    assert (whole["id"], whole["price"]) == (7, Decimal("1.10"))
    assert whole["lines"] == [{"article": "a", "count": None}]
    assert (reason, set(empty.values())) == (None, {None})


def test_fields_of_other_types_are_null_with_a_reason_and_the_rest_is_kept(tmp_path: Path) -> None:
    (first, why), (second, other), (third, precise), (fourth, array) = typed(
        tmp_path,
        b'{"id": "x", "price": 2}',
        b'{"id": 9223372036854775808, "lines": [{"count": 3000000000}]}',
        b'{"id": 3, "price": 1.2345, "at": "0001-01-01T00:00:00+14:00"}',
        b"[1]",
    )
    assert (first["id"], first["price"]) == (None, Decimal("2.00"))
    assert why == "The payload does not have the declared type: Expected `int | null`, got `str` - at `$.id`."
    assert second == {"id": None, "at": None, "price": None, "lines": None}
    assert "Expected `int` <= 9223372036854775807 - at `$.id`" in other
    assert (third["id"], third["price"]) == (3, None)
    assert "does not have the declared type" in precise
    assert (fourth, array) == (
        None,
        "The payload does not have the declared type: Expected `object | null`, got `array`.",
    )


def test_payloads_may_be_declared_as_maps_and_arrays_but_text_has_no_fields(tmp_path: Path) -> None:
    map_ = t.MapType(t.StringType(), t.DoubleType())
    assert typed(tmp_path, b'{"a": 1, "b": null}', type_=map_) == [([("a", 1.0), ("b", None)], None)]
    store = write(tmp_path / "text.db", envelope(OTHER, b"hello", "text/plain"))
    assert values(read(store, "payload,reason", map_)) == [
        (None, "The payload is text, which has no JSON."),
    ]


@pytest.mark.parametrize(
    ("type_", "says"),
    [
        (t.LongType(), r"payload is declared as int64; declare a string, struct, array or map"),
        (t.StructType().add("a", "long", nullable=False), r"payload\.a is declared as not null"),
        (
            t.ArrayType(t.DayTimeIntervalType()),
            r"payload\[\] is declared as duration\[us\], which JSON lacks",
        ),
        (t.StructType().add("a", "integer").add("a", "string"), "declared with two fields of the same name"),
        (t.MapType(t.IntegerType(), t.StringType()), "payload is declared as map"),
    ],
    ids=["number", "not null", "interval", "two fields", "keys"],
)
def test_a_type_that_json_can_not_have_is_refused(bad: str, type_: t.DataType, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        read(bad, "payload", type_)


# -- schemas of a namespace ---


@pytest.fixture(scope="module")
def namespaces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A namespace file with a protobuf and a JSON Schema."""
    folder = tmp_path_factory.mktemp("namespaces")
    compile_proto(folder / "admin.binpb", SOURCE, "--include_imports")
    schema = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}
    (folder / "order.json").write_text(json.dumps(schema), "utf-8")
    (folder / "namespaces.yaml").write_text(
        f"""
namespaces:
  - name: acme
    pattern: mailbox
    schemas:
      payload:
        schemas:
          - {{topic: {USERS}, message_name: {NAME}, file: admin.binpb}}
          - {{topic: {ORDERS}, format: json-schema, file: order.json}}
    slots:
      message_source:
        backend: nats
        config: {{url: nats://localhost:4222, subject: a, consumer_group: b}}
      storage: {{backend: sqlite, config: {{database_path: unused.db}}}}
""",
        "utf-8",
    )
    return folder / "namespaces.yaml"


def test_schemas_of_the_namespace_decode_protobuf_and_check_json(tmp_path: Path, namespaces: Path) -> None:
    user = b"\x0a\x03u-1\x12\x02\x08\x05"  # user_id and the fifth second of 1970
    store = write(
        tmp_path / "store.db",
        envelope(USERS, user, "application/x-protobuf"),
        envelope(USERS, b"\xff", "application/x-protobuf"),
        envelope(USERS, b"", encoding="gzip"),
        envelope(ORDERS, b'{"id": 1}'),
        envelope(ORDERS, b'{"id": "secret"}'),
        envelope(ORDERS, b"{"),
        envelope(OTHER, b"hello"),
    )
    names = "format,payload,reason"
    violation = 'The payload violates its schema: at /id: the value is not of type "integer".'
    assert values(read(store, names, namespaces=namespaces.as_uri())) == [
        ("protobuf", '{"user_id":"u-1","at":"1970-01-01T00:00:05Z"}', None),
        ("protobuf", None, f"The payload can't be decoded as {NAME}."),
        ("protobuf", None, "The payload has incomplete gzip data."),
        ("json", '{"id": 1}', None),
        (
            "json",
            '{"id": "secret"}',
            violation,
        ),
        ("json", None, "The payload is not JSON: Input data was truncated."),
        ("text", "hello", None),
    ]
    type_ = t.StructType().add("user_id", "string").add("at", "timestamp")
    (first, *_) = read(store, "payload", type_, namespaces=str(namespaces), topic=USERS)
    assert first["payload"]["at"].timestamp() == 5


def test_a_namespace_file_or_schema_that_is_missing_is_refused_before_anything_is_read(
    bad: str, namespaces: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match="can't be read"):
        read(bad, "payload", namespaces=str(tmp_path / "none.yaml"))
    text = namespaces.read_text("utf-8")
    (tmp_path / "namespaces.yaml").write_text(text, "utf-8")  # without the files beside it
    with pytest.raises(InvalidRequest, match=r"The descriptors .*admin\.binpb can't be read"):
        read(bad, "payload", namespaces=str(tmp_path / "namespaces.yaml"))


# -- what is read ---


def test_batches_have_a_bounded_size_whatever_payloads_are_decompressed_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload_rows, "BYTES_PER_BATCH", 2_000_000)
    packed = gzip.compress(b" " * 1_000_000)
    store = write(tmp_path / "store.db", *[envelope(OTHER, packed, "text/plain", "gzip")] * 7)
    source = PostroomPayloads({"path": store, "columns": "payload", "driver": "python"})
    reader = source.reader(source.schema())
    batches = [batch.num_rows for part in reader.partitions() for batch in reader.read(part)]  # type: ignore[union-attr]  # these are batches
    assert batches == [2, 2, 2, 1]


def test_columns_without_payloads_need_no_envelope(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_rows, "parse_envelope", None)  # it would be called
    assert len(read(bad, "message_id,topic,sent_at,size")) == 8
