"""`StreamMessages`: receive messages of topics for as long as the caller wants."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

from postroom.application.background import wait_at_most
from postroom.application.delivery_window import DeliveryWindow, DeliveryWindows
from postroom.application.mailbox.receive import make_receive
from postroom.application.message_stream import HEARTBEAT_MS, MessageStream, check_stream
from postroom.application.messages import ReceivedMessage
from postroom.domain.arguments import check_items
from postroom.domain.errors import PostroomError, Saturated
from postroom.domain.mailbox.commands import Receive
from postroom.domain.policy import DEFAULT_MAX_BYTES, DEFAULT_MAX_MESSAGES

STREAM_ENDED = "the consumer's stream ended"
"""Reason of the nacks of what a stream left unsettled."""


class StreamMessages:
    """Handler that delivers messages as they come, a limited number of them unsettled at a time."""

    def __init__(
        self,
        receive: Callable[..., Awaitable[list[ReceivedMessage]]],
        nack: Callable[..., Awaitable[object]],
        windows: DeliveryWindows,
    ) -> None:
        """Initialise with calls like `ReceiveMessages` and `NackMessages`, and the windows of streams."""
        self._receive = receive
        self._nack = nack
        self._windows = windows

    def __call__(
        self,
        topic: str | Sequence[str],
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
        return self._open(command, heartbeat_ms, wait_ms)

    @asynccontextmanager
    async def _open(
        self, command: Receive, heartbeat_ms: int, wait_ms: int | None
    ) -> AsyncIterator[MessageStream]:
        with self._windows.open(command.max_messages) as window:
            try:
                batches = self._batches(command, window, heartbeat_ms)
                async with MessageStream(batches, command.max_messages, wait_ms) as stream:
                    yield stream
            finally:
                if unsettled := window.unsettled:
                    with suppress(PostroomError):  # their visibility timeout does it otherwise
                        await self._nack(unsettled, reason=STREAM_ENDED, delay_ms=0)

    async def _batches(
        self, command: Receive, window: DeliveryWindow, heartbeat_ms: int
    ) -> AsyncIterator[list[ReceivedMessage]]:
        """Yield messages as there is room for them; an empty batch is a heartbeat, or the mailbox is full."""
        heartbeat = heartbeat_ms / 1_000
        while True:
            received: list[ReceivedMessage] = []
            pause = 0.0
            room = window.room
            if room > 0:
                try:
                    received = await self._receive(
                        command.topics,
                        max_messages=room,
                        max_bytes=command.max_bytes,
                        visibility_ms=command.visibility_ms,
                        consumer=command.consumer,
                        wait_ms=heartbeat_ms,
                        is_stream=True,
                    )
                except Saturated as error:
                    pause = min(error.retry_after_ms / 1_000, heartbeat)
                window.add(received)
            else:
                pause = window.seconds_until_room(heartbeat)
            yield received
            if pause:
                window.settled.clear()
                await wait_at_most(pause, window.settled.wait())
