"""The payload validator port over the schemas that a namespace names, topic by topic."""

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
"""Bounds what a small payload can blow up to."""
_KNOWN_TOPICS = 10_000
_WINDOW_BITS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}


class _Schema(Protocol):
    def problems(self, payload: any_pb2.Any, data: bytes) -> Iterator[str]: ...


class _Rule(NamedTuple):
    topic: str
    """Exact name or glob."""
    schema: _Schema | None
    """None checks nothing."""
    mode: ValidationMode


class SchemaValidator:
    """Check payloads by the first schema whose topic matches; schemas are compiled once."""

    def __init__(self, schemas: Sequence[PayloadSchema]) -> None:
        """Take the schemas in order.

        Raises: InvalidRequest when a file can't be used, or none is named though validation is strict.
        """
        descriptors: dict[Path, Descriptors] = {}
        self._rules = [_Rule(one.topic, _compile(one, descriptors), one.validation) for one in schemas]
        self._by_topic: dict[str, _Rule | None] = {}

    def validate(self, envelope: PrismEnvelope) -> PayloadValidation:
        """Check one payload; see `PayloadValidator.validate`."""
        metadata = envelope.metadata
        rule = self._rule(metadata.topic)
        if rule is None or rule.schema is None or envelope.security.HasField("encryption"):
            return ACCEPTED
        try:
            data = _decompressed(envelope.payload.value, metadata.content_encoding)
            problems = tuple(rule.schema.problems(envelope.payload, data))
        except InvalidRequest as error:
            problems = (str(error),)
        if not problems:
            return ACCEPTED
        # Not which message: what is wrong with many is told once.
        return PayloadValidation(
            rule.mode == ValidationMode.WARN,
            tuple(f"The payload on {metadata.topic} {problem}." for problem in problems),
        )

    def _rule(self, topic: str) -> _Rule | None:
        if topic in self._by_topic:
            return self._by_topic[topic]
        rule = next((rule for rule in self._rules if topic_matches(rule.topic, topic)), None)
        if len(self._by_topic) < _KNOWN_TOPICS:
            self._by_topic[topic] = rule
        return rule


def _compile(wanted: PayloadSchema, descriptors: dict[Path, Descriptors]) -> _Schema | None:
    """Return what checks the payloads of a topic, or None where they are not checked.

    Arguments:
        descriptors: those that were read already, by their file.
    """
    if wanted.validation == ValidationMode.DISABLED:
        return None
    if wanted.file is None:
        if wanted.validation == ValidationMode.STRICT:
            raise InvalidRequest(
                f"Payloads of topic {wanted.topic} can't be validated without a schema; name its `file`, or "
                "make its `validation` warn or disabled."
            )
        logger().warning("ingest.payloads_unchecked", topic=wanted.topic, reason="no schema file is named")
        return None
    if wanted.format == SchemaFormat.JSON_SCHEMA:
        return JsonSchema(wanted.file)
    if wanted.file not in descriptors:
        descriptors[wanted.file] = Descriptors(wanted.file)
    return ProtobufSchema(
        descriptors[wanted.file],
        wanted.message_name or "",
        allows_unknown_fields=wanted.allows_unknown_fields,
    )


def _decompressed(data: bytes, encoding: str) -> bytes:
    """Return a payload's bytes without compression; raise `InvalidRequest` when they can't be had."""
    if encoding in ("", "identity"):
        return data
    if encoding not in _WINDOW_BITS:
        raise InvalidRequest(f"is encoded with {encoding!r}, which can't be opened to check it")
    decompressor = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        opened = decompressor.decompress(data, MAX_DECOMPRESSED_BYTES)
    except zlib.error as error:
        raise InvalidRequest(f"is not {encoding}: {error}") from error
    if len(opened) == MAX_DECOMPRESSED_BYTES:
        raise InvalidRequest(f"has more than {MAX_DECOMPRESSED_BYTES} bytes in its {encoding}")
    if not decompressor.eof or decompressor.unused_data:
        raise InvalidRequest(f"is {'longer' if decompressor.eof else 'shorter'} than its {encoding} says")
    return opened
