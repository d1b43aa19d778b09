"""The payload validator port over the schemas of a namespace, by topic."""

from collections.abc import Sequence
from typing import NamedTuple

from postroom.adapters.schemas.topic_schemas import Schema, SchemaCompiler, TopicRules
from postroom.application.ingest.namespace import PayloadSchema
from postroom.application.telemetry import logger
from postroom.domain.envelope.content import decompress
from postroom.domain.envelope.payload import ACCEPTED, PayloadValidation
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.envelope.validation import ValidationMode
from postroom.domain.errors import InvalidRequest


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
