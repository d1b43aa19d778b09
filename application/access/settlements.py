"""`AuthorizedSettlements`: acks, nacks and extensions as the bearer of one capability may make them."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import cast
from uuid import UUID

from postroom.application.access.audit import ALLOWED, Auditor, audit_refusals
from postroom.application.access.guard import Deliveries, Guard
from postroom.application.delivery_window import DeliveryWindows
from postroom.application.messages import check_receipt
from postroom.application.operations.mailbox import Mailbox
from postroom.domain.arguments import check_items
from postroom.domain.capability.access import uncovered_topic
from postroom.domain.capability.rights import Right
from postroom.domain.errors import Forbidden, InvalidRequest, NotFound, Rejected, StaleReceipt
from postroom.domain.message import Receipt
from postroom.domain.names import message_id

US_PER_MS = 1_000
Settle = Callable[[list[Receipt]], Awaitable[list[Rejected | None]]]


class AuthorizedSettlements(Mailbox):
    """The settlements of `AuthorizedMailbox`.

    What the capability received can be acked and nacked after it has expired or was revoked, until the
    visibility timeout ends. The log has who received a message; the audit log has who settled what another
    capability received, and refusals.
    """

    _mailbox: Mailbox
    _guard: Guard
    _auditor: Auditor
    _deliveries: Deliveries
    _windows: DeliveryWindows
    _wall: Callable[[], int]

    @audit_refusals(Right.ACK)
    async def ack_messages(self, receipts: Sequence[Receipt], /) -> list[Rejected | None]:
        return await self._settle(Right.ACK, receipts, self._mailbox.ack_messages)

    @audit_refusals(Right.NACK)
    async def nack_messages(
        self, receipts: Sequence[Receipt], /, *, reason: str | None = None, delay_ms: int | None = None
    ) -> list[Rejected | None]:
        settle = partial(self._mailbox.nack_messages, reason=reason, delay_ms=delay_ms)
        return await self._settle(Right.NACK, receipts, settle)

    @audit_refusals(Right.EXTEND)
    async def extend_visibility(
        self, receipts: Sequence[Receipt], visibility_ms: int, /
    ) -> list[Rejected | None]:
        await self._guard.check(Right.EXTEND)
        self._guard.charge()
        items = check_items("receipts", receipts)
        refusals = [await self._refuse_receipt(each) for each in items]
        others = self._deliveries_of_others(items)
        answers = await _submit(
            items, refusals, lambda allowed: self._mailbox.extend_visibility(allowed, visibility_ms)
        )
        await self._audit_settlement(Right.EXTEND, others, items, answers)
        # Only a receipt can be extended.
        extended = cast(
            list[Receipt], [each for each, answer in zip(items, answers, strict=True) if answer is None]
        )
        self._windows.extend(extended, visibility_ms)
        for receipt in extended:
            self._deliveries.extend(receipt, self._wall() + visibility_ms * US_PER_MS)
        return answers

    async def _return_messages(self, receipts: list[Receipt], *, reason: str, delay_ms: int) -> None:
        """Nack the deliveries that a stream did not settle, if the capability is still valid."""
        if await self._guard.is_valid():
            settle = partial(self._mailbox.nack_messages, reason=reason, delay_ms=delay_ms)
            await self._settle_with(Right.NACK, receipts, True, settle)

    async def _settle(
        self, operation: Right, receipts: Sequence[Receipt], settle: Settle
    ) -> list[Rejected | None]:
        is_valid = await self._guard.is_valid()
        if not is_valid and not self._deliveries.has_any(self._guard.access.nonce):
            self._guard.check_validity()
        self._guard.check_operation(operation)
        return await self._settle_with(operation, check_items("receipts", receipts), is_valid, settle)

    async def _settle_with(
        self, operation: Right, items: Sequence[object], is_valid: bool, settle: Settle
    ) -> list[Rejected | None]:
        refusals = [await self._refuse_receipt(each, is_valid=is_valid) for each in items]
        if items and not is_valid and all(refusals):
            self._guard.check_validity()
        others = self._deliveries_of_others(items)
        answers = await _submit(items, refusals, settle)
        await self._audit_settlement(operation, others, items, answers)
        # Only a receipt can be settled or stale.
        ended = cast(
            list[Receipt],
            [
                item
                for item, answer in zip(items, answers, strict=True)
                if answer is None or isinstance(answer, StaleReceipt)
            ],
        )
        for receipt in ended:
            self._deliveries.settle(receipt)
        self._windows.settle(ended)
        return answers

    def _deliveries_of_others(self, items: Sequence[object]) -> list[bool]:
        """Return for each receipt whether this capability is not known to have received its message."""
        nonce, get = self._guard.access.nonce, self._deliveries.get
        deliveries = [get(each) if isinstance(each, Receipt) else None for each in items]
        return [delivery is None or delivery.nonce != nonce for delivery in deliveries]

    async def _audit_settlement(
        self,
        operation: Right,
        others: Sequence[bool],
        items: Sequence[object],
        answers: Sequence[Rejected | None],
    ) -> None:
        """Record refusals, and settlements of what others received; the log has who received it."""
        forbidden = [item for item, each in zip(items, answers, strict=True) if isinstance(each, Forbidden)]
        settled = [
            item
            for item, answer, is_other in zip(items, answers, others, strict=True)
            if is_other and answer is None
        ]
        for outcome, concerned in ((Forbidden.code, forbidden), (ALLOWED, settled)):
            receipts = [each for each in concerned if isinstance(each, Receipt)]
            if receipts:
                target = message_id(receipts[0].message) if len(receipts) == 1 else ""
                await self._auditor.record(operation, outcome, len(receipts), target=target)

    async def _refuse_receipt(self, item: object, *, is_valid: bool = True) -> Rejected | None:
        """Return the error for a receipt that the capability does not cover; None if the mailbox decides."""
        if is_valid and self._guard.covers_all_topics:
            return None
        try:
            receipt = check_receipt(item)
        except InvalidRequest:
            return None
        delivery = self._deliveries.get(receipt)
        if not is_valid:
            is_own = delivery is not None and delivery.nonce == self._guard.access.nonce
            if delivery is None or not is_own or delivery.due <= self._wall():
                return self._guard.invalidity()
        topic = await self._find_topic(receipt) if delivery is None else delivery.topic
        return None if topic is not None and self._guard.covers(topic) else uncovered_topic()

    async def _find_topic(self, receipt: Receipt) -> str | None:
        """Return the topic of a message that was not delivered under this control; None if it is unknown."""
        try:
            # A stream id written as a UUID is the id of its message, whatever id its sender gave it.
            return (await self._mailbox.get_message(str(UUID(bytes=receipt.message)))).topic
        except NotFound:
            return None


async def _submit(
    items: Sequence[object], refusals: Sequence[Rejected | None], submit: Settle
) -> list[Rejected | None]:
    """Submit what is not refused; return an answer for each item."""
    allowed = [item for item, refusal in zip(items, refusals, strict=True) if refusal is None]
    answers = iter(await submit(cast(list[Receipt], allowed)) if allowed or not items else ())
    return [next(answers) if refusal is None else refusal for refusal in refusals]
