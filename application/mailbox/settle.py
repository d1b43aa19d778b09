"""Handlers that end or extend deliveries: ack, nack, extend (svc-mailbox C-1); flow control of streams."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from time import time_ns
from typing import NamedTuple, TypeVar

import msgspec

from postroom.application.messages import MessageResult
from postroom.application.ports.event_log import MailboxOwner
from postroom.application.received_messages import ReceivedMessage
from postroom.application.tracing import ACK, EXTEND, NACK, MessagingOperation, tracer
from postroom.domain.arguments import (
    MAX_INT,
    check_any_text,
    check_int,
    check_items,
    check_optional_text,
    check_type,
)
from postroom.domain.errors import InvalidRequest, NotFound, Rejected, StaleReceipt
from postroom.domain.mailbox.commands import Ack, Command, Extend, Nack
from postroom.domain.message import NACK_ACTIONS, NackAction, Receipt
from postroom.domain.names import STREAM_BYTES
from postroom.domain.policy import MAX_DURATION_MS, check_visibility

S = TypeVar("S")
T = TypeVar("T")
A = TypeVar("A")


MIN_WAIT_SECONDS = 0.05
_NEVER = 1 << 63


class DeliveryWindow:
    """The unsettled deliveries of one stream.

    A delivery whose visibility timeout has ended takes no room, as its message is redelivered.

    Arguments:
        capacity: maximum number of them.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._due: dict[Receipt, int] = {}
        """Visibility deadline (µs) by receipt."""
        self._next_due = _NEVER
        """Time (µs) before which no deadline passes."""
        self.settled = asyncio.Event()
        """Set when a delivery is settled."""

    @property
    def room(self) -> int:
        """Return how many messages may be delivered now."""
        now = _now_us()
        if now >= self._next_due:
            self._due = {receipt: due for receipt, due in self._due.items() if due > now}
            self._next_due = min(self._due.values(), default=_NEVER)
        return self._capacity - len(self._due)

    @property
    def unsettled(self) -> list[Receipt]:
        """Return the receipts of the unsettled deliveries."""
        return list(self._due)

    def add(self, messages: Iterable[ReceivedMessage]) -> None:
        """Count the messages about to be delivered."""
        for message in messages:
            self._set_due(message.receipt, message.visible_at_us)

    def settle(self, receipt: Receipt) -> None:
        """Count a delivery no longer."""
        if self._due.pop(receipt, None) is not None:
            self.settled.set()

    def extend(self, receipt: Receipt, visibility_ms: int) -> None:
        """Count a delivery for longer."""
        if receipt in self._due:
            self._set_due(receipt, _now_us() + visibility_ms * 1_000)

    def seconds_until_room(self, most: float) -> float:
        """Return how long to wait for `settled` before looking again, while there is no room.

        Arguments:
            most: maximum.
        """
        next_due = (min(self._due.values(), default=0) - _now_us()) / 1e6
        return min(most, max(next_due, MIN_WAIT_SECONDS))

    def _set_due(self, receipt: Receipt, due: int) -> None:
        self._due[receipt] = due
        self._next_due = min(self._next_due, due)


class DeliveryWindows:
    """The windows of all open streams of a service; each learns of the settlements of its surfaces."""

    def __init__(self) -> None:
        self._windows: set[DeliveryWindow] = set()

    @contextmanager
    def open(self, capacity: int) -> Iterator[DeliveryWindow]:
        """Open a window for the duration of a stream."""
        window = DeliveryWindow(capacity)
        self._windows.add(window)
        try:
            yield window
        finally:
            self._windows.discard(window)

    def settle(self, receipts: Sequence[Receipt]) -> None:
        """Count deliveries no longer."""
        for window in self._windows:  # mostly there are none
            for receipt in receipts:
                window.settle(receipt)

    def extend(self, receipts: Sequence[Receipt], visibility_ms: int) -> None:
        """Count deliveries for longer."""
        for window in self._windows:
            for receipt in receipts:
                window.extend(receipt, visibility_ms)


def finished_receipts(receipts: Sequence[Receipt], answers: Sequence[Rejected | None]) -> list[Receipt]:
    """Return the receipts of the deliveries that are over, now or before, by the answers to acks or nacks."""
    over = (StaleReceipt, NotFound)
    return [
        receipt
        for receipt, answer in zip(receipts, answers, strict=True)
        if answer is None or isinstance(answer, over)
    ]


def extended_receipts(receipts: Sequence[Receipt], answers: Sequence[Rejected | None]) -> list[Receipt]:
    """Return the receipts of the deliveries that were extended."""
    return [receipt for receipt, answer in zip(receipts, answers, strict=True) if answer is None]


def _now_us() -> int:
    return time_ns() // 1_000


def check_receipt(receipt: object) -> Receipt:
    """Return a receipt, or raise `InvalidRequest` if no delivery can have it."""
    if (
        type(receipt) is Receipt
        and type(receipt.message) is bytes
        and type(receipt.delivery) is int
        and type(receipt.epoch) is int
        and len(receipt.message) == STREAM_BYTES
        and 0 <= receipt.delivery <= MAX_INT
        and 0 <= receipt.epoch <= MAX_INT
    ):
        return receipt
    if isinstance(receipt, str):
        raise InvalidRequest("A receipt must be of type Receipt, not str; pass read_receipt(text).")
    checked = check_type("A receipt", receipt, Receipt)
    if len(check_type("A receipt's message", checked.message, bytes)) != STREAM_BYTES:
        raise InvalidRequest(
            f"A receipt's message must have {STREAM_BYTES} bytes; it had {len(checked.message)}."
        )
    check_int("A receipt's delivery", checked.delivery)
    check_int("A receipt's epoch", checked.epoch)
    return checked


async def submit_valid(
    items: Sequence[S],
    check: Callable[[S], T],
    submit: Callable[[list[T]], Awaitable[Sequence[A]]],
) -> list[A | Rejected]:
    """Submit the valid items together, and return an answer for each item, in their order.

    Arguments:
        check: returns what to submit for an item, or raises Rejected, which is its answer.
        submit: returns an answer for each submitted item; not called without any.
    """
    valid: list[T] = []
    refused: dict[int, Rejected] = {}
    for index, item in enumerate(items):
        try:
            valid.append(check(item))
        except Rejected as refusal:
            refused[index] = refusal
    answers = await submit(valid) if valid else ()
    if not refused:
        return list(answers)
    others = iter(answers)
    return [refused[index] if index in refused else next(others) for index in range(len(items))]


MAX_REASON_CHARS = 1_000
"""Maximum length of the stored reason of a NACK; the rest is cut off."""


def check_results(receipts: object, results: object) -> dict[Receipt, MessageResult]:
    """Return the results of acks by receipt; of a receipt that occurs several times, the first one.

    Raises: InvalidRequest unless there is a result or None for each receipt.
    """
    items, checked = check_items("receipts", receipts), dict[Receipt, MessageResult]()
    values = check_items("results", results)
    if len(values) != len(items):
        raise InvalidRequest(
            f"results must have one item for each of the {len(items)} receipts, a result or None; it had "
            f"{len(values)}."
        )
    for receipt, each in zip(items, values, strict=True):
        if each is not None:
            result = check_type("A result", each, MessageResult)
            check_type("The payload of a result", result.payload, bytes)
            check_optional_text("The content_type of a result", result.content_type)
            with suppress(InvalidRequest):  # which is the answer for this receipt
                checked.setdefault(check_receipt(receipt), result)
    return checked


def with_results(
    ack: Callable[..., Awaitable[list[Rejected | None]]], results: Mapping[Receipt, MessageResult]
) -> Callable[[Sequence[Receipt]], Awaitable[list[Rejected | None]]]:
    """Return a function that acks receipts with their results; see `Mailbox.ack_messages`."""
    if not results:
        return ack
    return lambda receipts: ack(receipts, results=[results.get(each) for each in receipts])


class AckMessages:
    """Handler that settles deliveries; acks are final and idempotent (svc-mailbox I-3)."""

    def __init__(self, owner: MailboxOwner, windows: DeliveryWindows | None = None) -> None:
        """Initialise with the owner, and the windows of the streams that learn of settlements."""
        self._owner = owner
        self._windows = windows or DeliveryWindows()

    async def __call__(
        self, receipts: Sequence[Receipt], *, results: Sequence[MessageResult | None] | None = None
    ) -> list[Rejected | None]:
        """Ack deliveries by their receipts.

        Arguments:
            results: see `Mailbox.ack_messages`.

        Returns: for each, None if it is settled, else the error: StaleReceipt when the message was delivered
            again or is dead, NotFound when it is unknown, FrameTooLarge for a result above the limit,
            InvalidRequest for an invalid receipt.
        Raises: InvalidRequest for an argument of a wrong type or out of range, Saturated when too many
            commands are pending, Unavailable when the outcome is unknown.
        """
        by_receipt = {} if results is None else check_results(receipts, results)

        def ack(receipt: Receipt) -> Ack:
            result = by_receipt.get(receipt)
            return Ack(receipt) if result is None else Ack(receipt, None, *msgspec.structs.astuple(result))

        return await _settle(ACK, self._owner, receipts, ack if by_receipt else Ack, self._windows.settle)


class NackMessages:
    """Handler that fails deliveries: each is retried after a backoff, or dead-lettered (svc-mailbox P-7)."""

    def __init__(
        self,
        owner: MailboxOwner,
        jitter: Callable[[], float] = random.random,
        windows: DeliveryWindows | None = None,
    ) -> None:
        """Initialise with the owner, a generator of uniform random numbers in [0, 1), and windows."""
        self._owner = owner
        self._jitter = jitter
        self._windows = windows or DeliveryWindows()

    async def __call__(
        self,
        receipts: Sequence[Receipt],
        *,
        reason: str | None = None,
        delay_ms: int | None = None,
        action: NackAction = "retry",
        traceback: str | None = None,
    ) -> list[Rejected | None]:
        """Give deliveries back by their receipts; see `Mailbox.nack_messages`."""
        options = check_nack(reason, delay_ms, action, traceback)
        content = None if options.traceback is None else options.traceback.encode()
        return await _settle(
            NACK,
            self._owner,
            receipts,
            lambda receipt: Nack(
                receipt, self._jitter(), options.reason, options.delay_ms, None, options.action, content
            ),
            self._windows.settle,
        )


class ExtendVisibility:
    """Handler that extends visibility timeouts, within the in-flight retention (svc-mailbox P-9)."""

    def __init__(self, owner: MailboxOwner, windows: DeliveryWindows | None = None) -> None:
        """Initialise with the owner, and the windows of the streams that learn of extensions."""
        self._owner = owner
        self._windows = windows or DeliveryWindows()

    async def __call__(self, receipts: Sequence[Receipt], visibility_ms: int) -> list[Rejected | None]:
        """Hide the messages for `visibility_ms` from now on.

        Returns, Raises: as `AckMessages`.
        """
        check_visibility(visibility_ms)
        return await _settle(
            EXTEND,
            self._owner,
            receipts,
            lambda receipt: Extend(receipt, visibility_ms),
            lambda extended: self._windows.extend(extended, visibility_ms),
        )


class Settler(NamedTuple):
    """Handlers that settle the messages received from an owner."""

    ack_messages: AckMessages
    nack_messages: NackMessages
    extend_visibility: ExtendVisibility


def make_settler(owner: MailboxOwner, windows: DeliveryWindows) -> Settler:
    """Return the handlers that end or extend deliveries, and tell the windows of streams."""
    return Settler(
        AckMessages(owner, windows), NackMessages(owner, windows=windows), ExtendVisibility(owner, windows)
    )


class NackOptions(NamedTuple):
    """The arguments of a NACK besides its receipts; see `Mailbox.nack_messages`."""

    reason: str | None = None
    delay_ms: int | None = None
    action: NackAction = "retry"
    traceback: str | None = None


def check_nack(
    reason: object = None, delay_ms: object = None, action: object = "retry", traceback: object = None
) -> NackOptions:
    """Return the arguments of a NACK, the reason as it is stored, or raise InvalidRequest."""
    if type(action) is not str or action not in NACK_ACTIONS:
        raise InvalidRequest(f"action must be one of {', '.join(NACK_ACTIONS)}.")
    if delay_ms is not None:
        delay_ms = check_int("delay_ms", delay_ms, 0, MAX_DURATION_MS)
        if action == "reject":
            raise InvalidRequest("delay_ms must be absent with the action reject, as nothing is retried.")
    stored = None if reason is None else check_any_text("reason", reason)[:MAX_REASON_CHARS]
    text = None if traceback is None else check_any_text("traceback", traceback)
    return NackOptions(stored, delay_ms, action, text)


def limit_tracebacks(commands: Sequence[Command], most: int) -> Sequence[Command]:
    """Return commands with tracebacks up to a limit in bytes; longer ones lose their middle."""
    return [
        msgspec.structs.replace(each, traceback=_limit(each.traceback, most))
        if type(each) is Nack and each.traceback is not None
        else each
        for each in commands
    ]


OMISSION = b"\n...\n"


def _limit(text: bytes, most: int) -> bytes | None:
    if len(text) <= most:
        return text or None
    half = (most - len(OMISSION)) // 2
    shorter = text[:half] + OMISSION + text[-half:] if half > 0 else text[:most]
    return shorter.decode(errors="ignore").encode() or None  # without a character that was cut


async def _settle(
    operation: MessagingOperation,
    owner: MailboxOwner,
    receipts: object,
    command: Callable[[Receipt], Command],
    note: Callable[[list[Receipt]], None],
) -> list[Rejected | None]:
    """Submit a command for each receipt, and note the receipts that were valid."""

    async def submit(valid: list[Receipt]) -> list[Rejected | None]:
        answers = await owner.submit(list(map(command, valid)))
        note(valid)
        return [answer if isinstance(answer, Rejected) else None for answer in answers]

    items = check_items("receipts", receipts)
    with tracer().span(operation, count=len(items)):
        return await submit_valid(items, check_receipt, submit)
