"""A mailbox that another process serves, over any transport."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from datetime import datetime
from functools import partial
from time import time_ns
from typing import TypeVar

from postroom.application.mailbox.batches import MAX_ITEMS, split_batches
from postroom.application.mailbox.message_factory import MessageFactory, NewId
from postroom.application.mailbox.outgoing import send_outgoing
from postroom.application.mailbox.receive import make_receive, record_receive
from postroom.application.mailbox.redrive_client import RedriveClient
from postroom.application.mailbox.settle import check_nack
from postroom.application.mailbox.valid_items import submit_valid
from postroom.application.message_stream import HEARTBEAT_MS, MAX_WAIT_MS, MessageStream, check_stream
from postroom.application.messages import MessageDelivery, NewMessage, ReceivedMessage, Sent, check_receipt
from postroom.application.ports.mailbox_transport import MailboxTransport
from postroom.application.query_results import (
    Backlog,
    DeadLetter,
    Explanation,
    MessageDetail,
    Moment,
    PeekedMessage,
)
from postroom.application.tracing import ACK, EXTEND, NACK, REDRIVE, REMOTE_SEND, Operation, tracer
from postroom.domain.arguments import check_int, check_items, check_optional_text, check_text, check_type
from postroom.domain.errors import MailboxClosed, Rejected, Saturated, Unavailable
from postroom.domain.mailbox.commands import Receive
from postroom.domain.mailbox.counts import TopicSummary
from postroom.domain.mailbox.settings_effects import SettingsPreview
from postroom.domain.message import Receipt
from postroom.domain.names import check_topic
from postroom.domain.policy import DEFAULT_MAX_BYTES, DEFAULT_MAX_MESSAGES, TopicPolicy, check_visibility
from postroom.domain.search import EventFilter, SearchPage, filter_of_mailbox
from postroom.domain.settings import (
    MailboxSettings,
    PolicyChanges,
    SettingsChanges,
    check_changes,
    check_policy_changes,
)

T = TypeVar("T")

MAX_LIMIT = 1_000
JITTER = 0.25
MAX_SILENT_HEARTBEATS = 3


class MailboxClient(RedriveClient):
    """`Mailbox` over a transport.

    A call that is refused for now is repeated after the pause that the server asks for, and one that did not
    reach the server after a second, for as long as the call's time lasts. Sends are safe to repeat: a message
    without an id gets one here. `redrive_dead_letters` and `purge_topic` are not repeated when their outcome
    is unknown.

    Arguments:
        name: the mailbox that the server serves.
        timeout_ms: time for each call, besides the wait for messages.
        new_id: generator of UUIDv7s.
    """

    def __init__(self, transport: MailboxTransport, name: str, timeout_ms: int, new_id: NewId) -> None:
        self._transport = transport
        self._name = name
        self._timeout_ms = timeout_ms
        self._is_closed = False
        self._messages = MessageFactory(name, lambda: 0, new_id)
        self._new_id = new_id

    @classmethod
    @asynccontextmanager
    async def open(
        cls, transport: MailboxTransport, timeout_ms: int, new_id: NewId
    ) -> AsyncIterator["MailboxClient"]:
        """Use the mailbox that the server serves, for as long as the context lasts.

        Raises: Unavailable when the server can't be reached in time.
        """
        name = await cls(transport, "", timeout_ms, new_id)._repeat(transport.get_name)
        client = cls(transport, name, timeout_ms, new_id)
        try:
            yield client
        finally:
            client.close()

    def close(self) -> None:
        """Refuse all later calls."""
        self._is_closed = True

    @property
    def name(self) -> str:
        """Return the name of the mailbox."""
        return self._name

    async def send_message(self, message: NewMessage, /) -> Sent:
        """Send a message; see `Mailbox.send_message`."""
        outgoing = self._messages.prepare(message)
        new = outgoing.message
        with tracer().span(REMOTE_SEND, (new.topic,), message_id=new.message_id):
            return outgoing.result(await self._repeat(lambda: self._transport.send(new)))

    async def send_batch(self, messages: Sequence[NewMessage], /) -> list[Sent | Rejected]:
        """Send messages; see `Mailbox.send_batch`."""
        items = check_items("messages", messages)
        return await send_outgoing(items, self._messages.prepare, self._send)

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
        end = asyncio.get_running_loop().time() + check_int("wait_ms", wait_ms, 0, MAX_WAIT_MS) / 1_000
        topics = (topic,) if isinstance(topic, str) else check_items("topic", topic)
        command = make_receive(topics, max_messages, max_bytes, visibility_ms, consumer)

        def receive() -> Awaitable[list[MessageDelivery]]:
            remaining = end - asyncio.get_running_loop().time()
            return self._transport.receive(command, max(0, int(remaining * 1_000)))

        started_ns = time_ns()
        received = [ReceivedMessage(each, self) for each in await self._repeat(receive, wait_ms)]
        record_receive(received, started_ns)
        return received

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
        """Receive messages for the length of a context; see `Mailbox.stream_messages`."""
        check_stream(max_messages, heartbeat_ms, wait_ms)
        topics = (topic,) if isinstance(topic, str) else check_items("topic", topic)
        command = make_receive(topics, max_messages, max_bytes, visibility_ms, consumer)
        return MessageStream(self._stream(command, heartbeat_ms), max_messages, wait_ms)

    async def ack_messages(self, receipts: Sequence[Receipt], /) -> list[Rejected | None]:
        """Settle deliveries; see `Mailbox.ack_messages`."""
        return await self._settle(ACK, receipts, self._transport.ack)

    async def nack_messages(
        self, receipts: Sequence[Receipt], /, *, reason: str | None = None, delay_ms: int | None = None
    ) -> list[Rejected | None]:
        """Fail deliveries; see `Mailbox.nack_messages`."""
        error = check_nack(reason, delay_ms)
        return await self._settle(NACK, receipts, lambda valid: self._transport.nack(valid, error, delay_ms))

    async def extend_visibility(
        self, receipts: Sequence[Receipt], visibility_ms: int, /
    ) -> list[Rejected | None]:
        """Extend deliveries; see `Mailbox.extend_visibility`."""
        check_visibility(visibility_ms)
        return await self._settle(
            EXTEND, receipts, lambda valid: self._transport.extend(valid, visibility_ms)
        )

    async def redrive_dead_letters(
        self,
        topic: str,
        /,
        *,
        limit: int = 100,
        reason: str | None = None,
        message_ids: Sequence[str] | None = None,
    ) -> int:
        """Redrive dead letters; see `Mailbox.redrive_dead_letters`."""
        check_topic(topic)
        check_int("limit", limit, 1)
        check_optional_text("reason", reason)
        ids = None if message_ids is None else check_items("message_ids", message_ids)
        only = None if ids is None else [_check_id(id_) for id_ in ids]
        with tracer().span(REDRIVE, (topic,)):
            return await self._repeat(
                lambda: self._transport.redrive(topic, limit, reason, only), is_idempotent=False
            )

    async def purge_topic(self, topic: str, /, *, dead: bool = True, ready: bool = False) -> int:
        """Remove messages of a topic; see `Mailbox.purge_topic`."""
        check_topic(topic)
        check_type("dead", dead, bool)
        check_type("ready", ready, bool)
        return await self._repeat(lambda: self._transport.purge(topic, dead, ready), is_idempotent=False)

    async def set_topic_policy(self, topic: str, policy: TopicPolicy | PolicyChanges, /) -> None:
        """Set the policy of a topic; see `Mailbox.set_topic_policy`."""
        check_topic(topic)
        checked = check_policy_changes(policy)
        await self._repeat(lambda: self._transport.set_topic_policy(topic, checked))

    async def get_settings(self) -> MailboxSettings:
        """Return the settings; see `Mailbox.get_settings`."""
        return await self._repeat(self._transport.get_settings)

    async def preview_settings(
        self, changes: SettingsChanges, /, *, replace: bool = False
    ) -> SettingsPreview:
        """Return what a change of settings would do; see `Mailbox.preview_settings`."""
        checked = check_changes(changes), check_type("replace", replace, bool)
        return await self._repeat(lambda: self._transport.preview_settings(*checked))

    async def set_settings(self, changes: SettingsChanges, /, *, replace: bool = False) -> bool:
        """Change the settings; see `Mailbox.set_settings`."""
        checked = check_changes(changes), check_type("replace", replace, bool)
        return await self._repeat(lambda: self._transport.set_settings(*checked))

    async def pause_topic(self, topic: str, /) -> None:
        """Pause a topic; see `Mailbox.pause_topic`."""
        check_topic(topic)
        await self._repeat(lambda: self._transport.pause_topic(topic))

    async def resume_topic(self, topic: str, /) -> None:
        """Resume a topic; see `Mailbox.resume_topic`."""
        check_topic(topic)
        await self._repeat(lambda: self._transport.resume_topic(topic))

    async def delete_old_events(self, older_than: int, /) -> int:
        """Remove settled records; see `Mailbox.delete_old_events`."""
        check_int("older_than", older_than)
        return await self._repeat(lambda: self._transport.delete_old_events(older_than))

    async def get_message(self, id_: str, /) -> MessageDetail:
        """Return a message with its history; see `Mailbox.get_message`."""
        _check_id(id_)
        return await self._repeat(lambda: self._transport.get_message(id_))

    async def explain_message(self, id_: str, /) -> Explanation:
        """Return the explanation of a message; see `Mailbox.explain_message`."""
        _check_id(id_)
        return await self._repeat(lambda: self._transport.explain_message(id_))

    async def get_backlog(self, topic: str | None = None, /, *, at: Moment | None = None) -> Backlog:
        """Return the unsettled messages; see `Mailbox.get_backlog`."""
        check_optional_text("topic", topic)
        _check_moment(at)
        return await self._repeat(lambda: self._transport.get_backlog(topic, at))

    async def list_dead_letters(
        self,
        topic: str | None = None,
        /,
        *,
        reason: str | None = None,
        limit: int = 100,
        cursor: int = 0,
        at: Moment | None = None,
    ) -> list[DeadLetter]:
        """Return a page of dead letters; see `Mailbox.list_dead_letters`."""
        check_optional_text("topic", topic)
        check_optional_text("reason", reason)
        check_int("limit", limit, 1, MAX_LIMIT)
        check_int("cursor", cursor)
        _check_moment(at)
        return await self._repeat(lambda: self._transport.list_dead_letters(topic, reason, limit, cursor, at))

    async def get_topic_policy(self, topic: str, /) -> TopicPolicy:
        """Return the policy of a topic; see `Mailbox.get_topic_policy`."""
        check_topic(topic)
        # Servers before ADR 0098 return none for a topic that has the default policy.
        return await self._repeat(lambda: self._transport.get_topic_policy(topic)) or TopicPolicy()

    async def list_topics(self) -> list[TopicSummary]:
        """Return the topics; see `Mailbox.list_topics`."""
        return await self._repeat(self._transport.list_topics)

    async def peek_messages(self, topic: str, /, *, limit: int = 10) -> list[PeekedMessage]:
        """Return ready messages; see `Mailbox.peek_messages`."""
        check_topic(topic)
        check_int("limit", limit, 1, MAX_LIMIT)
        return await self._repeat(lambda: self._transport.peek_messages(topic, limit))

    async def search_messages(self, filter_: EventFilter, /) -> SearchPage:
        """Return a page of the messages that match; see `Mailbox.search_messages`."""
        checked = filter_of_mailbox(filter_, self._name)
        return await self._repeat(lambda: self._transport.search_messages(checked))

    async def _stream(self, command: Receive, heartbeat_ms: int) -> AsyncIterator[list[ReceivedMessage]]:
        """Yield the deliveries of one stream after the other, while the server can be reached."""
        loop, silence = asyncio.get_running_loop(), MAX_SILENT_HEARTBEATS * heartbeat_ms / 1_000
        deadline: float | None = None
        failure: Saturated | Unavailable = self._closed()
        while not self._is_closed:
            try:
                async with aclosing(self._transport.stream(command, heartbeat_ms)) as batches:
                    while True:
                        async with asyncio.timeout(silence):
                            deliveries = await anext(batches)
                        deadline = None
                        yield [ReceivedMessage(each, self) for each in deliveries]
            except TimeoutError:
                failure = Unavailable(
                    f"A stream of {self._transport.where} was silent for {MAX_SILENT_HEARTBEATS} heartbeats."
                )
            except (Saturated, Unavailable) as error:
                failure = error
            pause = failure.retry_after_ms / 1_000 * random.uniform(1, 1 + JITTER)
            deadline = deadline or loop.time() + self._timeout_ms / 1_000
            if loop.time() + pause >= deadline:
                raise failure
            await asyncio.sleep(pause)
        raise self._closed()

    def _closed(self) -> MailboxClosed:
        return MailboxClosed(f"The connection to {self._transport.where} is closed; connect again.")

    async def _send(self, messages: list[NewMessage]) -> list[Sent | Rejected]:
        """Send messages in batches that fit into a request, and return an answer for each."""
        answers: list[Sent | Rejected] = []
        for batch in split_batches(messages, self._transport.max_batch_bytes):
            try:
                with tracer().span(REMOTE_SEND, (each.topic for each in batch), count=len(batch)):
                    answers += await self._repeat(partial(self._transport.send_batch, batch))
            except Rejected as refusal:
                if len(batch) > 1:
                    raise
                answers.append(refusal)  # a single message may be too large for a request
        return answers

    async def _settle(
        self,
        operation: Operation,
        receipts: Sequence[Receipt],
        settle: Callable[[list[Receipt]], Awaitable[list[Rejected | None]]],
    ) -> list[Rejected | None]:
        async def submit(valid: list[Receipt]) -> list[Rejected | None]:
            results: list[Rejected | None] = []
            for start in range(0, len(valid), MAX_ITEMS):
                some = valid[start : start + MAX_ITEMS]
                results += await self._repeat(partial(settle, some))
            return results

        items = check_items("receipts", receipts)
        with tracer().span(operation, count=len(items)):
            return await submit_valid(items, check_receipt, submit)

    async def _repeat(
        self, call: Callable[[], Awaitable[T]], wait_ms: int = 0, *, is_idempotent: bool = True
    ) -> T:
        """Make a call until it succeeds or is refused for good, for as long as its time lasts.

        Arguments:
            call: one attempt.
            wait_ms: how long the call itself may wait for messages.
            is_idempotent: repeat it although its outcome is unknown.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self._timeout_ms + wait_ms) / 1_000
        while True:
            if self._is_closed:
                raise self._closed()
            try:
                async with asyncio.timeout_at(deadline):
                    return await call()
            except TimeoutError:
                raise Unavailable(
                    f"{self._transport.where} did not answer within {self._timeout_ms} ms; whether the call "
                    "took effect is unknown. Repeat it, or raise timeout_ms."
                ) from None
            except (Saturated, Unavailable) as error:
                # Clients that were refused together don't come back together.
                pause = error.retry_after_ms / 1_000 * random.uniform(1, 1 + JITTER)
                is_repeatable = is_idempotent or isinstance(error, Saturated)
                if not is_repeatable or loop.time() + pause >= deadline:
                    raise
                await asyncio.sleep(pause)


def _check_id(id_: object) -> str:
    return check_text("The message id", id_, 1)


def _check_moment(at: object) -> None:
    if at is not None and not isinstance(at, datetime):
        check_int("at", at)
