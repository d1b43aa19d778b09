import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.adapters.schemas.validator import SchemaValidator
from postroom.application.ingest.namespace import PayloadSchema, SchemaFormat
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.envelope.validation import ValidationMode
from postroom.domain.errors import InvalidRequest

SUBJECT = "The payload on orders.placed"
ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "order": {"type": "integer"},
        "lines": {"type": "array", "items": {"type": "object", "required": ["article"]}},
        "email": {"type": "string", "pattern": "^[^@]+@[^@]+$"},
    },
    "required": ["order"],
    "additionalProperties": False,
}


@pytest.fixture(scope="session")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("schemas") / "order.json", ORDER)


def write(file: Path, schema: object) -> Path:
    file.write_bytes(msgspec.json.encode(schema))
    return file


def checker(file: Path) -> SchemaValidator:
    return SchemaValidator(
        [
            PayloadSchema(
                topic="orders.*",
                format=SchemaFormat.JSON_SCHEMA,
                message_name=None,
                file=file,
                validation=ValidationMode.STRICT,
                allows_unknown_fields=False,
            )
        ]
    )


def problems(file: Path, data: bytes) -> tuple[str, ...]:
    """Return what strict validation says of a payload."""
    sent = PrismEnvelope(envelope_version=1)
    sent.metadata.message_id, sent.metadata.topic = "m-1", "orders.placed"
    sent.payload.value = data
    return checker(file).validate(sent).problems


def refusal(file: Path) -> str:
    with pytest.raises(InvalidRequest) as refused:
        checker(file)
    return str(refused.value).replace(str(file), "FILE").replace(file.parent.as_uri(), "FOLDER")


def test_a_payload_that_its_schema_describes_is_accepted(orders: Path) -> None:
    assert problems(orders, b'{"order": 42, "lines": [{"article": "a"}], "email": "a@b"}') == ()


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"{", "is not JSON: Input data was truncated"),
        (b"", "is not JSON: Input data was truncated"),
        (b"{} {}", "is not JSON: JSON is malformed: trailing characters (byte 4)"),
        (b"\xff", "is not JSON: JSON is malformed: invalid character (byte 0)"),
        (b"[" * 100_000, "is JSON that is nested too deeply"),
        (b"{}", 'violates its schema: "order" is a required property'),
        (b'{"order": 1.5}', 'violates its schema: at /order: the value is not of type "integer"'),
        (
            b'{"order": 1, "lines": [{}]}',
            'violates its schema: at /lines/0: "article" is a required property',
        ),
        (
            b'{"order": 1, "x": 2}',
            "violates its schema: Additional properties are not allowed ('x' was unexpected)",
        ),
    ],
)
def test_what_breaks_the_schema_is_told_with_its_place(orders: Path, data: bytes, problem: str) -> None:
    assert problems(orders, data) == (f"{SUBJECT} {problem}.",)


def test_what_a_payload_holds_is_not_told(orders: Path) -> None:
    (told,) = problems(orders, b'{"order": 1, "email": "private"}')
    assert told == f'{SUBJECT} violates its schema: at /email: the value does not match "^[^@]+@[^@]+$".'


def test_only_so_many_problems_are_told(orders: Path) -> None:
    lines = ",".join(["{}"] * 50)
    assert len(problems(orders, b'{"order": 1, "lines": [%s]}' % lines.encode())) == 5


@pytest.mark.parametrize("depth", [100, 500, 900, 1_500, 5_000])
def test_any_depth_of_nesting_is_accepted_or_told(tmp_path: Path, depth: int) -> None:
    told = problems(write(tmp_path / "any.json", {}), b"[" * depth + b"]" * depth)
    assert depth > 500 or told == ()
    assert all(sentence.startswith(SUBJECT) for sentence in told)


def test_the_draft_is_the_one_that_the_schema_names(tmp_path: Path) -> None:
    def schema(draft: str) -> Path:
        return write(tmp_path / "s.json", {"$schema": draft, "type": "array", "items": [{"type": "null"}]})

    assert problems(schema("http://json-schema.org/draft-07/schema#"), b"[1]") != ()
    assert "is not a valid JSON Schema" in refusal(schema("https://json-schema.org/draft/2020-12/schema"))


def test_a_schema_may_refer_to_files_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "order.json", ORDER)
    batch = write(tmp_path / "batch.json", {"type": "array", "items": {"$ref": "order.json"}})
    assert problems(batch, b'[{"order": 1}]') == ()
    assert problems(batch, b"[{}]") == (
        f'{SUBJECT} violates its schema: at /0: "order" is a required property.',
    )


def test_a_schema_may_refer_to_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "schemas").mkdir()
    write(tmp_path / "order.json", ORDER)
    outside = write(tmp_path / "schemas/outside.json", {"$ref": "../order.json"})
    assert "only files in the schema's folder are read" in refusal(outside)
    remote = write(tmp_path / "remote.json", {"$ref": "https://schemas.example/order.json"})
    assert refusal(remote) == (
        "FILE is not a valid JSON Schema: it refers to https://schemas.example/order.json; only "
        "files in the schema's folder are read."
    )
    named = write(tmp_path / "named.json", {"$id": "https://schemas.example/a.json", "$ref": "order.json"})
    assert "it refers to https://schemas.example/order.json" in refusal(named)
    missing = write(tmp_path / "missing.json", {"$ref": "none.json"})
    assert "none.json can't be read: No such file or directory" in refusal(missing)


def test_files_that_are_no_schema_are_refused(tmp_path: Path) -> None:
    assert refusal(write(tmp_path / "s.json", {"type": "order"})) == (
        "FILE is not a valid JSON Schema: at /type: the value is not valid under any of the schemas "
        "listed in the 'anyOf' keyword."
    )
    assert refusal(write(tmp_path / "s.json", 5)) == (
        'FILE is not a valid JSON Schema: the value is not of types "boolean", "object".'
    )
    (tmp_path / "s.json").write_text("{")
    assert refusal(tmp_path / "s.json") == "The schema FILE is not JSON: Input data was truncated."
    assert refusal(tmp_path / "none.json") == (
        "The schema FILE can't be read: No such file or directory; name a file that exists."
    )


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["order", "lines", "email"]) | st.text(max_size=2), inner, max_size=3
        )
    ),
    max_leaves=10,
)


@given(st.binary(max_size=50) | _VALUES.map(lambda value: _spelled(value)))
def test_any_payload_is_accepted_or_told(orders: Path, data: bytes) -> None:
    for told in problems(orders, data):
        assert told.startswith(SUBJECT)
        assert told.endswith(".")


def _spelled(value: object) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")
