"""Messages to be sent: checks of their fields, and ids by which a server recognises a repetition."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from postroom.application.mailbox.settle import submit_valid
from postroom.application.messages import NewMessage, Sent
from postroom.application.ports.event_log import Accepted, Answer
from postroom.domain.arguments import MAX_TEXT_CHARS, check_any_text, check_int, check_text
from postroom.domain.envelope.headers import FIRST_SECOND, LAST_SECOND
from postroom.domain.errors import InvalidRequest, Rejected
from postroom.domain.mailbox.commands import Command, Send
from postroom.domain.message import MAX_PRIORITY
from postroom.domain.names import message_id
from postroom.domain.policy import MAX_DURATION_MS, SECOND_MS

FIRST_US = FIRST_SECOND * 1_000_000
LAST_US = LAST_SECOND * 1_000_000 + 999_999


_CHECKS: dict[str, Callable[[str, object], object]] = {
    "ttl_seconds": partial(check_int, maximum=MAX_DURATION_MS // SECOND_MS),
    "priority": partial(check_int, maximum=MAX_PRIORITY),
    # Bounded only by the frame size:
    "content_type": check_any_text,
    "correlation_id": check_any_text,
    "causality_parent": check_any_text,
    "principal": check_any_text,
    "trace_id": check_any_text,
    "span_id": check_any_text,
    "schema_url": check_any_text,
    "schema_version": check_any_text,
}
EXAMPLE = NewMessage(topic="example", payload=b"")
HEADERS = [(name, getattr(EXAMPLE, name), check) for name, check in _CHECKS.items()]
"""Headers of a new message, which are checked unless they have their default values."""


class Id(Protocol):
    """UUID of any library."""

    @property
    def bytes(self) -> bytes:
        """Return its 16 bytes."""


NewId = Callable[[], Id]


R = TypeVar("R", bound=Sent | Rejected)


class OutgoingMessage(NamedTuple):
    """A valid message with an id.

    Arguments:
        has_new_id: whether its id was made for this send; else it is the sender's own.
    """

    message: NewMessage
    has_new_id: bool

    def result(self, answer: R) -> R | Sent:
        """Return the result of its send; repeating an earlier attempt of the same call is no duplicate."""
        if self.has_new_id and isinstance(answer, Sent) and answer.message_id == self.message.message_id:
            return Sent(answer.message_id, duplicate=False)
        return answer


async def send_outgoing(
    items: Sequence[object],
    prepare: Callable[[object], OutgoingMessage],
    send: Callable[[list[NewMessage]], Awaitable[list[Sent | Rejected]]],
) -> list[Sent | Rejected]:
    """Send the valid messages together, and return the result of each, in their order.

    Arguments:
        prepare: returns a message with an id, or raises Rejected.
        send: returns an answer for each message.
    """

    async def submit(outgoing: list[OutgoingMessage]) -> list[Sent | Rejected]:
        answers = await send([each.message for each in outgoing])
        return [each.result(answer) for each, answer in zip(outgoing, answers, strict=True)]

    return await submit_valid(items, prepare, submit)


MAX_ATTRS_BYTES = 64 << 10


def have_same_headers(messages: Sequence[object], first: NewMessage) -> bool:
    """Return whether all messages share the header objects of one, and have neither ids nor attributes."""
    topic, content_type, correlation_id = first.topic, first.content_type, first.correlation_id
    causality_parent, principal, priority = first.causality_parent, first.principal, first.priority
    ttl_seconds, trace_id, span_id = first.ttl_seconds, first.trace_id, first.span_id
    schema_url, schema_version = first.schema_url, first.schema_version
    delay, on_conflict = EXAMPLE.deliver_after_ms, EXAMPLE.on_conflict
    for each in messages:
        if (
            type(each) is not NewMessage
            or (each.topic is not topic and (type(each.topic) is not str or each.topic != topic))
            or type(each.attrs) is not dict
            or each.attrs
            or each.message_id is not None
            or each.deliver_after_ms is not delay
            or each.ttl_seconds is not ttl_seconds
            or each.published_at_us is not None
            or each.content_type is not content_type
            or each.correlation_id is not correlation_id
            or each.causality_parent is not causality_parent
            or each.principal is not principal
            or each.priority is not priority
            or each.trace_id is not trace_id
            or each.span_id is not span_id
            or each.schema_url is not schema_url
            or each.schema_version is not schema_version
            or each.on_conflict is not on_conflict
        ):
            return False
    return True


def are_plain(keys: Sequence[Any]) -> bool:
    """Return whether each key is None, or ASCII text that is not empty and within the limit."""
    some = [key for key in keys if key is not None]
    return not some or (
        set(map(type, some)) == {str}
        and min(map(len, some)) >= 1
        and max(map(len, some)) <= MAX_TEXT_CHARS
        and all(map(str.isascii, some))
    )


def check_attrs(attrs: object) -> dict[str, bytes]:
    """Return the attributes of a message as bytes."""
    if type(attrs) is not dict and not isinstance(attrs, Mapping):
        raise InvalidRequest(f"attrs must be a mapping, not {type(attrs).__name__}.")
    values: dict[str, bytes] = {}
    size = 0
    for name, value in attrs.items():
        check_text("A name in attrs", name, 1)
        if type(value) is not bytes:
            if type(value) is not str or not value.isascii():
                check_any_text(f"attrs[{name!r}]", value)
            value = value.encode()
        values[name] = value
        size += len(name.encode()) + len(value)
    if size > MAX_ATTRS_BYTES:
        raise InvalidRequest(
            f"attrs must have up to {MAX_ATTRS_BYTES} bytes, names and values together; they had {size}."
        )
    return values


def name_job(arguments: Mapping[str, Any], new_id: NewId) -> Mapping[str, Any]:
    """Return the arguments with an id for a new job without one, so that the call may be repeated."""
    if arguments.get("job_id", "") is None:
        return {**arguments, "job_id": message_id(new_id().bytes)}
    return arguments


def unless_own(answer: Answer, command: Command) -> Answer:
    """Return the answer to a repeated send: no duplicate if the message is the first attempt's."""
    if isinstance(command, Send) and not command.has_external_id and isinstance(answer, Accepted):
        return Accepted(answer.message, answer.duplicate and answer.message != command.message)
    return answer
