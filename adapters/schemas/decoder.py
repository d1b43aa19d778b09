"""The payload decoder port by content type, and over the schemas of namespaces by topic."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from postroom.adapters.schemas.validator import Schema, SchemaCompiler, TopicRules
from postroom.application.ingest.namespace import PayloadSchema, SchemaFormat
from postroom.domain.envelope.content import DecodedPayload, PayloadFormat, decode_payload, decompress
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.envelope.validation import ValidationMode
from postroom.domain.errors import InvalidRequest

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
        """Pickle the schemas without what was compiled from them."""
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

    def decode(self, mailbox: str, envelope: PrismEnvelope) -> DecodedPayload:  # the port's
        """Decode a payload; see `PayloadDecoder.decode`."""
        return decode_payload(envelope)
