"""What the machine asks of a mailbox: how to ask the real one, and how to tell the model its answer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from postroom.application.mailbox.administer import (
    PauseTopic,
    PurgeTopic,
    RedriveDeadLetters,
    ResumeTopic,
    SetTopicPolicy,
)
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.mailbox.message_factory import MessageFactory
from postroom.application.mailbox.receive import ReceiveMessages
from postroom.application.mailbox.send import SendMessage
from postroom.application.mailbox.settle import AckMessages, ExtendVisibility, NackMessages
from postroom.application.messages import NewMessage
from postroom.application.redrive.message_changes import MessageChanges
from postroom.domain.message import MessageReceived, NackAction, OnConflict, Receipt
from postroom.domain.policy import TopicPolicy
from postroom.domain.record import Record
from tests.simulation.model import Model
from tests.simulation.model_state import UNKNOWN


class Changes(MessageChanges):
    def __init__(self, engine: MailboxEngine) -> None:
        self._engine = engine


class Room:
    """The handlers of one process, with everything random in the hands of the test."""

    def __init__(self, engine: MailboxEngine, wall: Callable[[], int]) -> None:
        self.engine = engine
        self.factory = lambda id_: MessageFactory(engine.log.mailbox, wall, lambda: UUID(id_))
        self.receive = ReceiveMessages(engine)
        self.ack = AckMessages(engine)
        self.extend = ExtendVisibility(engine)
        self.redrive = RedriveDeadLetters(engine)
        self.purge = PurgeTopic(engine)
        self.changes = Changes(engine)
        self.set_policy = SetTopicPolicy(engine)
        self.pause = PauseTopic(engine)
        self.resume = ResumeTopic(engine)


class Receipts:
    """Number the deliveries, so that the model needs not know what a receipt is."""

    def __init__(self) -> None:
        self._all: list[Receipt] = []

    def number(self, receipt: Receipt) -> int:
        self._all.append(receipt)
        return len(self._all) - 1

    def __getitem__(self, number: int) -> Receipt:
        return self._all[number]


@dataclass(frozen=True)
class Operation:
    """One command. `ask` calls the handler; `tell` checks its answer and has the model follow."""

    async def ask(self, room: Room, receipts: Receipts) -> Any:
        raise NotImplementedError

    def tell(self, model: Model, answer: Any) -> None:
        raise NotImplementedError

    def look_up(self, model: Model, receipts: Receipts, written: list[Record]) -> Any:
        """Return what the answer would have been, from the records that this group of commands wrote."""
        return UNKNOWN


@dataclass(frozen=True)
class Send(Operation):
    id: str
    topic: str
    payload: bytes
    idem_key: str | None = None
    sticky_key: str | None = None
    deliver_after_ms: int = 0
    ttl_seconds: int = 0
    has_external_id: bool = False
    priority: int = 5
    unique_key: str | None = None
    on_conflict: OnConflict = "keep"

    async def ask(self, room: Room, receipts: Receipts) -> Any:
        new = NewMessage(
            topic=self.topic,
            payload=self.payload,
            idem_key=self.idem_key,
            sticky_key=self.sticky_key,
            deliver_after_ms=self.deliver_after_ms,
            ttl_seconds=self.ttl_seconds,
            message_id=self.id if self.has_external_id else None,
            priority=self.priority,
            unique_key=self.unique_key,
            on_conflict=self.on_conflict,
        )
        sent = await SendMessage(room.engine, room.factory(self.id))(new)
        return ("sent", sent.message_id, sent.duplicate)

    def tell(self, model: Model, answer: Any) -> None:
        if answer != UNKNOWN:
            model.send(self, answer)

    def look_up(self, model: Model, receipts: Receipts, written: list[Record]) -> Any:
        stored = any(r.type == "MessageSent" and str(UUID(bytes=r.stream)) == self.id for r in written)
        if not stored and self.on_conflict == "reschedule":
            changed = [str(UUID(bytes=r.stream)) for r in written if r.type == "MessageRescheduled"]
            holders = [id_ for id_ in changed if model.messages[id_].unique_key == self.unique_key]
            return ("sent", holders[0], True) if holders else UNKNOWN
        return ("sent", self.id, False) if stored else UNKNOWN


@dataclass(frozen=True)
class Receive(Operation):
    topic: str
    max_messages: int
    max_bytes: int
    visibility_ms: int
    consumer: str

    async def ask(self, room: Room, receipts: Receipts) -> Any:
        got = await room.receive(
            self.topic,
            max_messages=self.max_messages,
            max_bytes=self.max_bytes,
            visibility_ms=self.visibility_ms,
            consumer=self.consumer,
        )
        return [(receipts.number(m.receipt), m.message_id, m.attempt, m.payload, m.shard) for m in got]

    def tell(self, model: Model, answer: Any) -> None:
        if answer != UNKNOWN:
            model.receive(self, answer)

    def look_up(self, model: Model, receipts: Receipts, written: list[Record]) -> Any:
        got = []
        for record in written:
            event = record.event
            if isinstance(event, MessageReceived) and event.consumer == self.consumer:
                message = model.messages[str(UUID(bytes=event.stream))]
                number = receipts.number(Receipt(event.stream, event.version, record.epoch))
                got.append((number, message.id, event.attempt, message.payload, message.shard))
        return got or UNKNOWN


@dataclass(frozen=True)
class Ack(Operation):
    number: int

    async def ask(self, room: Room, receipts: Receipts) -> Any:
        (answer,) = await room.ack([receipts[self.number]])
        return answer

    def tell(self, model: Model, answer: Any) -> None:
        model.ack(self.number, answer)


@dataclass(frozen=True)
class Nack(Operation):
    number: int
    reason: str | None = None
    delay_ms: int | None = None
    jitter: float = 0.5
    action: NackAction = "retry"

    async def ask(self, room: Room, receipts: Receipts) -> Any:
        nack = NackMessages(room.engine, lambda: self.jitter)
        options = {"reason": self.reason, "delay_ms": self.delay_ms, "action": self.action}
        (answer,) = await nack([receipts[self.number]], **options)  # type: ignore[arg-type] # of several types
        return answer

    def tell(self, model: Model, answer: Any) -> None:
        model.nack(self.number, self, answer)


@dataclass(frozen=True)
class Extend(Operation):
    number: int
    visibility_ms: int

    async def ask(self, room: Room, receipts: Receipts) -> Any:
        (answer,) = await room.extend([receipts[self.number]], self.visibility_ms)
        return answer

    def tell(self, model: Model, answer: Any) -> None:
        model.extend(self.number, self, answer)


@dataclass(frozen=True)
class Cancel(Operation):
    id: str

    async def ask(self, room: Room, receipts: Receipts) -> Any:
        (change,) = await room.changes.cancel_messages([self.id], reason="a test")
        return change.outcome

    def tell(self, model: Model, answer: Any) -> None:
        model.cancel(self, answer)


@dataclass(frozen=True)
class Reschedule(Operation):
    id: str
    deliver_after_ms: int

    async def ask(self, room: Room, receipts: Receipts) -> Any:
        (change,) = await room.changes.reschedule_messages([self.id], deliver_after_ms=self.deliver_after_ms)
        return change.outcome

    def tell(self, model: Model, answer: Any) -> None:
        model.reschedule(self, answer)


@dataclass(frozen=True)
class Redrive(Operation):
    topic: str
    limit: int

    async def ask(self, room: Room, receipts: Receipts) -> Any:
        return await room.redrive(self.topic, limit=self.limit)

    def tell(self, model: Model, answer: Any) -> None:
        model.redrive(self, answer)


@dataclass(frozen=True)
class Purge(Operation):
    topic: str
    dead: bool
    ready: bool

    async def ask(self, room: Room, receipts: Receipts) -> Any:
        return await room.purge(self.topic, dead=self.dead, ready=self.ready)

    def tell(self, model: Model, answer: Any) -> None:
        model.purge(self, answer)


@dataclass(frozen=True)
class SetPolicy(Operation):
    topic: str
    policy: TopicPolicy

    async def ask(self, room: Room, receipts: Receipts) -> Any:
        return await room.set_policy(self.topic, self.policy)

    def tell(self, model: Model, answer: Any) -> None:
        model.set_policy(self, answer)


@dataclass(frozen=True)
class Pause(Operation):
    topic: str

    async def ask(self, room: Room, receipts: Receipts) -> Any:
        return await room.pause(self.topic)

    def tell(self, model: Model, answer: Any) -> None:
        model.pause(self, answer)


@dataclass(frozen=True)
class Resume(Operation):
    topic: str

    async def ask(self, room: Room, receipts: Receipts) -> Any:
        return await room.resume(self.topic)

    def tell(self, model: Model, answer: Any) -> None:
        model.resume(self, answer)
