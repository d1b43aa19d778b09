"""Delivery of one message: the handler's response, recorded in the inbox and the dead letters."""

import asyncio
import random
from collections.abc import Callable
from uuid import UUID

import msgspec

from postroom.application.cloudevents.new_message import event_id
from postroom.application.inbox.dead_letters import DeadLetterPublisher
from postroom.application.inbox.request import Unreadable, inbox_id, read_cloud_event, read_request
from postroom.application.outbox.message import MESSAGE_ID
from postroom.application.ports.clock import Clock
from postroom.application.ports.event_handler import EventHandler
from postroom.application.ports.inbox_repository import InboxRepository
from postroom.application.ports.source import SourceMessage
from postroom.application.telemetry import logger, summarize
from postroom.domain.errors import PostroomError
from postroom.domain.inbox import (
    Acknowledge,
    DeliveryPolicy,
    HandlerResult,
    InboxMessage,
    Redeliver,
    RouteToDeadLetter,
    Settlement,
    give_up,
    settle,
)


class Delivery:
    """Delivery of single messages to a handler, with the outcome recorded in inbox and dead letters.

    Arguments:
        stream: messages without an id are identified by their sequence in this stream.
        busy_ms: how long another worker's delivery of a message, while in progress, prevents one here.
    """

    def __init__(
        self,
        inbox: InboxRepository,
        handler: EventHandler,
        dead_letters: DeadLetterPublisher,
        clock: Clock,
        policy: DeliveryPolicy,
        *,
        stream: str,
        busy_ms: int = 0,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._inbox = inbox
        self._handler = handler
        self._dead_letters = dead_letters
        self._clock = clock
        self._policy = policy
        self._stream = stream
        self._busy_ms = busy_ms
        self._jitter = jitter
        self._unrecorded: set[UUID] = set()

    def message_id(self, message: SourceMessage) -> UUID:
        """Return the id of a message in the inbox."""
        return identify(message, self._stream)

    async def deliver(self, message: SourceMessage) -> Settlement:
        """Pass a message to the handler, and return how to settle it.

        When this returns `RouteToDeadLetter`, the dead letter has already been published.

        Raises:
            DuplicateInboxMessage: the message is settled already; acknowledge it.
            PostroomError: the inbox or the dead-letter subject can't be used; ask for redelivery.
        """
        message_id = self.message_id(message)
        # The inbox still regards a delivery that ended here without a record as in progress.
        busy_ms = 0 if message_id in self._unrecorded else self._busy_ms
        self._unrecorded.discard(message_id)
        state = await self._inbox.insert(message_id, message.subject, self._clock.wall(), busy_ms=busy_ms)
        self._unrecorded.add(message_id)
        settlement = give_up(state, self._policy) or settle(
            await call_handler(self._handler, message, message_id),
            state.attempts,
            message.delivered,
            self._policy,
            self._jitter(),
        )
        await self._record(message, state, settlement)
        self._unrecorded.discard(message_id)
        return settlement

    async def dead_letter(self, message: SourceMessage, error: PostroomError) -> None:
        """Dead-letter a message on its last delivery, without a record in the inbox, which is unavailable."""
        settlement = RouteToDeadLetter("max_deliver", str(error))
        await self._publish(message, self.message_id(message), settlement, message.delivered)

    async def _record(self, message: SourceMessage, state: InboxMessage, settlement: Settlement) -> None:
        message_id, now = state.message_id, self._now(state)
        match settlement:
            case Acknowledge():
                await self._inbox.mark_processed(message_id, now)
            case RouteToDeadLetter(reason, error):
                # Published first: if this process is killed in between, the message is delivered again.
                await self._publish(message, message_id, settlement, state.attempts)
                await self._inbox.mark_dead_lettered(message_id, f"{reason}: {error}", now)
            case Redeliver():
                await self._inbox.record_error(message_id, settlement.last_error, now)

    async def _publish(
        self, message: SourceMessage, message_id: UUID, settlement: RouteToDeadLetter, attempts: int
    ) -> None:
        await self._dead_letters.publish(message, str(message_id), settlement, attempts, self._clock.wall())
        logger().warning(
            "inbox.dead_lettered",
            message_id=str(message_id),
            subject=message.subject,
            reason=settlement.reason,  # the last error, which may quote the payload, is in the dead letter
            attempts=attempts,
        )

    def _now(self, message: InboxMessage) -> int:
        # Another worker, whose clock is ahead, may have received it first.
        return max(self._clock.wall(), message.received_at)


async def call_handler(handler: EventHandler, message: SourceMessage, message_id: UUID) -> HandlerResult:
    """Pass a message to its handler and return the result.

    Arguments:
        message_id: used in the request if the message has no id.
    """
    try:
        request = read_request(message)
    except Unreadable as error:
        return HandlerResult("unreadable", str(error))
    if not request.message_id:
        request = msgspec.structs.replace(request, message_id=str(message_id))
    try:
        return await handler.handle(request)
    except (Exception, GeneratorExit, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        logger().exception("inbox.handler_defect", message_id=request.message_id)
        return HandlerResult("failed", summarize(error))


def identify(message: SourceMessage, stream: str) -> UUID:
    """Return the inbox id of a message: of its `Nats-Msg-Id`, or the source and id of a CloudEvent.

    Without a valid one, it is derived from the message's sequence.
    """
    try:
        id_ = message.headers.get(MESSAGE_ID)
        if not id_ and (event := read_cloud_event(message)) is not None:
            id_ = event_id(event.attributes["source"], event.attributes["id"])
        return inbox_id(id_ or f"{stream}/{message.sequence}")
    except Unreadable:
        return inbox_id(f"{stream}/{message.sequence}")
