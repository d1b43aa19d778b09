"""Port: decoding of payloads."""

from typing import Protocol

from postroom.domain.envelope.content import DecodedPayload
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope


class PayloadDecoder(Protocol):
    """A decoder of payloads; it is pickled and sent to the tasks of a `Runner`."""

    def decode(self, mailbox: str, envelope: PrismEnvelope) -> DecodedPayload:
        """Decode one payload; problems are returned, not raised.

        Arguments:
            mailbox: name of the mailbox that has the message.
        """
