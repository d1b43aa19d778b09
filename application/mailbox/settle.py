"""Handlers that end or extend deliveries: ack, nack, extend (svc-mailbox C-1)."""

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

from postroom.application.delivery_window import DeliveryWindows
from postroom.application.messages import check_receipt
from postroom.application.ports.event_log import MailboxOwner
from postroom.application.tracing import ACK, EXTEND, NACK, MessagingOperation, tracer
from postroom.domain.arguments import check_any_text, check_int, check_items
from postroom.domain.errors import Rejected
from postroom.domain.mailbox.commands import Ack, Command, Extend, Nack
from postroom.domain.message import Receipt
from postroom.domain.policy import MAX_DURATION_MS, check_visibility

S = TypeVar("S")
T = TypeVar("T")
A = TypeVar("A")


async def submit_valid(
    items: Sequence[S],
    check: Callable[[S], T],
    submit: Callable[[list[T]], Awaitable[Sequence[A]]],
) -> list[A | Rejected]:
    """Submit the valid items together, and return an answer for each item, in their order.

    Arguments:
        check: returns what to submit for an item, or raises Rejected, which is its answer.
        submit: returns an answer for each thing it is given; not called without any.
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


class AckMessages:
    """Handler that settles deliveries; acks are final and idempotent (svc-mailbox I-3)."""

    def __init__(self, owner: MailboxOwner, windows: DeliveryWindows | None = None) -> None:
        """Initialise with the owner, and the windows of the streams that learn of settlements."""
        self._owner = owner
        self._windows = windows or DeliveryWindows()

    async def __call__(self, receipts: Sequence[Receipt]) -> list[Rejected | None]:
        """Ack deliveries by their receipts.

        Returns: for each, None if it is settled, else the error: StaleReceipt when the message was delivered
            again or is dead, NotFound when it is unknown, InvalidRequest for an invalid receipt.
        Raises: InvalidRequest for an argument of a wrong type or out of range, Saturated when too many
            commands are pending, Unavailable when the outcome is unknown.
        """
        return await _settle(ACK, self._owner, receipts, Ack, self._windows.settle)


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
        self, receipts: Sequence[Receipt], *, reason: str | None = None, delay_ms: int | None = None
    ) -> list[Rejected | None]:
        """Nack deliveries by their receipts.

        Arguments:
            reason: the error, stored up to 1,000 characters; the dead letter's `last_error` if this was the
                last attempt.
            delay_ms: delay to use instead of the policy's backoff.

        Returns, Raises: as `AckMessages`.
        """
        error = check_nack(reason, delay_ms)
        return await _settle(
            NACK,
            self._owner,
            receipts,
            lambda receipt: Nack(receipt, self._jitter(), error, delay_ms),
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
    """What settles the messages received from an owner."""

    ack_messages: AckMessages
    nack_messages: NackMessages
    extend_visibility: ExtendVisibility


def make_settler(owner: MailboxOwner, windows: DeliveryWindows) -> Settler:
    """Return the handlers that end or extend deliveries, and tell the windows of streams."""
    return Settler(
        AckMessages(owner, windows), NackMessages(owner, windows=windows), ExtendVisibility(owner, windows)
    )


def check_nack(reason: str | None, delay_ms: int | None) -> str | None:
    """Return the reason of a NACK as it is stored, or raise InvalidRequest."""
    if delay_ms is not None:
        check_int("delay_ms", delay_ms, 0, MAX_DURATION_MS)
    return None if reason is None else check_any_text("reason", reason)[:MAX_REASON_CHARS]


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
