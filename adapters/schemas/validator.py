"""Validation and decoding of payloads: by the schemas of namespaces, by topic, or by content type."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

import jsonschema_rs
import msgspec
from google.protobuf import any_pb2

from postroom.adapters.schemas.protobuf import Descriptors, ProtobufSchema
from postroom.application.ingest.namespace import PayloadSchema, SchemaFormat
from postroom.application.telemetry import logger
from postroom.domain.envelope.content import (
    ACCEPTED,
    DecodedPayload,
    PayloadFormat,
    PayloadValidation,
    decode_json,
    decode_payload,
    decompress,
)
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.envelope.validation import ValidationMode
from postroom.domain.errors import InvalidRequest
from postroom.domain.search import topic_matches

MAX_PROBLEMS = 5
"""Limit on the problems reported for one payload."""
MASK = "the value"
"""Replaces values of the payload in problems: they may be personal data, and problems are logged."""


class JsonSchema:
    """A JSON Schema, of the draft in its `$schema` or 2020-12.

    A `$ref` may only refer to files in the schema's folder; nothing is fetched over a network.
    """

    def __init__(self, file: Path) -> None:
        """Compile the schema in a file; raise `InvalidRequest` when it can't be read or is invalid."""
        schema, references = _read(file), _References(file.absolute().parent)
        try:
            self._validator = jsonschema_rs.validator_for(
                schema, retriever=references.retrieve, base_uri=file.absolute().as_uri(), mask=MASK
            )
        except (ValueError, OverflowError) as error:
            problem = references.problem or str(error)
            if isinstance(error, jsonschema_rs.ValidationError) and not references.problem:
                problem = f"{_place(error.instance_path)}{error.message}"
            raise InvalidRequest(f"{file} is not a valid JSON Schema: {problem}.") from error

    def problems(self, payload: any_pb2.Any, data: bytes) -> Iterator[str]:
        """Yield a payload's problems, each as a predicate of `the payload`.

        Arguments:
            data: the payload's value, decompressed.
        """
        try:
            value = decode_json(data)
        except InvalidRequest as error:
            yield str(error)
            return
        try:
            for violation in islice(self._validator.iter_errors(value), MAX_PROBLEMS):
                yield f"violates its schema: {_place(violation.instance_path)}{violation.message}"
        except (ValueError, OverflowError) as error:
            yield f"can't be validated: {error}"

    def decode(self, payload: any_pb2.Any, data: bytes) -> Any:
        """Return the value of a payload; raise `InvalidRequest` if it is not JSON."""
        return decode_json(data)


class _References:
    """Retriever of the files that a schema refers to; it stores the reason why one can't be read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self.problem: str | None = None

    def retrieve(self, uri: str) -> Any:
        parts = urlsplit(uri)
        path = Path(unquote(parts.path)).resolve()
        try:
            if parts.scheme != "file" or not path.is_relative_to(self._folder):
                raise InvalidRequest(f"it refers to {uri}; only files in the schema's folder are read.")
            return _read(path)
        except InvalidRequest as error:
            self.problem = str(error).removesuffix(".")
            raise


def _read(file: Path) -> Any:
    try:
        return msgspec.json.decode(file.read_bytes())
    except OSError as error:
        raise InvalidRequest(
            f"The schema {file} can't be read: {error.strerror or error}; name a file that exists."
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The schema {file} is not JSON: {error}.") from error


def _place(path: list[str | int]) -> str:
    """Return a location in a document as the prefix of a message."""
    return f"at /{'/'.join(map(str, path))}: " if path else ""


_MAX_CACHED_TOPICS = 10_000
_T = TypeVar("_T")


class Schema(Protocol):
    """A schema of payloads."""

    def problems(self, payload: any_pb2.Any, data: bytes) -> Iterator[str]:
        """Yield a payload's problems, each as a predicate of `the payload`.

        Arguments:
            data: the payload's value, decompressed.
        """

    def decode(self, payload: any_pb2.Any, data: bytes) -> Any:
        """Return a payload as a value of JSON; raise `InvalidRequest` when it can't be decoded."""


class TopicRules(Generic[_T]):
    """Rules by topic; the first that matches applies."""

    def __init__(self, rules: Iterable[tuple[str, _T]]) -> None:
        """Take rules by topic, an exact name or glob."""
        self._rules = tuple(rules)
        self._by_topic: dict[str, _T | None] = {}

    def find(self, topic: str) -> _T | None:
        """Return the rule of a topic, or None if it has none."""
        if topic in self._by_topic:
            return self._by_topic[topic]
        rule = next((rule for pattern, rule in self._rules if topic_matches(pattern, topic)), None)
        if len(self._by_topic) < _MAX_CACHED_TOPICS:
            self._by_topic[topic] = rule
        return rule


class SchemaCompiler:
    """Compiler of schemas, which reads each file of descriptors once."""

    def __init__(self) -> None:
        """Begin without files."""
        self._descriptors: dict[Path, Descriptors] = {}

    def compile(self, schema: PayloadSchema) -> Schema | None:
        """Return a compiled schema, or None if it names no file; raise `InvalidRequest` if it is invalid."""
        if schema.file is None:
            return None
        if schema.format == SchemaFormat.JSON_SCHEMA:
            return JsonSchema(schema.file)
        if schema.file not in self._descriptors:
            self._descriptors[schema.file] = Descriptors(schema.file)
        return ProtobufSchema(
            self._descriptors[schema.file],
            schema.message_name or "",
            allows_unknown_fields=schema.allows_unknown_fields,
        )


class _Rule(NamedTuple):
    schema: Schema | None
    """None: the payload is not validated."""
    mode: ValidationMode


class SchemaValidator:
    """A payload validator that applies the first schema whose topic matches."""

    def __init__(self, schemas: Sequence[PayloadSchema]) -> None:
        """Compile the schemas.

        Raises: InvalidRequest when a file is invalid, or missing although validation is strict.
        """
        compiler = SchemaCompiler()
        self._rules = TopicRules(
            [(schema.topic, _Rule(_compile(schema, compiler), schema.validation)) for schema in schemas]
        )

    def validate(self, envelope: PrismEnvelope) -> PayloadValidation:
        """Validate a payload; see `PayloadValidator.validate`."""
        metadata = envelope.metadata
        rule = self._rules.find(metadata.topic)
        if rule is None or rule.schema is None or envelope.security.HasField("encryption"):
            return ACCEPTED
        try:
            data = decompress(envelope.payload.value, metadata.content_encoding)
            problems = tuple(rule.schema.problems(envelope.payload, data))
        except InvalidRequest as error:
            problems = (str(error),)
        if not problems:
            return ACCEPTED
        # No message id: equal problems of many messages are reported once.
        return PayloadValidation(
            rule.mode == ValidationMode.WARN,
            tuple(f"The payload on {metadata.topic} {problem}." for problem in problems),
        )


def _compile(schema: PayloadSchema, compiler: SchemaCompiler) -> Schema | None:
    """Return the schema of a topic, or None when its payloads are not validated."""
    if schema.validation == ValidationMode.DISABLED:
        return None
    if schema.file is None:
        if schema.validation == ValidationMode.STRICT:
            raise InvalidRequest(
                f"Payloads of topic {schema.topic} can't be validated without a schema; name its `file`, or "
                "set its `validation` to warn or disabled."
            )
        logger().warning("ingest.payloads_unchecked", topic=schema.topic, reason="no schema file is named")
    return compiler.compile(schema)


_FORMATS = {SchemaFormat.JSON_SCHEMA: PayloadFormat.JSON, SchemaFormat.PROTOBUF: PayloadFormat.PROTOBUF}
_Rules = TopicRules[tuple[PayloadSchema, Schema | None]]


class SchemaDecoder:
    """A payload decoder that applies the schemas of a message's namespace, or else its content type."""

    def __init__(self, schemas: Mapping[str, Sequence[PayloadSchema]]) -> None:
        """Compile the schemas; raise InvalidRequest when a file is missing or invalid.

        Arguments:
            schemas: by name of the namespace; the first whose topic matches applies.
        """
        compiler = SchemaCompiler()
        self._schemas = schemas
        self._rules: dict[str, _Rules] = {
            name: TopicRules([(each.topic, (each, compiler.compile(each))) for each in of_namespace])
            for name, of_namespace in schemas.items()
        }

    def __reduce__(self) -> Any:
        """Pickle the schemas without the validators compiled from them."""
        return SchemaDecoder, (self._schemas,)

    def decode(self, mailbox: str, envelope: PrismEnvelope) -> DecodedPayload:
        """Decode a payload; see `PayloadDecoder.decode`."""
        rules = self._rules.get(mailbox.partition("@")[0])
        schema, compiled = (rules and rules.find(envelope.metadata.topic)) or (None, None)
        if schema is None or compiled is None or envelope.security.HasField("encryption"):
            return decode_payload(envelope)
        format_, payload = _FORMATS[schema.format], envelope.payload
        try:
            data = decompress(payload.value, envelope.metadata.content_encoding)
        except InvalidRequest as error:
            return DecodedPayload(format_, payload.value, problems=(str(error),))
        problems: Iterable[str] = ()
        if schema.validation != ValidationMode.DISABLED:
            problems = compiled.problems(payload, data)
        decoded = DecodedPayload(format_, data, problems=tuple(problems))
        try:
            value = compiled.decode(payload, data)
            text = data if format_ == PayloadFormat.JSON else msgspec.json.encode(value)
            return decoded._replace(text=text.decode())
        except InvalidRequest as error:
            return decoded if decoded.problems else decoded._replace(problems=(str(error),))


class ContentDecoder:
    """A payload decoder by content type."""

    def decode(self, mailbox: str, envelope: PrismEnvelope) -> DecodedPayload:
        """Decode a payload; see `PayloadDecoder.decode`."""
        return decode_payload(envelope)
