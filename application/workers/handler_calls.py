"""Calls of a handler, after which each of their messages is acked, nacked or released."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from postroom.application.messages import ReceivedMessage
from postroom.application.telemetry import logger, summarize
from postroom.application.tracing import PROCESS, Span, tracer
from postroom.application.workers.consumer import Consumer
from postroom.application.workers.failures import describe_failure
from postroom.application.workers.handler import Handle, HandlerThread, make_result
from postroom.application.workers.retry import RetryLater
from postroom.application.workers.settlements import Settlements
from postroom.domain.errors import PoisonMessage

STOPPED = "the worker stopped before the handler returned"


class Failure(NamedTuple):
    """Why a handler failed, and the reason of the nack."""

    error: BaseException
    reason: str


def _span(messages: Sequence[ReceivedMessage]) -> AbstractContextManager[Span]:
    if len(messages) > 1:
        return tracer().span(
            PROCESS,
            {message.topic for message in messages},
            count=len(messages),
            links=[message.trace_context for message in messages],
        )
    (message,) = messages
    return tracer().span(
        PROCESS, (message.topic,), message_id=message.message_id, parent=message.trace_context
    )


def _is_outcome_of(result: object, count: int) -> bool:
    """Return whether a handler returned a list with as many items as its batch has messages."""
    return isinstance(result, list | tuple) and len(result) == count


class HandlerCalls:
    """Calls of the handler of a consumer; `handled` and `failed` count their messages.

    Arguments:
        settlements: takes the acks and nacks.
    """

    def __init__(self, consumer: Consumer, settlements: Settlements) -> None:
        self._consumer = consumer
        self._settlements = settlements
        self.is_ending = False
        """Whether a handler that is cancelled was cancelled by the end of the worker."""
        self.handled = 0
        self.failed = 0

    async def handle_batch(
        self, call: Callable[[Any], Awaitable[Any]], messages: Sequence[ReceivedMessage]
    ) -> None:
        """Handle messages with one call, and settle each of them."""
        decoded: list[tuple[ReceivedMessage, Any]] = []
        for message in messages:
            try:
                decoded.append((message, self._consumer.handler.decode(message)))
            except Exception as error:  # of this message only
                self.fail(message, error, summarize(error))
        if not decoded:
            return
        handled = [message for message, _ in decoded]
        result, failure = await self._attempt(lambda: call([each for _, each in decoded]), handled)
        if failure is None and result is not None and not _is_outcome_of(result, len(handled)):
            wrong = TypeError(
                f"the handler returned {type(result).__name__} for {len(handled)} messages; it must return "
                "None, or a list with a result or an exception for each of them"
            )
            failure = Failure(wrong, summarize(wrong))
        if failure is not None:
            traceback = self._log_failure(failure.error, handled)
            for message in handled:
                self._nack(message, failure, traceback)
            return
        for message, outcome in zip(handled, result or [None] * len(handled), strict=True):
            if isinstance(outcome, BaseException):
                self.fail(message, outcome, summarize(outcome))
            else:
                self._settle(message, outcome)

    def make_call(self, thread: HandlerThread) -> Callable[[Any], Awaitable[Any]]:
        """Return the handler as a coroutine function."""
        handler = self._consumer.handler
        if handler.is_async:
            return handler.call

        async def call(argument: Any) -> Any:
            result = await thread.run(handler.call, argument)
            # A function that wraps a coroutine function, as many decorators do, returns its coroutine.
            return await result if inspect.isawaitable(result) else result

        return call

    def make_handle(self, thread: HandlerThread) -> Handle:
        """Return the handler within the middlewares."""
        call = self.make_call(thread)

        async def handle(message: ReceivedMessage) -> Any:
            return await call(message)

        for middleware in reversed(self._consumer.middlewares):
            handle = middleware(handle)
        return handle

    async def handle(self, handle: Handle, message: ReceivedMessage) -> bool:
        """Return whether the message was handled."""
        result, failure = await self._attempt(lambda: handle(message), [message])
        if failure is not None:
            self.fail(message, *failure)
        return failure is None and self._settle(message, result)

    async def _attempt(
        self, call: Callable[[], Awaitable[Any]], messages: Sequence[ReceivedMessage]
    ) -> tuple[Any, Failure | None]:
        """Call the handler of messages; return its result, or why it failed."""
        timeout_ms = self._consumer.timeout_ms
        limit = asyncio.timeout(None if timeout_ms is None else timeout_ms / 1_000)
        try:
            async with limit:
                with _span(messages):
                    result = await call()
            if inspect.isgenerator(result) or inspect.isasyncgen(result):
                raise TypeError("the handler returned a generator, which nothing runs; remove its `yield`")
        except (KeyboardInterrupt, GeneratorExit):  # the process or the event loop ends, or see `_end_slot`
            raise
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                for message in messages if self.is_ending else ():
                    self._settlements.release(message, STOPPED)
                raise
            reason = f"the handler exceeded {timeout_ms} ms" if limit.expired() else summarize(error)
            return None, Failure(error, reason)
        return result, None

    def _settle(self, message: ReceivedMessage, result: object) -> bool:
        """Ack a message, and return True; fail it if its result can't be written."""
        try:
            answer = make_result(result) if self._consumer.has_results else None
        except Exception as error:  # whatever the result raises
            self.fail(message, error, summarize(error))
            return False
        self.handled += 1
        self._settlements.ack(message, answer)
        return True

    def fail(self, message: ReceivedMessage, error: BaseException, reason: str) -> None:
        """Log why a message was not handled, and nack it with a reason."""
        self._nack(message, Failure(error, reason), self._log_failure(error, [message]))

    def _nack(self, message: ReceivedMessage, failure: Failure, traceback: str | None) -> None:
        self.failed += not isinstance(failure.error, RetryLater)
        self._settlements.nack(message, self._consumer.retry.decide(message, *failure, traceback))

    def _log_failure(self, error: BaseException, messages: Sequence[ReceivedMessage]) -> str | None:
        """Log why a message, or a batch of them, was not handled; return its traceback, if any."""
        message = messages[0]
        facts: dict[str, object] = {
            "topic": message.topic,
            "message_id": message.message_id,
            "attempt": message.attempt,
        }
        if message.ordered_key is not None:
            facts["key"] = message.ordered_key
        if len(messages) > 1:
            facts["count"] = len(messages)
        if isinstance(error, RetryLater):
            logger().info("worker.retry_later", **facts, after_ms=error.after_ms)
            return None
        traceback = None if isinstance(error, PoisonMessage) else describe_failure(error, messages)
        if traceback is not None:
            facts["exception"] = traceback
        logger().warning("worker.handler_failed", error=type(error).__qualname__, **facts)
        return traceback
