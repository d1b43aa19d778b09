"""Messages for the handlers of a worker, encoded as their annotations say."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from fnmatch import fnmatchcase
from typing import Any, TypedDict, TypeVar, Unpack, overload

from postroom.application.message_stream import MAX_WAIT_MS
from postroom.application.messages import MessageResult, NewMessage, Sent
from postroom.application.operations.mailbox import Mailbox
from postroom.application.received_messages import ReceivedMessage
from postroom.application.telemetry import summarize
from postroom.application.workers.consumer import Consumer
from postroom.application.workers.retry import Duration, read_duration
from postroom.domain.arguments import check_type
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import DEFAULT_PRIORITY

T = TypeVar("T")
HandlerOf = Callable[[T], Any] | Callable[[T, ReceivedMessage], Any] | Callable[[ReceivedMessage, T], Any]
BatchOf = Callable[[list[T]], Any] | Callable[[list[T], list[ReceivedMessage]], Any]
Raw = Callable[[ReceivedMessage], Any]
"""Handlers whose payload is of type `T`, for type checkers."""
current_mailbox: ContextVar[Mailbox | None] = ContextVar("postroom_mailbox", default=None)
"""The mailbox of the message that is being handled."""


class MessageOptions(TypedDict, total=False):
    """Options of a message; see `Sender.message`."""

    topic: str
    delay: Duration
    key: str | None
    unique_key: str | None
    idem_key: str | None
    priority: int


class SendOptions(MessageOptions, total=False):
    """Options of a send; see `Sender.send`."""

    mailbox: Mailbox | None


class CallOptions(SendOptions, total=False):
    """Options of a call; see `Sender.call`."""

    timeout: Duration


class Sender:
    """The sends of a `Worker` to its handlers."""

    name: str
    _consumers: dict[str, Consumer]

    @overload
    def message(self, handler: Raw, payload: bytes, **options: Unpack[MessageOptions]) -> NewMessage: ...
    @overload
    def message(self, handler: HandlerOf[T], payload: T, **options: Unpack[MessageOptions]) -> NewMessage: ...
    @overload
    def message(self, handler: BatchOf[T], payload: T, **options: Unpack[MessageOptions]) -> NewMessage: ...

    def message(self, handler: Any, payload: Any, **options: Unpack[MessageOptions]) -> NewMessage:
        """Return a message for a handler of this worker, whose payload is encoded as the handler decodes it.

        Arguments:
            handler: the function, as it was registered for a topic; of a batch, too.
            payload: an argument of the function.
            options: `topic`, which a handler of a pattern or of several topics needs; `delay` of the first
                delivery; `key`, the sticky key; and `unique_key`, `idem_key` and `priority` of `NewMessage`.

        Raises: InvalidRequest for a function that is no handler of a topic, and a payload that it can't take.
        """
        return _make_message(self._consumers_of(handler), self._consumer_of, payload, **options)

    @overload
    def send(self, handler: Raw, payload: bytes, **options: Unpack[SendOptions]) -> Awaitable[Sent]: ...
    @overload
    def send(self, handler: HandlerOf[T], payload: T, **options: Unpack[SendOptions]) -> Awaitable[Sent]: ...
    @overload
    def send(self, handler: BatchOf[T], payload: T, **options: Unpack[SendOptions]) -> Awaitable[Sent]: ...

    async def send(
        self, handler: Any, payload: Any, *, mailbox: Mailbox | None = None, **options: Unpack[MessageOptions]
    ) -> Sent:
        """Send a message to a handler of this worker.

        Arguments:
            handler, payload, options: see `message`.
            mailbox: None for the mailbox of the message that is being handled.

        Raises: as `message` and `Mailbox.send_message`; InvalidRequest without a mailbox.
        """
        message = self.message(handler, payload, **options)
        return await _find_mailbox(mailbox).send_message(message)

    @overload
    def call(self, handler: Raw, payload: bytes, **options: Unpack[CallOptions]) -> Awaitable[Any]: ...
    @overload
    def call(self, handler: HandlerOf[T], payload: T, **options: Unpack[CallOptions]) -> Awaitable[Any]: ...
    @overload
    def call(self, handler: BatchOf[T], payload: T, **options: Unpack[CallOptions]) -> Awaitable[Any]: ...

    async def call(
        self,
        handler: Any,
        payload: Any,
        *,
        mailbox: Mailbox | None = None,
        timeout: Duration = "10s",  # noqa: ASYNC109  # it bounds the wait, not the call
        **options: Unpack[MessageOptions],
    ) -> Any:
        """Send a message to a handler of this worker, and return what the handler returns.

        Arguments:
            handler, payload, mailbox, options: see `send`. The consumer must have `results=True`.
            timeout: how long to wait; the message stays in the mailbox if it ends.

        Raises: as `send`; NotFound if the message became a dead letter, or was removed, with the error;
            TimeoutError.
        """
        consumers = self._consumers_of(handler)
        if not all(each.has_results for each in consumers):
            raise InvalidRequest(
                f"Handler {consumers[0].handler.name} has no results; register it with results=True, or use "
                "`send`."
            )
        message = self.message(handler, payload, **options)
        result = await _call(_find_mailbox(mailbox), message, read_duration("timeout", timeout))
        return None if result is None else consumers[0].handler.read(result)

    def _consumers_of(self, handler: object) -> list[Consumer]:
        """Return the consumers of topics that a handler has."""
        consumers = [
            each
            for each in self._consumers.values()
            if each.subscription is None and each.handler.function == handler
        ]
        if not consumers:
            name = getattr(handler, "__qualname__", type(handler).__name__)
            raise InvalidRequest(
                f"Worker {self.name} has no handler {name} of a topic; register it with `consumer`, or send "
                "with `Mailbox.send_message`."
            )
        return consumers

    def _consumer_of(self, topic: str) -> Consumer | None:
        """Return the consumer of a topic."""
        if (exact := self._consumers.get(topic)) is not None:
            return exact
        matches = (each for each in self._consumers.values() if fnmatchcase(topic, each.topic))
        return next(matches, None)


def _make_message(
    consumers: Sequence[Consumer],
    owner_of: Callable[[str], Consumer | None],
    payload: object,
    *,
    topic: str | None = None,
    delay: Duration = "0",
    key: str | None = None,
    unique_key: str | None = None,
    idem_key: str | None = None,
    priority: int = DEFAULT_PRIORITY,
) -> NewMessage:
    """Return a message for a handler; see `Sender.message`.

    Arguments:
        consumers: those of the handler.
        owner_of: returns the consumer of a topic, if any.
    """
    name = consumers[0].handler.name
    if topic is None:
        names = [each.topic for each in consumers if not each.is_pattern]
        if len(names) != 1:
            topics = ", ".join(each.topic for each in consumers)
            raise InvalidRequest(
                f"Handler {name} gets messages of {topics}; pass topic with the name of one."
            )
        topic = names[0]
    elif owner_of(check_type("topic", topic, str)) not in consumers:
        raise InvalidRequest(f"Handler {name} gets no messages of topic {topic}; pass one that it consumes.")
    try:
        content = consumers[0].handler.encode(payload)
    except Exception as error:  # of pydantic and msgspec there are several
        raise InvalidRequest(
            f"Handler {name} can't take a payload of type {type(payload).__name__}: {summarize(error)}."
        ) from error
    return NewMessage(
        topic,
        content.payload,
        content_type=content.content_type,
        deliver_after_ms=read_duration("delay", delay),
        sticky_key=key,
        unique_key=unique_key,
        idem_key=idem_key,
        priority=priority,
    )


def _find_mailbox(mailbox: Mailbox | None) -> Mailbox:
    """Return a mailbox; without one, the mailbox of the message that is being handled."""
    place = current_mailbox.get() if mailbox is None else mailbox
    if place is None:
        raise InvalidRequest(
            "A worker sends to the mailbox of the message that it handles; elsewhere, pass mailbox."
        )
    return place


async def _call(mailbox: Mailbox, message: NewMessage, timeout_ms: int) -> MessageResult | None:
    """Send a message, and return its result; see `Sender.call`."""
    sent = await mailbox.send_message(message)
    now = asyncio.get_running_loop().time
    end = now() + timeout_ms / 1_000
    while True:
        rest_ms = max(0, round((end - now()) * 1_000))
        outcome = await mailbox.wait_for_result(sent.message_id, wait_ms=min(rest_ms, MAX_WAIT_MS))
        if outcome.is_final:
            break
        if not rest_ms:
            status = outcome.status.replace("_", " ")
            raise TimeoutError(
                f"Message {sent.message_id} on topic {message.topic} has no result after {timeout_ms} ms; it "
                f"is {status}."
            )
    if outcome.status != "acked" or outcome.erased:
        outcome.payload  # noqa: B018  # raises the reason
    return outcome.result
