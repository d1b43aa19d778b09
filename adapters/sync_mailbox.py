"""A mailbox for code without an event loop: threads, Django, Flask and scripts."""

import threading
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Self, TypeVar

from postroom.application.background_loop import BackgroundLoop, background_loop
from postroom.application.message_stream import HEARTBEAT_MS, MessageStream
from postroom.application.messages import (
    DeliveredMessage,
    NewMessage,
    ReceivedMessage,
    Sent,
    raise_refusal,
)
from postroom.application.ports.mailbox import Mailbox
from postroom.application.query_results import (
    Backlog,
    DeadLetter,
    Explanation,
    MessageDetail,
    Moment,
    PeekedMessage,
)
from postroom.application.sync_redrives import SyncRedrives
from postroom.domain.errors import Rejected, Unavailable
from postroom.domain.mailbox.counts import TopicSummary
from postroom.domain.mailbox.settings_effects import SettingsPreview
from postroom.domain.message import Receipt
from postroom.domain.policy import DEFAULT_MAX_BYTES, DEFAULT_MAX_MESSAGES, TopicPolicy
from postroom.domain.search import EventFilter, SearchPage
from postroom.domain.settings import MailboxSettings, PolicyChanges, SettingsChanges

T = TypeVar("T")


class SyncReceivedMessage(DeliveredMessage):
    """Delivery of a message whose methods return when they are done; see `ReceivedMessage`."""

    def ack(self) -> None:
        """Settle this delivery; see `ReceivedMessage.ack`."""
        raise_refusal(self._settler.ack_messages([self.receipt]))

    def nack(self, *, reason: str | None = None, delay_ms: int | None = None) -> None:
        """Fail this delivery; see `ReceivedMessage.nack`."""
        raise_refusal(self._settler.nack_messages([self.receipt], reason=reason, delay_ms=delay_ms))

    def extend(self, visibility_ms: int) -> None:
        """Hide the message for longer; see `ReceivedMessage.extend`."""
        raise_refusal(self._settler.extend_visibility([self.receipt], visibility_ms))


class SyncMessageStream:
    """Deliveries of a mailbox as an iterator; `SyncMailbox.stream_messages` opens one.

    Threads may share it; each message goes to one of them. When one closes it, the iterations of all end.
    """

    def __init__(
        self,
        mailbox: "SyncMailbox",
        loop: BackgroundLoop,
        opening: AbstractAsyncContextManager[MessageStream],
    ) -> None:
        self._mailbox = mailbox
        self._loop = loop
        self._opening = opening
        self._stream: MessageStream | None = None

    def __enter__(self) -> Self:
        self._stream = self._loop.run(self._opening.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the stream, and make ready what was not settled; idempotent."""
        if self._stream is not None:
            self._stream = None
            self._loop.run(self._opening.__aexit__(None, None, None), may_block=True)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> SyncReceivedMessage:
        """Return the next message; see `MessageStream.__anext__`."""
        stream = self._stream
        message = None if stream is None else self._loop.run(_next(stream))
        if message is None:
            raise StopIteration
        return SyncReceivedMessage(message.delivery, self._mailbox)


async def _next(stream: MessageStream) -> ReceivedMessage | None:
    return await anext(stream, None)


class SyncMailbox(SyncRedrives):
    """The commands and queries of `Mailbox` as functions that return when they are done.

    Any number of threads may use it; a coroutine may only close it. All mailboxes of a process run on one
    event loop, in a background thread. `connect(...)` opens one: `with connect("orders.db") as mailbox`.
    """

    def __init__(self, opening: AbstractAsyncContextManager[Mailbox]) -> None:
        """Open the mailbox; see `connect`."""
        self._opening = opening
        self._closing = threading.RLock()
        self._loop = background_loop()
        self._mailbox: Mailbox | None = None
        self._mailbox = self._run(opening.__aenter__())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish what is in progress, and release the mailbox; idempotent."""
        with self._closing:
            if self._mailbox is not None:
                self._mailbox = None
                self._loop.run(self._opening.__aexit__(None, None, None), may_block=True)

    @property
    def name(self) -> str:
        """Return the name of the mailbox."""
        return self._open.name

    def send_message(self, message: NewMessage, /) -> Sent:
        """Send a message; see `Mailbox.send_message`."""
        return self._run(self._open.send_message(message))

    def send_batch(self, messages: Sequence[NewMessage], /) -> list[Sent | Rejected]:
        """Send messages; see `Mailbox.send_batch`."""
        return self._run(self._open.send_batch(messages))

    def receive_messages(
        self,
        topic: str | Sequence[str],
        /,
        *,
        max_messages: int = DEFAULT_MAX_MESSAGES,
        max_bytes: int = DEFAULT_MAX_BYTES,
        visibility_ms: int | None = None,
        consumer: str | None = None,
        wait_ms: int = 0,
    ) -> list[SyncReceivedMessage]:
        """Receive messages; see `Mailbox.receive_messages`."""
        receiving = self._open.receive_messages(
            topic,
            max_messages=max_messages,
            max_bytes=max_bytes,
            visibility_ms=visibility_ms,
            consumer=consumer,
            wait_ms=wait_ms,
        )
        return [SyncReceivedMessage(each.delivery, self) for each in self._run(receiving)]

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
    ) -> SyncMessageStream:
        """Receive messages for the length of a context; see `Mailbox.stream_messages`."""
        opening = self._open.stream_messages(
            topic,
            max_messages=max_messages,
            max_bytes=max_bytes,
            visibility_ms=visibility_ms,
            consumer=consumer,
            heartbeat_ms=heartbeat_ms,
            wait_ms=wait_ms,
        )
        return SyncMessageStream(self, self._loop, opening)

    def ack_messages(self, receipts: Sequence[Receipt], /) -> list[Rejected | None]:
        """Settle deliveries; see `Mailbox.ack_messages`."""
        return self._run(self._open.ack_messages(receipts))

    def nack_messages(
        self, receipts: Sequence[Receipt], /, *, reason: str | None = None, delay_ms: int | None = None
    ) -> list[Rejected | None]:
        """Fail deliveries; see `Mailbox.nack_messages`."""
        return self._run(self._open.nack_messages(receipts, reason=reason, delay_ms=delay_ms))

    def extend_visibility(self, receipts: Sequence[Receipt], visibility_ms: int, /) -> list[Rejected | None]:
        """Hide received messages for longer; see `Mailbox.extend_visibility`."""
        return self._run(self._open.extend_visibility(receipts, visibility_ms))

    def redrive_dead_letters(
        self,
        topic: str,
        /,
        *,
        limit: int = 100,
        reason: str | None = None,
        message_ids: Sequence[str] | None = None,
    ) -> int:
        """Redrive dead letters; see `Mailbox.redrive_dead_letters`."""
        return self._run(
            self._open.redrive_dead_letters(topic, limit=limit, reason=reason, message_ids=message_ids)
        )

    def purge_topic(self, topic: str, /, *, dead: bool = True, ready: bool = False) -> int:
        """Remove messages of a topic; see `Mailbox.purge_topic`."""
        return self._run(self._open.purge_topic(topic, dead=dead, ready=ready))

    def set_topic_policy(self, topic: str, policy: TopicPolicy | PolicyChanges, /) -> None:
        """Set the policy of a topic; see `Mailbox.set_topic_policy`."""
        self._run(self._open.set_topic_policy(topic, policy))

    def get_settings(self) -> MailboxSettings:
        """Return the settings; see `Mailbox.get_settings`."""
        return self._run(self._open.get_settings())

    def preview_settings(self, changes: SettingsChanges, /, *, replace: bool = False) -> SettingsPreview:
        """Return what a change of settings would do; see `Mailbox.preview_settings`."""
        return self._run(self._open.preview_settings(changes, replace=replace))

    def set_settings(self, changes: SettingsChanges, /, *, replace: bool = False) -> bool:
        """Change the settings; see `Mailbox.set_settings`."""
        return self._run(self._open.set_settings(changes, replace=replace))

    def pause_topic(self, topic: str, /) -> None:
        """Pause a topic; see `Mailbox.pause_topic`."""
        self._run(self._open.pause_topic(topic))

    def resume_topic(self, topic: str, /) -> None:
        """Resume a topic; see `Mailbox.resume_topic`."""
        self._run(self._open.resume_topic(topic))

    def delete_old_events(self, older_than: int, /) -> int:
        """Remove settled records; see `Mailbox.delete_old_events`."""
        return self._run(self._open.delete_old_events(older_than))

    def get_message(self, id_: str, /) -> MessageDetail:
        """Return a message with its history; see `Mailbox.get_message`."""
        return self._run(self._open.get_message(id_))

    def explain_message(self, id_: str, /) -> Explanation:
        """Return the explanation of a message; see `Mailbox.explain_message`."""
        return self._run(self._open.explain_message(id_))

    def get_backlog(self, topic: str | None = None, /, *, at: Moment | None = None) -> Backlog:
        """Return the unsettled messages; see `Mailbox.get_backlog`."""
        return self._run(self._open.get_backlog(topic, at=at))

    def list_dead_letters(
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
        return self._run(
            self._open.list_dead_letters(topic, reason=reason, limit=limit, cursor=cursor, at=at)
        )

    def get_topic_policy(self, topic: str, /) -> TopicPolicy:
        """Return the policy of a topic; see `Mailbox.get_topic_policy`."""
        return self._run(self._open.get_topic_policy(topic))

    def list_topics(self) -> list[TopicSummary]:
        """Return the topics; see `Mailbox.list_topics`."""
        return self._run(self._open.list_topics())

    def peek_messages(self, topic: str, /, *, limit: int = 10) -> list[PeekedMessage]:
        """Return ready messages without receiving them; see `Mailbox.peek_messages`."""
        return self._run(self._open.peek_messages(topic, limit=limit))

    def search_messages(self, filter_: EventFilter, /) -> SearchPage:
        """Return a page of the messages that match; see `Mailbox.search_messages`."""
        return self._run(self._open.search_messages(filter_))

    @property
    def _open(self) -> Mailbox:
        if self._mailbox is None:
            raise Unavailable("The mailbox was closed; connect to it again.")
        return self._mailbox

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(work)
