"""Port: whether payloads are what their topics' schemas say (RFC-037 schema validation, step 4)."""

from typing import Protocol

from postroom.domain.envelope.payload import PayloadValidation
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope


class PayloadValidator(Protocol):
    """Check the payloads of envelopes against the schemas of their topics; may be called from any thread."""

    def validate(self, envelope: PrismEnvelope) -> PayloadValidation:
        """Check one payload; raises nothing, what is wrong stands in the result.

        A topic without a schema accepts everything, and so does one whose payload is encrypted.
        """
