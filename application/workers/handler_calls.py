"""Calls of a handler, after which each of their messages is acked, nacked or released.

Their tracebacks go to log and dead letters; values of payloads and headers are redacted in them.
"""

import asyncio
import inspect
import json
import re
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from postroom.application.received_messages import ReceivedMessage
from postroom.application.telemetry import logger, summarize
from postroom.application.tracing import PROCESS, Span, tracer
from postroom.application.workers import handler
from postroom.application.workers.consumer import Consumer
from postroom.application.workers.handler import Handle, HandlerThread, make_result
from postroom.application.workers.retry import RetryLater, Settlements
from postroom.domain.errors import PoisonMessage

_PACKAGE = f"{Path(__file__).parents[2]}/"
MAX_CHARS = 16_000
"""Length of a traceback above which its middle is left out."""
MAX_PAYLOAD_BYTES = 64 << 10
"""Size of the payloads above which the log has no traceback, as a search for its values takes long."""
MAX_SEARCH = 200_000_000
"""Characters of a traceback times values above which it is not logged, for the same reason."""
MIN_SECRET_CHARS = 4
"""Length of a value below which it is not redacted: shorter ones occur in any text."""
REDACTED = "[redacted]"
_INPUT = re.compile("(?<=input_value=).*(?=, input_type=)")
"""Input that an error of pydantic quotes, shortened in its middle."""


def describe_failure(error: BaseException, messages: Sequence[ReceivedMessage]) -> str | None:
    """Return the traceback of a handler's error, or None if it has none that may be logged.

    It has no local variables, and values of the payload and the headers are redacted in the texts of errors.
    An error of validation has no traceback, as it is about the payload.
    """
    frames = _frames_of_handler(error)
    if frames is None or sum(len(message.payload) for message in messages) > MAX_PAYLOAD_BYTES:
        return None
    try:
        text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    except Exception:  # whatever an attribute of the error raises
        return None
    secrets = {form for message in messages for value in _secrets(message) for form in _forms(value)}
    if len(text) * len(secrets) > MAX_SEARCH:
        return None
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, REDACTED)
    text = _INPUT.sub(REDACTED, text).encode(errors="backslashreplace").decode().replace("\0", "\\x00")
    half = MAX_CHARS // 2
    return text if len(text) <= MAX_CHARS else f"{text[:half]}\n...\n{text[-half:]}"


def _frames_of_handler(error: BaseException) -> TracebackType | None:
    """Return the traceback from the first frame of the handler; None if the error is of its arguments."""
    frames, first = error.__traceback__, None
    while frames is not None:
        file = frames.tb_frame.f_code.co_filename
        if file == handler.__file__:
            first = None
        elif first is None and not file.startswith(_PACKAGE):
            first = frames
        frames = frames.tb_next
    module = "" if first is None else str(first.tb_frame.f_globals.get("__name__", ""))
    return None if module.partition(".")[0] == "pydantic" else first


def _secrets(message: ReceivedMessage) -> Iterator[str]:
    """Yield the values of a payload and its headers, as text, that are long enough to be redacted."""
    text = message.payload.decode(errors="replace")
    try:
        payload = json.loads(text)
    except (ValueError, RecursionError):
        payload = text
    values = [payload, repr(message.payload)[2:-1], *message.attrs.values(), message.principal]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value
        elif value is not None and len(str(value)) >= MIN_SECRET_CHARS:
            yield str(value)
            if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):  # JSON in JSON
                try:
                    values.append(json.loads(value))
                except (ValueError, RecursionError):
                    continue


def _forms(value: str) -> Iterator[str]:
    """Yield the forms in which an error may quote a value: plain, by line, in JSON, and by `repr`."""
    for line in (value, *value.splitlines()):
        if line.isalnum() and line.isascii():
            forms = {line}
        else:
            texts = {line, json.dumps(line)[1:-1], json.dumps(line, ensure_ascii=False)[1:-1]}
            raw = {repr(text.encode(errors="backslashreplace"))[2:-1] for text in texts}
            forms = texts | raw | {repr(text)[1:-1] for text in texts}
        yield from (form for form in forms if len(form) >= MIN_SECRET_CHARS)


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


CHECK_SECONDS, IDLE_SECONDS = 0.25, 2.0
"""Interval between two looks at the loop, and the one while no message is handled."""
CHECKS = 4
"""Checks in a row that find the loop blocked, before it is logged.

Counted, because after a pause of the process all of its time has elapsed.
"""
IDLE_CHECKS = 8
"""Checks in a row without a message that is handled, after which they become rare."""


class Handling(NamedTuple):
    """A message that a handler is working on.

    Arguments:
        others: the other messages of its batch, and later messages of its ordered key.
    """

    handler: str
    message: ReceivedMessage
    others: Sequence[ReceivedMessage] = ()


class LoopWatch:
    """Watch over the running event loop for the length of a context, from a thread.

    A task that keeps the loop for longer than a second is logged once, with its handler, topic and message id
    if it is a handler's, and with the line that it is at.

    Arguments:
        find: returns the message that a task is handling, if any; called in the thread.
    """

    def __init__(self, find: "Callable[[asyncio.Task[Any]], Handling | None]") -> None:
        self._find = find
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="postroom-watch", daemon=True)
        self._woken = threading.Event()
        self._is_over = False
        self._beats = 0
        self._handlings = 0
        self.is_idle = False
        """Whether checks are rare, until the next message."""

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._woken.set()

    def note(self) -> None:
        """Note that a message is handled."""
        self._handlings += 1
        if self.is_idle:
            self.is_idle = False
            self._woken.set()

    def _beat(self) -> None:
        self._beats += 1

    def _watch(self) -> None:
        silent, idle, asked, handlings = 0, 0, -1, -1
        while not self._is_over:
            task = asyncio.current_task(self._loop)
            if task is None:
                silent, asked = 0, -1
            elif asked == self._beats:
                silent += 1
                if silent == CHECKS:
                    self._log(task)
            else:  # ask for a turn of the loop
                silent, asked = 0, self._beats
                with suppress(RuntimeError):  # of a loop that is closed
                    self._loop.call_soon_threadsafe(self._beat)
            idle = idle + 1 if task is None and handlings == self._handlings else 0
            handlings = self._handlings
            self.is_idle = idle >= IDLE_CHECKS
            if handlings != self._handlings:  # `note` saw the former value
                self.is_idle, idle = False, 0
            self._woken.wait(IDLE_SECONDS if self.is_idle else CHECK_SECONDS)
            self._woken.clear()

    def _log(self, task: "asyncio.Task[Any]") -> None:
        handling = self._find(task)
        frame = sys._current_frames().get(self._loop_thread)
        logger().warning(
            "worker.loop_blocked",
            handler=None if handling is None else handling.handler,
            topic=None if handling is None else handling.message.topic,
            message_id=None if handling is None else handling.message.message_id,
            task=task.get_name(),
            at=None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}",
        )
