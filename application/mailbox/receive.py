"""Handlers that deliver messages: `ReceiveMessages` and `StreamMessages` (svc-mailbox C-1 `RECV`)."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from itertools import repeat
from time import time_ns

from postroom.application.caller import Caller, current_caller
from postroom.application.mailbox.settle import DeliveryWindow, DeliveryWindows, Settler, make_settler
from postroom.application.message_stream import HEARTBEAT_MS, MAX_WAIT_MS, MessageStream, check_stream
from postroom.application.ports.event_log import MailboxOwner
from postroom.application.received_messages import ReceivedMessage
from postroom.application.threads import wait_at_most
from postroom.application.tracing import RECEIVE, tracer
from postroom.domain.arguments import check_int, check_items, check_optional_text
from postroom.domain.errors import InvalidRequest, PostroomError, Saturated
from postroom.domain.mailbox.commands import Receive
from postroom.domain.names import check_topic
from postroom.domain.policy import DEFAULT_MAX_BYTES, DEFAULT_MAX_MESSAGES, check_visibility

MAX_TOPICS = 1_000


class ReceiveMessages:
    """Handler that delivers ready messages and hides each until settled or timed out (svc-mailbox I-3)."""

    def __init__(self, owner: MailboxOwner, settler: Settler | None = None) -> None:
        """Initialise with the owner, and the settler of received messages."""
        self._owner = owner
        self._settler = settler or make_settler(owner, DeliveryWindows())
        self._turn = 0

    async def __call__(
        self,
        topic: str | Sequence[str],
        *,
        max_messages: int = DEFAULT_MAX_MESSAGES,
        max_bytes: int = DEFAULT_MAX_BYTES,
        visibility_ms: int | None = None,
        consumer: str | None = None,
        wait_ms: int = 0,
        is_stream: bool = False,
    ) -> list[ReceivedMessage]:
        """Receive messages of one topic or of several, in the order of their shards.

        A shard is FIFO, unless the topic's policy has priorities.

        Arguments:
            topic: the topic, or a list of up to 1,000; they take turns in being served first.
            max_messages: maximum number of messages.
            max_bytes: maximum total size of their payloads; the first message is always delivered.
            visibility_ms: visibility timeout, 250 ms to 30 days; None uses the policy of each topic.
            consumer: name of the consumer, recorded in the log; up to 255 characters.
            wait_ms: maximum wait for a message, up to 60,000.
            is_stream: the owner returns unsettled messages when its connection to this process ends.

        Returns: the messages; empty if none is ready.
        Raises: InvalidRequest, Saturated when too many are in flight, Unavailable.
        """
        check_int("wait_ms", wait_ms, 0, MAX_WAIT_MS)
        topics: Sequence[object] = (topic,) if isinstance(topic, str) else check_items("topic", topic)
        if len(topics) > 1:
            self._turn = (self._turn + 1) % len(topics)
            topics = (*topics[self._turn :], *topics[: self._turn])
        command = make_receive(topics, max_messages, max_bytes, visibility_ms, consumer, current_caller())
        started_ns = time_ns()
        deliveries = await self._owner.receive(command, wait_ms, is_stream=is_stream)
        received = list(map(ReceivedMessage, deliveries, repeat(self._settler)))
        record_receive(received, started_ns)
        return received


def record_receive(received: Sequence[ReceivedMessage], started_ns: int) -> None:
    """Record a receive that delivered messages, linked to the senders' spans; empty ones are too many."""
    if received:
        tracer().record(
            RECEIVE,
            (each.topic for each in received),
            started_ns,
            count=len(received),
            links=(each.trace_context for each in received),
        )


def make_receive(
    topics: Sequence[object],
    max_messages: int,
    max_bytes: int,
    visibility_ms: int | None,
    consumer: str | None,
    caller: Caller | None = None,
) -> Receive:
    """Return the command of a receive.

    Arguments: see `ReceiveMessages.__call__`.
        caller: to whom the messages are delivered; see `MessageReceived`.

    Raises: InvalidRequest naming the first argument of a wrong type or out of range.
    """
    if not 1 <= len(topics) <= MAX_TOPICS:
        raise InvalidRequest(f"topic must name 1 to {MAX_TOPICS} topics; it named {len(topics)}.")
    return Receive(
        tuple(dict.fromkeys(check_topic(topic) for topic in topics)),
        check_int("max_messages", max_messages, 1),
        check_int("max_bytes", max_bytes, 1),
        visibility_ms if visibility_ms is None else check_visibility(visibility_ms),
        check_optional_text("consumer", consumer),
        principal=None if caller is None else caller.principal,
        capability=None if caller is None else caller.capability,
    )


STREAM_ENDED = "the consumer's stream ended"
"""Reason of the nacks of messages that a stream left unsettled."""


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
