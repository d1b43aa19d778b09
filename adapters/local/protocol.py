"""The protocol of the local socket: frames of msgpack, each after its length in 4 bytes (ADR 0041).

The server greets with `Hello`. The client sends requests `[id, kind, body, corr_id, caller]`, any number at a
time; the last two may be left out. The server answers each with `[id, error, result]`, in any order; one of
the two is nil. A request that is unknown, or whose body can't be read, is answered with an error; a frame
that can't be read is answered once, under the id 0, and ends its connection.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Final, TypeVar

import msgspec

from postroom.application.caller import Caller
from postroom.application.mailbox.administer import CHUNK
from postroom.application.mailbox.receive import make_receive
from postroom.application.mailbox.settle import check_nack, check_receipt
from postroom.application.message_stream import MAX_WAIT_MS
from postroom.application.messages import MessageDelivery
from postroom.application.metrics import Metric
from postroom.application.operations.mailbox import OPERATIONS
from postroom.application.page import Page
from postroom.application.ports.event_log import Accepted, Answer
from postroom.application.remote_errors import ProblemBrief, rebuild_error
from postroom.application.version import own_version
from postroom.application.worker_reports import WorkerState
from postroom.domain.arguments import MAX_INT, check_int, check_optional_text, check_path, check_text
from postroom.domain.errors import InvalidRequest, PostroomError, Rejected
from postroom.domain.mailbox.commands import (
    Ack,
    Command,
    Extend,
    Nack,
    Pause,
    Purge,
    Receive,
    Redrive,
    Resume,
    Send,
    SetPolicy,
    SetSettings,
)
from postroom.domain.message import MAX_PRIORITY
from postroom.domain.names import STREAM_BYTES, check_topic
from postroom.domain.policy import MAX_DURATION_MS, MAX_FRAME_BYTES, check_visibility
from postroom.domain.redrive.spec import RedriveSpec
from postroom.domain.schedule import ScheduleSpec
from postroom.domain.search import EventFilter, FoundMessage
from postroom.domain.settings import SettingsChanges
from postroom.domain.subscription import SubscriptionFilter

T = TypeVar("T")

VERSION: Final = 6
FRAME_BYTES = MAX_FRAME_BYTES + (16 << 20)
"""Maximum size of a frame: the largest message with its headers."""
BATCH_BYTES = 4 << 20
"""Size of the commands of one request, or of one delivery, above which they are split or cut."""
HASH_BYTES = 32
PING, CANCEL, RECEIVE, FIND_ID, QUERY, RELAY = "ping", "cancel", "receive", "find_id", "query", "relay"


class Hello(msgspec.Struct, frozen=True):
    """First frame of a connection: who answers, and for which mailbox."""

    version: int
    mailbox: str


class Request(msgspec.Struct, frozen=True, array_like=True):
    """A request.

    Arguments:
        id: names the answer; 0 asks for none.
        corr_id: correlation id of the caller.
        caller: caller on whose behalf the client calls; None if the client calls for itself.
    """

    id: int
    kind: str
    body: msgspec.Raw
    corr_id: str | None = None
    caller: Caller | None = None


class Receiving(msgspec.Struct, frozen=True, array_like=True):
    """Body of a receive.

    Arguments:
        is_stream: whether to return unsettled messages when the connection ends; older owners ignore it.
    """

    command: Receive
    wait_ms: int
    is_stream: bool = False


class Query(msgspec.Struct, frozen=True, array_like=True):
    """Body of a query: a method of the mailbox and its arguments."""

    name: str
    arguments: list[Any]
    options: dict[str, Any]


class MalformedFrame(Exception):
    """A frame that can't be read; it ends the connection."""


class Frames:
    """Reader of frames from the chunks that a socket delivers."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the bodies of the frames that `data` completes.

        Raises: MalformedFrame for a frame above the limit.
        """
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= 4:
            size = int.from_bytes(buffer[start : start + 4], "big")
            if size > FRAME_BYTES:
                raise MalformedFrame(f"A frame of {size} bytes is above the limit of {FRAME_BYTES}.")
            end = start + 4 + size
            if len(buffer) < end:
                break
            yield bytes(buffer[start + 4 : end])
            start = end
        del buffer[:start]


def frame(value: object) -> bytes:
    """Return a value as a frame."""
    body = _ENCODE(value)
    return len(body).to_bytes(4, "big") + body


# -- commands ---


def _check_send(send: Send) -> Send:
    check_topic(send.topic)
    check_int("size", send.size)
    check_int("deliver_after_ms", send.deliver_after_ms, 0, MAX_DURATION_MS)
    if send.ttl_ms is not None:
        check_int("ttl_ms", send.ttl_ms, 1, MAX_DURATION_MS)
    if send.idem_key is not None:
        check_text("idem_key", send.idem_key, 1)
    check_optional_text("sticky_key", send.sticky_key)
    if send.unique_key is not None:
        check_text("unique_key", send.unique_key, 1)
    check_int("priority", send.priority, 0, MAX_PRIORITY)
    check_int("timestamp", send.headers.timestamp, -MAX_INT, MAX_INT)
    other = send.message if send.other_stream is None else send.other_stream
    sizes = [len(each) for each in (send.message, other, send.payload_hash, send.hash_chain)]
    if sizes != [STREAM_BYTES, STREAM_BYTES, HASH_BYTES, HASH_BYTES] or send.existing_hash is not None:
        raise InvalidRequest("A send has a stream or hash of a wrong length, or an existing message's hash.")
    return send


def _check_ack(ack: Ack) -> Ack:
    type_ = check_optional_text("The content_type of a result", ack.result_type)
    return Ack(check_receipt(ack.receipt), None, ack.result, type_)


def _check_nack(nack: Nack) -> Nack:
    if not 0 <= nack.jitter < 1:
        raise InvalidRequest(f"jitter must be at least 0 and below 1; it was {nack.jitter}.")
    options = check_nack(nack.reason, nack.delay_ms, nack.action)
    receipt = check_receipt(nack.receipt)
    return Nack(receipt, nack.jitter, options.reason, nack.delay_ms, None, options.action, nack.traceback)


def _check_chunk(command: Redrive | Purge) -> Redrive | Purge:
    check_topic(command.topic)
    check_int("limit", command.limit, 1, CHUNK)
    if isinstance(command, Redrive):
        check_optional_text("reason", command.reason)
    return command


# The commands that a client may submit, and the owner's check of each. A client makes them from checked
# arguments, but nothing that comes through the socket may corrupt the owner's state. Fields that only an
# owner may set, such as the stored message of an ack, are dropped.
_CHECKS: dict[type, Callable[[Any], Command]] = {
    Send: _check_send,
    Ack: _check_ack,
    Nack: _check_nack,
    Extend: lambda each: Extend(check_receipt(each.receipt), check_visibility(each.visibility_ms)),
    Redrive: _check_chunk,
    Purge: _check_chunk,
    SetPolicy: lambda each: SetPolicy(check_topic(each.topic), each.policy.validate()),
    SetSettings: lambda each: each,  # the owner checks it with the settings that it changes
    Pause: lambda each: Pause(check_topic(each.topic)),
    Resume: lambda each: Resume(check_topic(each.topic)),
}
_COMMANDS = {
    kind.__name__: (msgspec.msgpack.Decoder(list[kind]).decode, check)  # type: ignore[valid-type]
    for kind, check in _CHECKS.items()
}


def read_commands(kind: str, body: msgspec.Raw) -> list[Command]:
    """Return the commands of a request.

    Raises: MalformedFrame when they can't be read, InvalidRequest for an unknown kind, and when one is out of
        bounds.
    """
    if kind not in _COMMANDS:
        raise InvalidRequest(f"There are no requests of the kind {kind[:40]!r}.")
    decode, check = _COMMANDS[kind]
    commands = [check(command) for command in _read(decode, body)]
    if not commands:
        raise InvalidRequest("A request must have at least one command.")
    return commands


def read_receive(body: msgspec.Raw) -> Receiving:
    """Return the body of a receive; raises as `read_commands`."""
    receiving = _read(_READ_RECEIVING, body)
    asked = receiving.command
    max_bytes = min(asked.max_bytes, BATCH_BYTES)
    command = make_receive(asked.topics, asked.max_messages, max_bytes, asked.visibility_ms, asked.consumer)
    command = msgspec.structs.replace(
        command,
        principal=check_optional_text("principal", asked.principal),
        capability=check_optional_text("capability", asked.capability),
    )
    return Receiving(command, check_int("wait_ms", receiving.wait_ms, 0, MAX_WAIT_MS), receiving.is_stream)


def read_query(body: msgspec.Raw) -> Query:
    """Return the body of a query; raises as `read_commands`."""
    query = _read(_READ_QUERY, body)
    if query.name not in QUERIES:
        raise InvalidRequest(
            f"There is no query {query.name[:40]!r} in Postroom {own_version()}, the owner's; upgrade it."
        )
    for index, kind, name in _argument_structs(query.name):
        if index < len(query.arguments):
            try:
                query.arguments[index] = msgspec.convert(query.arguments[index], kind)
            except (msgspec.ValidationError, RecursionError) as error:
                raise InvalidRequest(f"{name} is wrong: {error}.") from None
    return query


def read_stream(body: msgspec.Raw) -> bytes:
    """Return a stream id; raises as `read_commands`."""
    return _read(_READ_BYTES, body)


def read_outboxes(body: msgspec.Raw) -> list[str]:
    """Return the addresses of outboxes to relay; raises as `read_commands`."""
    return [check_path("An outbox", address) for address in _read(_READ_TEXTS, body)]


def read_id(body: msgspec.Raw) -> int:
    """Return the id of another request; raises as `read_commands`."""
    return _read(_READ_INT, body)


def _read(decode: Callable[[Any], T], body: bytes | msgspec.Raw) -> T:
    try:
        return decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedFrame(f"A frame can't be read: {error}.") from error


_READ_RECEIVING = msgspec.msgpack.Decoder(Receiving).decode
_READ_QUERY = msgspec.msgpack.Decoder(Query).decode
_READ_TEXTS = msgspec.msgpack.Decoder(list[str]).decode
_READ_BYTES = msgspec.msgpack.Decoder(bytes).decode
_READ_INT = msgspec.msgpack.Decoder(int).decode

# -- results ---

_COMMAND_OPERATIONS = (
    "send_message",
    "send_batch",
    "receive_messages",
    "ack_messages",
    "nack_messages",
    "extend_visibility",
    "redrive_dead_letters",
    "purge_topic",
    "set_settings",
    "set_topic_policy",
    "pause_topic",
    "resume_topic",
)
"""Operations that clients submit as commands."""
_OTHER_RESULTS = {
    "erase_messages": int,
    "get_mode": str,
    "measure": list[Metric],
    "search_unsettled": Page[FoundMessage],
}
"""Results of the queries that are no operations."""
_STRUCTS = {
    RedriveSpec: "The redrive specification",
    SettingsChanges: "The change of settings",
    SubscriptionFilter: "The filter of a subscription",
    ScheduleSpec: "The schedule",
    WorkerState: "The worker",
}
"""Arguments that are structs, as errors name them."""


QUERIES = (OPERATIONS.keys() - {*_COMMAND_OPERATIONS, "search_messages"}) | _OTHER_RESULTS.keys()
"""Names of the queries; `search_messages` asks the read models, or `search_unsettled`."""


@cache
def _result_decoder(query: str) -> Callable[[Any], Any]:
    """Return the decoder of the result of a query."""
    return msgspec.msgpack.Decoder(_OTHER_RESULTS.get(query) or OPERATIONS[query].result).decode


@cache
def _argument_structs(query: str) -> list[tuple[int, type[msgspec.Struct], str]]:
    """Return the positions of the arguments of a query that are structs, and their names in errors."""
    if query == "search_unsettled":
        return [(0, EventFilter, "The filter")]
    parameters = OPERATIONS[query].parameters if query in OPERATIONS else ()
    kinds = enumerate(each.kind for each in parameters)
    return [(index, kind, _STRUCTS[kind]) for index, kind in kinds if kind in _STRUCTS]


_READ_DELIVERIES = msgspec.msgpack.Decoder(list[MessageDelivery]).decode
_READ_TEXT = msgspec.msgpack.Decoder(str).decode
_READ_HELLO = msgspec.msgpack.Decoder(Hello).decode
_READ_ANSWERS = msgspec.msgpack.Decoder(list[tuple[bytes, bool] | int | ProblemBrief]).decode
_READ_REQUEST = msgspec.msgpack.Decoder(Request).decode
_READ_REPLY = msgspec.msgpack.Decoder(tuple[int, ProblemBrief | None, msgspec.Raw]).decode


def read_hello(body: bytes) -> Hello:
    """Return the greeting of an owner; raises MalformedFrame, as all functions below do."""
    return _read(_READ_HELLO, body)


def read_request(body: bytes) -> Request:
    """Return a request whose body is not yet read."""
    return _read(_READ_REQUEST, body)


def read_reply(body: bytes) -> tuple[int, ProblemBrief | None, msgspec.Raw]:
    """Return the id of the request, its error and its result."""
    return _read(_READ_REPLY, body)


def read_deliveries(body: msgspec.Raw) -> list[MessageDelivery]:
    """Return the result of a receive."""
    return _read(_READ_DELIVERIES, body)


def read_text(body: msgspec.Raw) -> str:
    """Return the id of a message."""
    return _read(_READ_TEXT, body)


def write_answers(answers: Sequence[Answer]) -> list[object]:
    """Return the answers to commands as they are sent."""
    return [ProblemBrief.of(each) if isinstance(each, Rejected) else each for each in answers]


def read_answers(body: msgspec.Raw) -> list[Answer]:
    """Return the answers to commands."""
    answers: list[Any] = _read(_READ_ANSWERS, body)
    return [
        Accepted(*each) if type(each) is tuple else _refusal(each) if type(each) is ProblemBrief else each
        for each in answers
    ]


def read_result(query: str, body: msgspec.Raw) -> Any:
    """Return the result of a query."""
    return _read(_result_decoder(query), body)


def read_error(error: ProblemBrief) -> PostroomError:
    """Return the exception of an error that was sent."""
    rebuilt = rebuild_error(error.code, error.message, error.retry_after_ms)
    rebuilt.is_counted = True  # the owner has counted it
    return rebuilt


def _refusal(error: ProblemBrief) -> Rejected:
    refusal = read_error(error)
    return refusal if isinstance(refusal, Rejected) else InvalidRequest(error.message)


_ENCODE = msgspec.msgpack.Encoder().encode
