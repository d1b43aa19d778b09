"""The payload validator port over the schemas of a namespace, by topic."""

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from google.protobuf import any_pb2

from postroom.adapters.schemas.json_schema import JsonSchema
from postroom.adapters.schemas.protobuf import Descriptors, ProtobufSchema
from postroom.application.ingest.namespace import PayloadSchema, SchemaFormat
from postroom.application.telemetry import logger
from postroom.domain.envelope.payload import ACCEPTED, PayloadValidation
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.envelope.validation import ValidationMode
from postroom.domain.errors import InvalidRequest
from postroom.domain.search import topic_matches

MAX_DECOMPRESSED_BYTES = 64 << 20
"""Limit of a payload's size after decompression."""
_MAX_CACHED_TOPICS = 10_000
_WINDOW_BITS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}


class _Schema(Protocol):
    def problems(self, payload: any_pb2.Any, data: bytes) -> Iterator[str]: ...


class _Rule(NamedTuple):
    topic: str
    """Exact name or glob."""
    schema: _Schema | None
    """None: the payload is not validated."""
    mode: ValidationMode


class SchemaValidator:
    """A payload validator that applies the first schema whose topic matches."""

    def __init__(self, schemas: Sequence[PayloadSchema]) -> None:
        """Compile the schemas.

        Raises: InvalidRequest when a file is invalid, or missing although validation is strict.
        """
        descriptors: dict[Path, Descriptors] = {}
        self._rules = [_Rule(one.topic, _compile(one, descriptors), one.validation) for one in schemas]
        self._by_topic: dict[str, _Rule | None] = {}

    def validate(self, envelope: PrismEnvelope) -> PayloadValidation:
        """Validate a payload; see `PayloadValidator.validate`."""
        metadata = envelope.metadata
        rule = self._rule(metadata.topic)
        if rule is None or rule.schema is None or envelope.security.HasField("encryption"):
            return ACCEPTED
        try:
            data = _decompress(envelope.payload.value, metadata.content_encoding)
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

    def _rule(self, topic: str) -> _Rule | None:
        if topic in self._by_topic:
            return self._by_topic[topic]
        rule = next((rule for rule in self._rules if topic_matches(rule.topic, topic)), None)
        if len(self._by_topic) < _MAX_CACHED_TOPICS:
            self._by_topic[topic] = rule
        return rule


def _compile(schema: PayloadSchema, descriptors: dict[Path, Descriptors]) -> _Schema | None:
    """Return the schema of a topic, or None when its payloads are not validated.

    Arguments:
        descriptors: cache of descriptors by file.
    """
    if schema.validation == ValidationMode.DISABLED:
        return None
    if schema.file is None:
        if schema.validation == ValidationMode.STRICT:
            raise InvalidRequest(
                f"Payloads of topic {schema.topic} can't be validated without a schema; name its `file`, or "
                "set its `validation` to warn or disabled."
            )
        logger().warning("ingest.payloads_unchecked", topic=schema.topic, reason="no schema file is named")
        return None
    if schema.format == SchemaFormat.JSON_SCHEMA:
        return JsonSchema(schema.file)
    if schema.file not in descriptors:
        descriptors[schema.file] = Descriptors(schema.file)
    return ProtobufSchema(
        descriptors[schema.file],
        schema.message_name or "",
        allows_unknown_fields=schema.allows_unknown_fields,
    )


def _decompress(data: bytes, encoding: str) -> bytes:
    """Return a payload decompressed; raise `InvalidRequest` when that fails."""
    if encoding in ("", "identity"):
        return data
    if encoding not in _WINDOW_BITS:
        raise InvalidRequest(f"is encoded with {encoding!r}, which is not supported")
    decompressor = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        decompressed = decompressor.decompress(data, MAX_DECOMPRESSED_BYTES)
    except zlib.error as error:
        raise InvalidRequest(f"is not valid {encoding}: {error}") from error
    if len(decompressed) == MAX_DECOMPRESSED_BYTES:
        raise InvalidRequest(f"has more than {MAX_DECOMPRESSED_BYTES} bytes when decompressed")
    if not decompressor.eof or decompressor.unused_data:
        raise InvalidRequest(f"has {'trailing' if decompressor.eof else 'incomplete'} {encoding} data")
    return decompressed
