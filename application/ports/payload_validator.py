"""Port: validation of payloads against the schemas of their topics (RFC-037 schema validation, step 4)."""

from typing import Protocol

from postroom.domain.envelope.payload import PayloadValidation
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope


class PayloadValidator(Protocol):
    """Validator of payloads against the schemas of their topics; may be called from any thread."""

    def validate(self, envelope: PrismEnvelope) -> PayloadValidation:
        """Validate one payload; problems are returned, not raised.

        A payload that is encrypted, or whose topic has no schema, is accepted.
        """
