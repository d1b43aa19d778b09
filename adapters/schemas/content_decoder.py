"""The payload decoder port by content type, without schemas."""

from postroom.domain.envelope.content import (
    DecodedPayload,
    decode_payload,
)
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope


class ContentDecoder:
    """A payload decoder by content type."""

    def decode(self, mailbox: str, envelope: PrismEnvelope) -> DecodedPayload:
        """Decode a payload; see `PayloadDecoder.decode`."""
        return decode_payload(envelope)
