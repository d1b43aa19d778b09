"""`AuthorizedMailbox`: a mailbox as the bearer of one capability may use it (svc-mailbox I-8, I-15)."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import cast
from uuid import UUID

from postroom.application.access.auditor import Auditor
from postroom.application.access.deliveries import Deliveries
from postroom.application.access.guard import Guard
from postroom.application.access.reads import AuthorizedReads
from postroom.application.access.redrives import AuthorizedRedrives
from postroom.application.delivery_window import DeliveryWindows
from postroom.application.mailbox.stream import StreamMessages
from postroom.application.message_stream import HEARTBEAT_MS, MessageStream
from postroom.application.messages import NewMessage, ReceivedMessage, Sent, check_receipt
from postroom.application.ports.mailbox import Mailbox
from postroom.application.service import Search
from postroom.domain.arguments import check_items
from postroom.domain.capability.access import uncovered_topic
from postroom.domain.capability.rights import Operation
from postroom.domain.errors import Forbidden, InvalidRequest, NotFound, Rejected, StaleReceipt
from postroom.domain.message import Receipt
from postroom.domain.names import check_topic
from postroom.domain.policy import DEFAULT_MAX_BYTES, DEFAULT_MAX_MESSAGES, TopicPolicy

US_PER_MS = 1_000
Settle = Callable[[list[Receipt]], Awaitable[list[Rejected | None]]]


class AuthorizedMailbox(AuthorizedRedrives, AuthorizedReads):
    """`Mailbox` that checks each call against a capability before the mailbox itself gets it.

    A capability that is limited to topics gets the same answer for what does not exist as for what is of
    another topic. What it received can be acked and nacked after it has expired or was revoked, until the
    visibility timeout ends. Acks and nacks are not charged to quotas.

    Arguments:
        mailbox: the mailbox, which permits everything.
        deliveries, windows: of all capabilities on the mailbox.
        wall: the wall clock in µs since 1970 UTC.
        search: searches what the capability covers.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        guard: Guard,
        auditor: Auditor,
        deliveries: Deliveries,
        windows: DeliveryWindows,
        wall: Callable[[], int],
        search: Search,
    ) -> None:
        super().__init__(mailbox, guard, auditor, search)
        self._deliveries = deliveries
        self._wall = wall
        self._windows = windows

    @property
    def name(self) -> str:
        """Return the name of the mailbox."""
        return self._mailbox.name

    async def send_message(self, message: NewMessage, /) -> Sent:
        """Send a message; see `Mailbox.send_message`."""
        await self._guard.check(Operation.SEND)
        if isinstance(message, NewMessage):
            self._begin_send(message)
        return await self._mailbox.send_message(message)

    async def send_batch(self, messages: Sequence[NewMessage], /) -> list[Sent | Rejected]:
        """Send messages; those that are not covered are refused alone; see `Mailbox.send_batch`."""
        await self._guard.check(Operation.SEND)
        items = check_items("messages", messages)
        most = self._guard.at_most(len(items))
        answers: list[Sent | Rejected | None] = [None] * len(items)
        for index, item in enumerate(items):
            try:
                if index >= most:
                    raise Forbidden(f"The capability covers {most} messages a call; send fewer.", "messages")
                if isinstance(item, NewMessage):
                    self._begin_send(item)
            except Rejected as refusal:
                answers[index] = refusal
        allowed = [item for item, answer in zip(items, answers, strict=True) if answer is None]
        results = iter(await self._mailbox.send_batch(cast(list[NewMessage], allowed)) if allowed else ())
        return [next(results) if answer is None else answer for answer in answers]

    async def receive_messages(
        self,
        topic: str | Sequence[str],
        /,
        *,
        max_messages: int = DEFAULT_MAX_MESSAGES,
        max_bytes: int = DEFAULT_MAX_BYTES,
        visibility_ms: int | None = None,
        consumer: str | None = None,
        wait_ms: int = 0,
    ) -> list[ReceivedMessage]:
        """Receive messages; see `Mailbox.receive_messages`."""
        await self._guard.check(Operation.RECV)
        topics = self._check_topics(topic)
        self._guard.charge()
        received = await self._mailbox.receive_messages(
            topics,
            max_messages=self._guard.at_most(max_messages),
            max_bytes=max_bytes,
            visibility_ms=visibility_ms,
            consumer=consumer,
            wait_ms=wait_ms,
        )
        if received and wait_ms and not await self._guard.is_valid():
            # It became invalid during the wait, so others get the messages.
            await self._mailbox.nack_messages(
                [each.receipt for each in received], reason="the capability became invalid", delay_ms=0
            )
            self._guard.check_validity()
        messages = [ReceivedMessage(each.delivery, self) for each in received]
        self._deliveries.add(self._guard.access.nonce, messages, self._wall())
        self._guard.count_bytes(len(each.delivery.envelope) for each in messages)
        return messages

    def stream_messages(
        self,
        topic: str | Sequence[str],
        /,
        *,
        max_messages: int = DEFAULT_MAX_MESSAGES,
        max_bytes: int = DEFAULT_MAX_BYTES,
        visibility_ms: int | None = None,
        consumer: str | None = None,
        heartbeat_ms: int = HEARTBEAT_MS,
        wait_ms: int | None = None,
    ) -> AbstractAsyncContextManager[MessageStream]:
        """Receive messages for the length of a context; see `Mailbox.stream_messages`.

        When the capability expires or is revoked, the stream ends; what it delivered can still be settled.
        """
        stream = StreamMessages(self._receive_for_stream, self._return_messages, self._windows)
        return stream(
            topic,
            max_messages=self._guard.at_most(max_messages),
            max_bytes=max_bytes,
            visibility_ms=visibility_ms,
            consumer=consumer,
            heartbeat_ms=heartbeat_ms,
            wait_ms=wait_ms,
        )

    async def ack_messages(self, receipts: Sequence[Receipt], /) -> list[Rejected | None]:
        """Settle deliveries; see `Mailbox.ack_messages`."""
        return await self._settle(Operation.ACK, receipts, self._mailbox.ack_messages)

    async def nack_messages(
        self, receipts: Sequence[Receipt], /, *, reason: str | None = None, delay_ms: int | None = None
    ) -> list[Rejected | None]:
        """Fail deliveries; see `Mailbox.nack_messages`."""
        settle = partial(self._mailbox.nack_messages, reason=reason, delay_ms=delay_ms)
        return await self._settle(Operation.NACK, receipts, settle)

    async def extend_visibility(
        self, receipts: Sequence[Receipt], visibility_ms: int, /
    ) -> list[Rejected | None]:
        """Hide received messages for longer; see `Mailbox.extend_visibility`."""
        await self._guard.check(Operation.EXTEND)
        self._guard.charge()
        items = check_items("receipts", receipts)
        refusals = [await self._refuse_receipt(each) for each in items]
        answers = await _submit(
            items, refusals, lambda allowed: self._mailbox.extend_visibility(allowed, visibility_ms)
        )
        # Only a receipt can be extended.
        extended = cast(
            list[Receipt], [each for each, answer in zip(items, answers, strict=True) if answer is None]
        )
        self._windows.extend(extended, visibility_ms)
        for receipt in extended:
            self._deliveries.extend(receipt, self._wall() + visibility_ms * US_PER_MS)
        return answers

    async def redrive_dead_letters(
        self,
        topic: str,
        /,
        *,
        limit: int = 100,
        reason: str | None = None,
        message_ids: Sequence[str] | None = None,
    ) -> int:
        """Redrive dead letters of a topic; see `Mailbox.redrive_dead_letters`."""
        await self._begin(Operation.REDRIVE, topic)
        return await self._mailbox.redrive_dead_letters(
            topic, limit=self._guard.at_most(limit), reason=reason, message_ids=message_ids
        )

    async def purge_topic(self, topic: str, /, *, dead: bool = True, ready: bool = False) -> int:
        """Remove messages of a topic; see `Mailbox.purge_topic`."""
        await self._begin(Operation.ADMIN, topic)
        return await self._mailbox.purge_topic(topic, dead=dead, ready=ready)

    async def set_topic_policy(self, topic: str, policy: TopicPolicy, /) -> None:
        """Set the policy of a topic; see `Mailbox.set_topic_policy`."""
        await self._begin(Operation.ADMIN, topic)
        await self._mailbox.set_topic_policy(topic, policy)

    async def pause_topic(self, topic: str, /) -> None:
        """Pause a topic; see `Mailbox.pause_topic`."""
        await self._begin(Operation.ADMIN, topic)
        await self._mailbox.pause_topic(topic)

    async def resume_topic(self, topic: str, /) -> None:
        """Resume a topic; see `Mailbox.resume_topic`."""
        await self._begin(Operation.ADMIN, topic)
        await self._mailbox.resume_topic(topic)

    async def delete_old_events(self, older_than: int, /) -> int:
        """Remove settled records of all topics; see `Mailbox.delete_old_events`."""
        await self._guard.check(Operation.ADMIN)
        self._guard.check_all_topics()
        self._guard.charge()
        return await self._mailbox.delete_old_events(older_than)

    async def _begin(self, operation: Operation, topic: str) -> None:
        await self._guard.check(operation)
        self._check_topics(topic)
        self._guard.charge()

    def _begin_send(self, message: NewMessage) -> None:
        self._check_topics(message.topic)
        self._guard.charge(1, _size(message.payload))

    def _check_topics(self, topic: object) -> list[str]:
        """Return topics that are covered; for a capability of all topics, the mailbox checks their names."""
        topics: list[object] = [topic] if isinstance(topic, str) else check_items("topic", topic)
        if not self._guard.covers_all_topics:
            # The exact type, as a subclass of str could match any glob.
            self._guard.check_topics([check_topic(each) for each in topics])
        return topics  # type: ignore[return-value] # the mailbox refuses others

    async def _receive_for_stream(
        self, topic: Sequence[str], *, is_stream: bool, **options: int | str | None
    ) -> list[ReceivedMessage]:
        return await self.receive_messages(topic, **options)  # type: ignore[arg-type] # options of StreamMessages

    async def _return_messages(self, receipts: list[Receipt], *, reason: str, delay_ms: int) -> None:
        """Nack the deliveries that a stream did not settle, if the capability is still valid."""
        if await self._guard.is_valid():
            await self._settle_with(
                receipts, True, partial(self._mailbox.nack_messages, reason=reason, delay_ms=delay_ms)
            )

    async def _settle(
        self, operation: Operation, receipts: Sequence[Receipt], settle: Settle
    ) -> list[Rejected | None]:
        is_valid = await self._guard.is_valid()
        if not is_valid and not self._deliveries.has_any(self._guard.access.nonce):
            self._guard.check_validity()
        self._guard.check_operation(operation)
        return await self._settle_with(check_items("receipts", receipts), is_valid, settle)

    async def _settle_with(
        self, items: Sequence[object], is_valid: bool, settle: Settle
    ) -> list[Rejected | None]:
        refusals = [await self._refuse_receipt(each, is_valid=is_valid) for each in items]
        if items and not is_valid and all(refusals):
            self._guard.check_validity()
        answers = await _submit(items, refusals, settle)
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


def _size(payload: object) -> int:
    return len(payload) if isinstance(payload, bytes) else 0  # the mailbox refuses others


async def _submit(
    items: Sequence[object], refusals: Sequence[Rejected | None], submit: Settle
) -> list[Rejected | None]:
    """Submit what is not refused; return an answer for each item."""
    allowed = [item for item, refusal in zip(items, refusals, strict=True) if refusal is None]
    answers = iter(await submit(cast(list[Receipt], allowed)) if allowed or not items else ())
    return [next(answers) if refusal is None else refusal for refusal in refusals]
