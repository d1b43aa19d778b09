"""Settlements and redrive jobs under a capability."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import cast
from uuid import UUID

import msgspec

from postroom.application.access.audit import ALLOWED, Auditor, audit_refusals
from postroom.application.access.guard import Deliveries, Guard
from postroom.application.caller import Caller, call_as
from postroom.application.mailbox.settle import (
    DeliveryWindows,
    NackOptions,
    check_receipt,
    check_results,
    with_results,
)
from postroom.application.messages import MessageResult
from postroom.application.operations.mailbox import Mailbox
from postroom.application.operations.operation import Arguments, Operation
from postroom.application.page import Page
from postroom.application.query_results import MessageChange, Outcome, RedrivePreview
from postroom.application.reports import RedriveMessage, RedriveReport
from postroom.domain.arguments import check_items
from postroom.domain.capability.access import uncovered_topic
from postroom.domain.capability.rights import Right
from postroom.domain.errors import Forbidden, InvalidRequest, NotFound, Rejected, StaleReceipt
from postroom.domain.message import NackAction, Receipt
from postroom.domain.names import job_of_topics, message_id
from postroom.domain.redrive.spec import JobAction, RedriveSpec

US_PER_MS = 1_000
Settle = Callable[[list[Receipt]], Awaitable[list[Rejected | None]]]


class AuthorizedSettlements(Mailbox):
    """The settlements of `AuthorizedMailbox`.

    Messages that the capability received can be acked and nacked after it has expired or was revoked, until
    the visibility timeout ends. The log records who received a message; the audit log records refusals, and
    who settled a message that another capability received.
    """

    _mailbox: Mailbox
    _guard: Guard
    _auditor: Auditor
    _deliveries: Deliveries
    _windows: DeliveryWindows
    _wall: Callable[[], int]

    @audit_refusals(Right.ACK)
    async def ack_messages(
        self, receipts: Sequence[Receipt], /, *, results: Sequence[MessageResult | None] | None = None
    ) -> list[Rejected | None]:
        ack: Settle = self._mailbox.ack_messages
        if results is not None:
            ack = with_results(ack, check_results(receipts, results))
        return await self._settle(Right.ACK, receipts, ack)

    @audit_refusals(Right.NACK)
    async def nack_messages(
        self,
        receipts: Sequence[Receipt],
        /,
        *,
        reason: str | None = None,
        delay_ms: int | None = None,
        action: NackAction = "retry",
        traceback: str | None = None,
    ) -> list[Rejected | None]:
        options = NackOptions(reason, delay_ms, action, traceback)
        settle = partial(self._mailbox.nack_messages, **options._asdict())
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
        """Record refusals, and settlements of messages that others received; the log has who received it."""
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
    """Submit the settlements that are not refused; return an answer for each item."""
    allowed = [item for item, refusal in zip(items, refusals, strict=True) if refusal is None]
    answers = iter(await submit(cast(list[Receipt], allowed)) if allowed or not items else ())
    return [next(answers) if refusal is None else refusal for refusal in refusals]


_NO_CRITERIA = ("action", "topics", "rate", "delay_ms", "limit", "at", "note")


class AuthorizedRedrives(Mailbox):
    """The redrive jobs of `AuthorizedMailbox`, and its changes of messages; all calls but lists are audited.

    Jobs that redrive need the right `redrive`, other jobs `admin`. Criteria of headers and keys need
    `read-headers`; words, which may be in payloads, need `read-payload`; jobs that send copies also need
    `send`. A capability that is limited to topics must name topics, or globs, and a destination that it
    covers; it sees only jobs on such topics. Like a message id, the id that it gives a job is unique only on
    these topics: the mailbox knows the job by another id.
    """

    _mailbox: Mailbox
    _guard: Guard
    _auditor: Auditor
    caller: Caller

    async def _preview_redrive(self, operation: Operation, arguments: Arguments) -> RedrivePreview:
        spec = arguments["spec"]
        return await self._auditor.run(
            Right.READ_HEADERS,
            partial(self._preview, spec),
            lambda preview: preview.matched,
            topics=spec.topics,
            criteria=_criteria(spec),
        )

    async def _start_redrive(self, operation: Operation, arguments: Arguments) -> RedriveReport:
        """Start a job in the name of the capability's principal."""
        spec = arguments["spec"]
        return await self._auditor.run(
            _right_of(spec),
            partial(self._start, **arguments),
            lambda report: report.matched,
            topics=spec.topics,
            criteria=_criteria(spec),
        )

    @audit_refusals(Right.REDRIVE)
    async def list_redrives(self) -> list[RedriveReport]:
        await self._guard.check(Right.REDRIVE)
        self._guard.charge()
        return [each for each in await self._mailbox.list_redrives() if self._covers(each.spec)]

    @audit_refusals(Right.REDRIVE)
    async def get_redrive(self, job_id: str, /) -> RedriveReport:
        await self._guard.check(Right.REDRIVE)
        self._guard.charge()
        return await self._find(job_id)

    @audit_refusals(Right.REDRIVE)
    async def list_redrive_messages(
        self, job_id: str, /, *, outcome: Outcome | None = None, cursor: str | None = None, limit: int = 100
    ) -> Page[RedriveMessage]:
        await self._guard.check(Right.REDRIVE)
        self._guard.charge()
        await self._find(job_id)
        return await self._mailbox.list_redrive_messages(
            job_id, outcome=outcome, cursor=cursor, limit=self._guard.at_most(limit)
        )

    async def _change_messages(self, operation: Operation, arguments: Arguments) -> list[MessageChange]:
        """Change messages of covered topics by their ids; others are unknown to the capability."""
        ids = arguments["ids"]

        async def change() -> list[MessageChange]:
            await self._guard.check(Right.ADMIN)
            if (most := self._guard.at_most(len(ids))) < len(ids):
                raise Forbidden(f"The capability covers {most} messages a call; change fewer.", "messages")
            self._guard.charge(len(ids))
            with call_as(self.caller):
                return cast(
                    list[MessageChange],
                    await operation.ask(
                        self._mailbox, {**arguments, "principal": self._guard.access.principal}
                    ),
                )

        return await self._auditor.run(
            Right.ADMIN,
            change,
            lambda changes: sum(each.outcome == "changed" for each in changes),
            target=ids[0] if len(ids) == 1 else "",
            criteria=(operation.name,),
        )

    _cancel_messages = _reschedule_messages = _change_messages

    async def _change_redrive(self, operation: Operation, arguments: Arguments) -> RedriveReport:
        job_id = arguments["job_id"]
        return await self._auditor.run(
            Right.REDRIVE,
            partial(self._change, job_id, arguments["action"]),
            lambda report: report.matched,
            target=job_id,
        )

    async def _preview(self, spec: RedriveSpec) -> RedrivePreview:
        await self._guard.check(Right.READ_HEADERS, Right.ADMIN if spec.selects_waiting else Right.REDRIVE)
        self._check_selection(spec)
        return await self._mailbox.preview_redrive(spec)

    async def _start(
        self,
        spec: RedriveSpec,
        job_id: str | None,
        cutoff: int | None,
        previewed: int | None,
        principal: str | None,
    ) -> RedriveReport:
        await self._guard.check(_right_of(spec))
        self._check_selection(spec)
        most = self._guard.access.max_messages
        if most is not None:
            spec = msgspec.structs.replace(spec, limit=min(most, spec.limit or most))
        principal = self._guard.access.principal
        if job_id is not None and not self._guard.covers_all_topics:
            job_id = job_of_topics(self._guard.mailbox, job_id, spec.topics)
        return await self._mailbox.start_redrive(
            spec, job_id=job_id, cutoff=cutoff, previewed=previewed, principal=principal
        )

    async def _change(self, job_id: str, action: JobAction) -> RedriveReport:
        await self._guard.check(Right.REDRIVE)
        self._guard.charge()
        spec = (await self._find(job_id)).spec
        self._guard.check_operation(_right_of(spec))
        self._check_copies(spec)
        return await self._mailbox.change_redrive(job_id, action, principal=self._guard.access.principal)

    async def _find(self, job_id: str) -> RedriveReport:
        """Return a job; for an unknown job the answer is the same as for one on other topics."""
        try:
            report = await self._mailbox.get_redrive(job_id)
        except NotFound:
            if self._guard.covers_all_topics:
                raise
            raise uncovered_topic() from None
        if not self._covers(report.spec):
            raise uncovered_topic()
        return report

    def _check_selection(self, spec: RedriveSpec) -> None:
        if spec.needs_log or spec.keys:
            self._guard.check_operation(Right.READ_HEADERS)
        if spec.match is not None:
            self._guard.check_operation(Right.READ_PAYLOAD)
        if not spec.topics:
            self._guard.check_all_topics()
        # The text of a glob is covered only if everything that it matches is.
        self._guard.check_topics(spec.topics)
        self._check_copies(spec)
        self._guard.charge()

    def _check_copies(self, spec: RedriveSpec) -> None:
        """Check that the capability covers sends to the topic of the copies; its own has been checked."""
        if spec.sends_copies:
            self._guard.check_operation(Right.SEND)
        if spec.destination is not None:
            self._guard.check_topics((spec.destination,))

    def _covers(self, spec: RedriveSpec) -> bool:
        """Return whether the capability covers all topics from which a job selects."""
        if self._guard.covers_all_topics:
            return True
        return bool(spec.topics) and all(map(self._guard.covers, spec.topics))


def _right_of(spec: RedriveSpec) -> Right:
    """Return the right that a job needs."""
    return Right.REDRIVE if spec.action == "redrive" else Right.ADMIN


def _criteria(spec: RedriveSpec) -> list[str]:
    """Return the names of the criteria of a selection, for the audit log."""
    fields = msgspec.structs.asdict(spec)
    criteria = {name: value for name, value in fields.items() if name not in _NO_CRITERIA}
    return [name for name, value in criteria.items() if value not in (None, (), {})]
