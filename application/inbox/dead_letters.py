"""Dead letters on the stream: EVT-047-002 with all that putting the message back needs (SDS-047 CMD-052)."""

from base64 import b64decode, b64encode
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from postroom.application.outbox.message import MESSAGE_ID
from postroom.application.ports.publisher import Publisher
from postroom.application.ports.source import SourceMessage
from postroom.domain.errors import InvalidRequest
from postroom.domain.inbox import DeadLetter
from postroom.domain.subject import check_token

_NOTHING = msgspec.Raw()


class DeadLetterRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Body of a message on `{context}.dlq.>` (SDS-047 EVT-047-002).

    Arguments:
        message_id, original_subject, reason, attempts: as EVT-047-002 has them.
        last_error: what the handler said, or what else was wrong.
        consumer: the durable consumer it was delivered by.
        stream, sequence: where it came from.
        at: when it was dead-lettered, RFC 3339, UTC.
        headers: the message's own.
        payload: the message's data where that is JSON; else `data_b64` has it.
    """

    message_id: str
    original_subject: str
    reason: str
    attempts: int
    last_error: str
    consumer: str
    stream: str
    sequence: str
    at: str
    headers: Mapping[str, str]
    payload: msgspec.Raw = _NOTHING
    data_b64: str = ""

    @property
    def message(self) -> SourceMessage:
        """Return the message as it was delivered at last."""
        data = b64decode(self.data_b64) if self.data_b64 else bytes(self.payload)
        return SourceMessage(
            self.original_subject, data, self.headers, self.attempts, self.sequence, token=None
        )


_decode = msgspec.json.Decoder(DeadLetterRecord).decode


def read_dead_letter(message: SourceMessage) -> DeadLetterRecord:
    """Return what a message on the dead-letter subject tells.

    Raises: InvalidRequest when somebody else put it there.
    """
    try:
        return _decode(message.data)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(
            f"Message {message.sequence} of {message.subject} is no dead letter of Postroom: {error}; "
            "settle it with the tool that published it."
        ) from error


def _is_json(data: bytes) -> bool:
    try:
        msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


class DeadLetters:
    """Publish dead letters to `{context}.dlq.{original subject}`.

    Arguments:
        context: the bounded context that could not deal with them.
        stream, consumer: its durable consumer, and the stream this reads.
    """

    def __init__(self, publisher: Publisher, context: str, stream: str, consumer: str) -> None:
        self._publisher = publisher
        self._context = check_token(context, "The context")
        self._stream = stream
        self._consumer = consumer

    async def publish(
        self, message: SourceMessage, message_id: str, letter: DeadLetter, attempts: int, at: int
    ) -> None:
        """Publish a dead letter, and return once the stream has stored it (SDS-047 CMD-052).

        Arguments:
            at: µs since 1970 UTC.

        Raises: Unavailable when it is unknown whether it was stored, InvalidRequest when no stream takes it.
        """
        is_json = _is_json(message.data)
        record = DeadLetterRecord(
            message_id,
            message.subject,
            letter.reason,
            attempts,
            letter.last_error,
            self._consumer,
            self._stream,
            message.sequence,
            datetime.fromtimestamp(at / 1_000_000, UTC).isoformat(),
            dict(message.headers),
            msgspec.Raw(message.data) if is_json else _NOTHING,
            "" if is_json else b64encode(message.data).decode(),
        )
        # The message's own id would do only in a stream of dead letters alone: in one that has the original
        # too, the server would take the letter for a repetition and drop it, as it would another consumer's.
        await self._publisher.publish(
            f"{self._context}.dlq.{message.subject}",
            msgspec.json.encode(record),
            {MESSAGE_ID: f"dlq:{self._consumer}:{message_id}"},
        )
