"""New messages for a mailbox, as an outbox stores them."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final
from uuid import UUID

import msgspec

from postroom.application.mailbox.message_factory import MessageFactory
from postroom.application.messages import NewMessage
from postroom.application.ports.message_outbox import RecordedMessage
from postroom.application.trace_context import SAMPLED
from postroom.application.tracing import tracer
from postroom.domain.errors import FrameTooLarge, InvalidRequest
from postroom.domain.message import MS

UUID_WITH_TIME: Final = 7
MAX_TIME_US: Final = 253_402_300_799_999_999
"""End of the year 9999."""
UUID_TIME_SHIFT: Final = 80
"""Bits of a UUIDv7 after its time in ms."""


class _StoredMessage(NewMessage, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A message as JSON, with base64 for the payload and for all attributes, both text and bytes."""

    attrs: Mapping[str, bytes] = {}


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_StoredMessage).decode


def record_message(
    message: object, factory: MessageFactory, wall: Callable[[], int], max_bytes: int
) -> RecordedMessage:
    """Validate a `NewMessage` like a send, and return its row, whose position is not set yet.

    The row has a message id and a time of publication, so that sending it twice adds one message.

    Arguments:
        wall: returns the time in µs since 1970 UTC.
        max_bytes: maximum size of the message with its envelope.

    Raises: InvalidRequest naming the field that is invalid, FrameTooLarge.
    """
    request = factory.from_message(message)
    size = len(request.command.envelope)
    assert isinstance(message, NewMessage)
    if size > max_bytes:
        raise FrameTooLarge(
            f"Message on topic {message.topic} is {size} bytes with its envelope; a frame holds at most "
            f"{max_bytes}. Send a reference to the data instead."
        )
    fields = msgspec.structs.asdict(message)
    fields["message_id"] = request.message_id
    fields["correlation_id"] = request.command.headers.correlation_id
    trace = tracer().current()
    # Trace flags are not recorded, so an unsampled trace must not be recorded, as it would become sampled.
    if message.trace_id is None and trace is not None and trace.trace_flags & SAMPLED:
        fields["trace_id"], fields["span_id"] = trace.trace_id, trace.span_id
    if message.published_at_us is None:
        fields["published_at_us"] = wall()
    fields["attrs"] = {
        name: value.encode() if isinstance(value, str) else value for name, value in message.attrs.items()
    }
    return RecordedMessage(0, request.message_id, message.topic, _encode(_StoredMessage(**fields)).decode())


class _Times(msgspec.Struct):
    """The only field of a stored message that `recorded_at` reads."""

    published_at_us: int = 0


_decode_times = msgspec.json.Decoder(_Times).decode


def recorded_at(id_: str, message: str) -> int | None:
    """Return when a row was recorded, µs since 1970 UTC; None if it does not say so.

    A sender may set the id and the time of publication, so the later of the two times is the better one.
    """
    times = []
    with suppress(ValueError, AttributeError, TypeError):
        uuid = UUID(id_)
        if uuid.version == UUID_WITH_TIME:
            times.append((uuid.int >> UUID_TIME_SHIFT) * MS)
    with suppress(msgspec.MsgspecError, UnicodeError, RecursionError, TypeError):
        times.append(_decode_times(message).published_at_us)
    return max((each for each in times if 0 < each <= MAX_TIME_US), default=None)


def read_message(recorded: RecordedMessage) -> NewMessage:
    """Return the message of a row.

    Raises: InvalidRequest for a row that `record_message` did not create.
    """
    try:
        message = NewMessage(**msgspec.structs.asdict(_decode(recorded.message)))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(
            f"Outbox row {recorded.id!r:.80} is not a message that this version can read: {error}."
        ) from error
    if (message.message_id, message.topic) != (recorded.id, recorded.topic):
        # Without the id of the row, each attempt to send it would add a message.
        raise InvalidRequest(
            f"Outbox row {recorded.id!r:.80} was altered: its message has id {message.message_id!r:.80} and "
            f"topic {message.topic!r:.80}. Record messages with MailboxOutbox."
        )
    return message
