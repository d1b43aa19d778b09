"""A mailbox for code without an event loop: threads, Django, Flask and scripts."""

import threading
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Self, TypeVar

from postroom.application.message_stream import HEARTBEAT_MS, MessageStream
from postroom.application.operations.mailbox import Mailbox
from postroom.application.operations.sync_operations import SyncOperations
from postroom.application.received_messages import (
    DeliveredMessage,
    ReceivedMessage,
    ack_options,
    raise_refusal,
)
from postroom.application.threads import BackgroundLoop, background_loop
from postroom.domain.errors import Unavailable
from postroom.domain.policy import DEFAULT_MAX_BYTES, DEFAULT_MAX_MESSAGES

T = TypeVar("T")


class SyncReceivedMessage(DeliveredMessage):
    """Delivery of a message whose methods return when they are done; see `ReceivedMessage`."""

    def ack(self, *, result: bytes | None = None, content_type: str | None = None) -> None:
        """Settle this delivery; see `ReceivedMessage.ack`."""
        raise_refusal(self._settler.ack_messages([self.receipt], **ack_options(result, content_type)))

    def nack(self, *, reason: str | None = None, delay_ms: int | None = None) -> None:
        """Fail this delivery; see `ReceivedMessage.nack`."""
        raise_refusal(self._settler.nack_messages([self.receipt], reason=reason, delay_ms=delay_ms))

    def reject(self, reason: str | None = None) -> None:
        """Dead-letter the message at once; see `ReceivedMessage.reject`."""
        raise_refusal(self._settler.nack_messages([self.receipt], reason=reason, action="reject"))

    def release(self, delay_ms: int = 0) -> None:
        """Return the message to the queue; see `ReceivedMessage.release`."""
        raise_refusal(self._settler.nack_messages([self.receipt], delay_ms=delay_ms, action="release"))

    def extend(self, visibility_ms: int) -> None:
        """Hide the message for longer; see `ReceivedMessage.extend`."""
        raise_refusal(self._settler.extend_visibility([self.receipt], visibility_ms))


class SyncMessageStream:
    """Deliveries of a mailbox as an iterator; `SyncMailbox.stream_messages` opens one.

    Threads may share it; each message goes to one of them. When one thread closes it, the iterations of all
    threads end.
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
        """End the stream, and make unsettled messages ready; idempotent."""
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


class SyncMailbox(SyncOperations):
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
        """Finish calls in progress, and release the mailbox; idempotent."""
        with self._closing:
            if self._mailbox is not None:
                self._mailbox = None
                self._loop.run(self._opening.__aexit__(None, None, None), may_block=True)

    @property
    def name(self) -> str:
        """Return the name of the mailbox."""
        return self._open.name

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

    @property
    def _open(self) -> Mailbox:
        if self._mailbox is None:
            raise Unavailable("The mailbox was closed; connect to it again.")
        return self._mailbox

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(work)
