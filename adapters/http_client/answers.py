"""Answers of the HTTP interface, as its client reads them; fields that it does not need are left out."""

from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from postroom.application.messages import MessageDelivery, Sent, read_receipt
from postroom.application.operations.operation import Operation
from postroom.application.query_results import HistoryEntry, MessageDetail
from postroom.application.remote_errors import rebuild_error
from postroom.domain.envelope.headers import MailboxItem
from postroom.domain.errors import InvalidRequest, PostroomError, Rejected
from postroom.domain.message import Status
from postroom.domain.names import external_id
from postroom.domain.policy import TopicPolicy
from postroom.domain.search import FoundMessage, SearchPage

T = TypeVar("T")

Hash = Annotated[str, Meta(pattern=r"^b3:[0-9a-f]{64}\Z")]
Time = Annotated[datetime, Meta(tz=True)]
Count = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_HASH_PREFIX = "b3:"


class Problem(msgspec.Struct, frozen=True):
    """Why a request, or a part of one, was refused (RFC 9457)."""

    code: str
    message: str
    retry_after_ms: Count | None = None

    def to_error(self) -> PostroomError:
        """Return it as the exception that it was."""
        return rebuild_error(self.code, self.message, self.retry_after_ms)

    def to_refusal(self) -> Rejected:
        """Return it as the refusal of one part of a request."""
        error = self.to_error()
        return error if isinstance(error, Rejected) else InvalidRequest(self.message)


class SendResult(msgspec.Struct, frozen=True):
    """Result of one message: its id, or why it was refused."""

    msg_id: str = ""
    duplicate: bool = False
    error: Problem | None = None

    def to_result(self) -> Sent | Rejected:
        """Return it as `Mailbox.send_batch` does."""
        return Sent(self.msg_id, self.duplicate) if self.error is None else self.error.to_refusal()


class SendResults(msgspec.Struct, frozen=True):
    """Results of messages, in their order."""

    results: list[SendResult]


class Delivery(msgspec.Struct, frozen=True):
    """A delivery of a message, with its envelope."""

    msg_id: str
    topic: str
    shard: int
    attempt: int
    receipt: str
    visible_at: Time
    idem_key: str | None
    payload_hash: Hash
    hash_chain: Hash
    envelope_b64: bytes

    def to_delivery(self) -> MessageDelivery:
        """Return it as the owner handed it over."""
        receipt = read_receipt(self.receipt)
        return MessageDelivery(
            receipt,
            self.topic,
            self.shard,
            self.attempt,
            (self.visible_at - _EPOCH) // timedelta(microseconds=1),
            external_id(receipt.message, self.msg_id),
            self.idem_key,
            bytes.fromhex(self.payload_hash.removeprefix(_HASH_PREFIX)),
            bytes.fromhex(self.hash_chain.removeprefix(_HASH_PREFIX)),
            self.envelope_b64,
        )


class Deliveries(msgspec.Struct, frozen=True):
    """Messages received."""

    messages: list[Delivery]


class SettleResult(msgspec.Struct, frozen=True):
    """Result for one receipt; without an error it succeeded."""

    error: Problem | None = None

    def to_result(self) -> Rejected | None:
        """Return it as `Mailbox.ack_messages` does."""
        return None if self.error is None else self.error.to_refusal()


class SettleResults(msgspec.Struct, frozen=True):
    """Results for receipts, in their order."""

    results: list[SettleResult]


class Detail(msgspec.Struct, frozen=True):
    """A message with its headers, envelope, state and history."""

    mailbox: str
    message_id: str
    topic: str
    shard: int
    status: str
    attempt: int
    redriven: int
    reason: str | None
    last_error: str | None
    intact: bool
    item: dict[str, Any]
    envelope_b64: bytes
    history: list[HistoryEntry]
    erased: bool = False
    stream_id: str = ""

    def __post_init__(self) -> None:
        """Check the item, whose type has the envelope in a field of its own."""
        self.to_detail()

    def to_detail(self) -> MessageDetail:
        """Return it as `Mailbox.get_message` does."""
        values = {name: getattr(self, name) for name in MessageDetail.__struct_fields__}
        item = msgspec.convert(self.item | {"envelope_blob": self.envelope_b64}, MailboxItem)
        return MessageDetail(**values | {"item": item})


class FoundMessages(msgspec.Struct, frozen=True):
    """Page of a search."""

    items: list[dict[str, Any]]
    next_cursor: str | None = None

    def __post_init__(self) -> None:
        """Check the items, whose type has an envelope."""
        self.to_page()

    def to_page(self) -> SearchPage:
        """Return it as `Mailbox.search_messages` does."""
        items = (
            msgspec.convert(item | {"status": _status(item), "envelope_blob": b""}, FoundMessage)
            for item in self.items
        )
        return SearchPage(tuple(items), self.next_cursor)


class Info(msgspec.Struct, frozen=True):
    """The mailbox that is served."""

    mailbox: str


class Ok(msgspec.Struct, frozen=True):
    """The request has taken effect."""


@cache
def answer_of(operation: Operation) -> Any:
    """Return the type of the answer of an operation."""
    if operation.result is type(None):
        return Ok
    if not operation.answer:
        return operation.result
    kind = operation.result
    if kind is TopicPolicy:  # null from servers before ADR 0098 for a topic with the default policy
        kind = TopicPolicy | None
    return msgspec.defstruct("Answer", [(operation.answer, kind)], frozen=True)


def result_of(operation: Operation, answer: Any) -> Any:
    """Return the result in an answer of an operation."""
    if isinstance(answer, Ok):
        return None
    result = getattr(answer, operation.answer) if operation.answer else answer
    return TopicPolicy() if result is None else result


class Line(msgspec.Struct, frozen=True):
    """Line of a stream without a delivery: a heartbeat, or the error with which the server ends it."""

    heartbeat: str | None = None
    error: Problem | None = None


def read_answer(content: bytes | bytearray, kind: type[T]) -> T:
    """Return an answer.

    Raises: DecodeError when it is not of the contract.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error


def read_line(line: bytes | bytearray) -> list[MessageDelivery]:
    """Return the delivery in a line of a stream; none of a heartbeat.

    Raises: DecodeError when it is not of the contract; the error with which the server ends the stream.
    """
    if b'"receipt"' in line:
        return [read_answer(line, Delivery).to_delivery()]
    other = read_answer(line, Line)
    if other.error is not None:
        raise other.error.to_error()
    if other.heartbeat is None:
        raise msgspec.DecodeError("The line is neither a delivery nor a heartbeat nor an error.")
    return []


def _status(item: dict[str, Any]) -> int:
    try:
        return Status[str(item.get("status")).upper()].value
    except KeyError:
        raise ValueError("unknown status") from None
