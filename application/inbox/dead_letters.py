"""Dead letters on the stream: EVT-047-002 with all data that a redrive needs (SDS-047 CMD-052)."""

from base64 import b64decode, b64encode
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256

import msgspec

from postroom.application.outbox.events import MESSAGE_ID
from postroom.application.ports.outbox import Publisher
from postroom.application.ports.source import Headers, SourceMessage
from postroom.domain.errors import InvalidRequest
from postroom.domain.inbox import RouteToDeadLetter
from postroom.domain.subject import check_token

ORIGINAL_MESSAGE_ID = "Postroom-Original-Msg-Id"
MAX_SUBJECT_BYTES = 1_000
"""NATS limits a protocol line to 4 KiB, and a dead letter's subject is longer than the original."""
MAX_TRUNCATED_HEADERS = 50
MAX_TRUNCATED_HEADER_CHARS = 100
_ABSENT = msgspec.Raw()


class DeadLetterRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Body of a message on `{context}.dlq.>` (SDS-047 EVT-047-002).

    Arguments:
        message_id: id in the inbox, a UUID.
        original_subject, reason, attempts: see EVT-047-002.
        last_error: the handler's response, or the reason for its absence.
        consumer: the durable consumer that delivered the message.
        stream, sequence: the message's position in its original stream.
        at: when it was dead-lettered, RFC 3339, UTC.
        headers: headers of the message; a repeated header has a list of values.
        payload: the message's data if it is JSON; `data_b64` otherwise.
        original_message_id: the message's `Nats-Msg-Id`.
        body_bytes, body_sha256: size and hash of the message's data.
        omitted: description of the data and headers left out to meet a size limit, and where to read them.
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
    headers: Mapping[str, str | list[str]]
    payload: msgspec.Raw = _ABSENT
    data_b64: str = ""
    original_message_id: str = ""
    body_bytes: int = 0
    body_sha256: str = ""
    omitted: str = ""

    @property
    def message(self) -> SourceMessage:
        """Return the message as it was delivered; its data is empty if it was omitted."""
        data = b64decode(self.data_b64) if self.data_b64 else bytes(self.payload)
        pairs = [
            (name, value)
            for name, values in self.headers.items()
            for value in ([values] if isinstance(values, str) else values)
        ]
        return SourceMessage(
            self.original_subject, data, Headers(pairs), self.attempts, self.sequence, token=None
        )


_decode = msgspec.json.Decoder(DeadLetterRecord).decode
_replace = msgspec.structs.replace


def read_dead_letter(message: SourceMessage) -> DeadLetterRecord:
    """Return the record in a message on the dead-letter subject.

    Raises: InvalidRequest if another program published the message.
    """
    try:
        return _decode(message.data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(
            f"Message {message.sequence} of {message.subject} is not a dead letter of Postroom: {error}; "
            "settle it with the tool that published it."
        ) from error


def body_hash(data: bytes) -> str:
    """Return the SHA-256 of a message's data, in hexadecimal."""
    return sha256(data).hexdigest()


class DeadLetterPublisher:
    """Publisher of dead letters to `{context}.dlq.{original subject}`.

    Arguments:
        context: the bounded context that could not process the messages.
        stream, consumer: its durable consumer, and the stream that the consumer reads.
    """

    def __init__(self, publisher: Publisher, context: str, stream: str, consumer: str) -> None:
        self._publisher = publisher
        self._context = check_token(context, "The context")
        self._stream = stream
        self._consumer = consumer

    async def publish(
        self, message: SourceMessage, message_id: str, settlement: RouteToDeadLetter, attempts: int, at: int
    ) -> None:
        """Publish a dead letter, and return once the stream has stored it (SDS-047 CMD-052).

        If the stream refuses the whole message, for example as too large, the dead letter omits the message's
        data; if that is refused too, headers are truncated.

        Arguments:
            at: µs since 1970 UTC.

        Raises: Unavailable when it is unknown whether it was stored, InvalidRequest when it is refused.
        """
        record = self._record(message, message_id, settlement, attempts, at)
        location = f"see sequence {record.sequence} of stream {record.stream}"
        without_body = _replace(
            record, payload=_ABSENT, data_b64="", omitted=f"data of {record.body_bytes:,} bytes; {location}"
        )
        headers = _truncate_headers(message)
        truncated = _replace(
            without_body,
            headers=headers,
            original_message_id=record.original_message_id[:MAX_TRUNCATED_HEADER_CHARS],
            omitted=f"data of {record.body_bytes:,} bytes, some headers; {location}",
        )
        for candidate in (record, without_body):
            with suppress(InvalidRequest):
                await self._publish(candidate, headers)
                return
        await self._publish(truncated, headers)

    async def _publish(self, record: DeadLetterRecord, message_headers: Mapping[str, str]) -> None:
        # Under the message's own id, a stream that also stores the original, or a dead letter of another
        # consumer, would drop this one as a duplicate.
        headers = {MESSAGE_ID: f"dlq:{self._consumer}:{record.message_id}"}
        if original_id := "".join(filter(str.isprintable, message_headers.get(MESSAGE_ID, ""))):
            headers[ORIGINAL_MESSAGE_ID] = original_id
        subject = f"{self._context}.dlq.{_subject_suffix(record.original_subject)}"
        await self._publisher.publish(subject, msgspec.json.encode(record), headers)

    def _record(
        self, message: SourceMessage, message_id: str, settlement: RouteToDeadLetter, attempts: int, at: int
    ) -> DeadLetterRecord:
        is_json = _is_json(message.data)
        return DeadLetterRecord(
            message_id,
            message.subject,
            settlement.reason,
            attempts,
            settlement.last_error,
            self._consumer,
            self._stream,
            message.sequence,
            datetime.fromtimestamp(at / 1_000_000, UTC).isoformat(),
            _group_headers(message),
            msgspec.Raw(message.data) if is_json else _ABSENT,
            "" if is_json else b64encode(message.data).decode(),
            message.headers.get(MESSAGE_ID, ""),
            len(message.data),
            body_hash(message.data),
        )


def _subject_suffix(subject: str) -> str:
    """Return the original subject, or its hash if NATS can't publish to it."""
    is_plain = not any(map(str.isspace, subject)) and all(
        token not in ("", "*", ">") for token in subject.split(".")
    )
    if is_plain and len(subject.encode()) <= MAX_SUBJECT_BYTES:
        return subject
    return f"hashed_subject.{body_hash(subject.encode())}"


def _group_headers(message: SourceMessage) -> dict[str, str | list[str]]:
    values: dict[str, list[str]] = {}
    for name, value in message.header_pairs:
        values.setdefault(name, []).append(value)
    return {name: group[0] if len(group) == 1 else group for name, group in values.items()}


def _truncate_headers(message: SourceMessage) -> dict[str, str]:
    first = list(message.headers.items())[:MAX_TRUNCATED_HEADERS]
    if MESSAGE_ID in message.headers:
        first.append((MESSAGE_ID, message.headers[MESSAGE_ID]))
    return {name[:MAX_TRUNCATED_HEADER_CHARS]: value[:MAX_TRUNCATED_HEADER_CHARS] for name, value in first}


def _is_json(data: bytes) -> bool:
    try:
        msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True
