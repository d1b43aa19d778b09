"""The run of one consumer: receive ahead, handle up to `concurrency` messages at once, settle in batches."""

import asyncio
import inspect
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any, NamedTuple

from postroom.application.messages import ReceivedMessage
from postroom.application.metrics import new_histogram
from postroom.application.operations.mailbox import Mailbox
from postroom.application.telemetry import log_context, logger, summarize
from postroom.application.threads import cancel_and_wait, wait_at_most
from postroom.application.tracing import PROCESS, Span, correlate, tracer
from postroom.application.workers.consumer import REFRESH_SECONDS, Consumer, Topics
from postroom.application.workers.failures import describe_failure
from postroom.application.workers.handler import (
    Handle,
    HandlerThread,
    Handling,
    correlation_id_of,
    make_result,
)
from postroom.application.workers.retry import RetryLater
from postroom.application.workers.settlements import Settlements
from postroom.domain.errors import Fenced, MailboxClosed, PoisonMessage, Saturated, Unavailable
from postroom.domain.message import Receipt
from postroom.domain.policy import OutageBackoff, backoff_ms

WAIT_MS = 1_000
"""Wait of one receive; a stop takes as long when there are no messages."""
MAX_MESSAGES = 256
MAX_BYTES = 4 << 20
AHEAD_SECONDS = 0.1
"""Time, at the current rate, for which messages are received ahead."""
MAX_AHEAD = 2_000
EXTENSIONS_PER_VISIBILITY = 3
BACKOFF = OutageBackoff(50, 5_000)
"""Backoff while the mailbox can't be used."""
CANCEL_SECONDS = 1.0
"""Time for a cancelled handler to end; one that ignores its cancellation is left alone."""
STOPPED = "the worker stopped before the handler returned"
NOT_HANDLED = "an earlier message of its key was not handled"
_handling: ContextVar[Handling | None] = ContextVar("postroom_handling", default=None)


async def pause_after(event: str, error: Exception, failures: int, stop: asyncio.Event) -> None:
    """Log a failure, and pause, the longer the more there were in a row; return early when `stop` is set."""
    pause_ms = backoff_ms(BACKOFF, failures, random.random())
    logger().warning(event, error=str(error), pause_ms=pause_ms)
    await wait_at_most(pause_ms / 1_000, stop.wait())


def _runs_of(messages: Sequence[ReceivedMessage]) -> list[deque[ReceivedMessage]]:
    """Return the messages of each ordered key together, to be handled in order, and each other one alone."""
    runs: dict[object, deque[ReceivedMessage]] = {}
    for message in messages:
        run = message.receipt if message.ordered_key is None else (message.topic, message.ordered_key)
        runs.setdefault(run, deque()).append(message)
    return list(runs.values())


def _log_context(message: ReceivedMessage, corr_id: str | None) -> AbstractContextManager[object]:
    """Have the lines of a handler tell its message."""
    return log_context(
        corr_id=corr_id, topic=message.topic, message_id=message.message_id, attempt=message.attempt
    )


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


class ConsumerRun:
    """One run of a consumer.

    Arguments:
        name: recorded as the consumer of its deliveries.
        once: end when no message is ready.
    """

    def __init__(
        self, consumer: Consumer, mailbox: Mailbox, topics: Topics, name: str, *, once: bool
    ) -> None:
        self._consumer = consumer
        self._mailbox = mailbox
        self._topics = topics
        self._name = name
        self._once = once
        self._stopping = asyncio.Event()
        self._aborting = asyncio.Event()
        self._queue: asyncio.Queue[deque[ReceivedMessage] | None] = asyncio.Queue()
        self._held: dict[Receipt, float] = {}  # unsettled, with the time when the visibility timeout began
        self._behind: set[Receipt] = set()  # those of them that wait for an earlier one of their ordered key
        self._slots: dict[asyncio.Task[None], Handling | None] = {}  # with what each is handling
        self._is_ending = False
        self._room = asyncio.Event()
        self._rate = 0.0
        self._settlements = Settlements(mailbox, self._forget)
        self.handled = 0
        self.failed = 0
        self.seconds = new_histogram()
        """Duration of the handler's calls."""

    @property
    def topic(self) -> str:
        """Return the topic of the consumer, or the pattern."""
        return self._consumer.topic

    @property
    def in_progress(self) -> int:
        """Return the number of messages in progress."""
        return sum(handling is not None for handling in self._slots.values())

    def find_handling(self, task: "asyncio.Task[Any]") -> Handling | None:
        """Return the message that a task, or its parent, is handling; may be called in any thread."""
        handling = self._slots.get(task)
        if handling is None and (context := getattr(task, "get_context", None)) is not None:  # Python 3.12
            handling = context().get(_handling)
        return handling

    def stop(self) -> None:
        """Receive no more messages, and end when those received are handled."""
        self._stopping.set()
        self._room.set()

    def abort(self) -> None:
        """Cancel the handlers that run; their messages and those not yet handled are released."""
        self.stop()
        self._aborting.set()

    async def run(self) -> None:
        """Handle messages until stopped.

        Raises: Fenced when the mailbox was taken over, MailboxClosed when it was closed, InvalidRequest for a
            name that it refuses.
        """
        threads = [HandlerThread(f"{self._name} {n}") for n in range(self._consumer.concurrency)]
        for thread in threads:
            self._start_slot(thread)
        others = [asyncio.create_task(each) for each in (self._settlements.run(), self._extend_all())]
        aborting = asyncio.create_task(self._aborting.wait())
        try:
            await self._receive_all()
            for _ in threads:
                self._queue.put_nowait(None)
            handled = asyncio.create_task(self._wait_for_slots())
            await asyncio.wait([handled, aborting], return_when=asyncio.FIRST_COMPLETED)
            await self._end_slots()
            await cancel_and_wait(handled)
            while not self._queue.empty():
                for message in self._queue.get_nowait() or ():
                    self._settlements.release(message, STOPPED)
            await self._settlements.wait_until_flushed()
        finally:
            await self._end_slots()
            await cancel_and_wait(*others, aborting)
            for thread in threads:
                thread.close()

    def _start_slot(self, thread: HandlerThread) -> None:
        handle = self._handle_all if self._consumer.batch == 1 else self._handle_batches
        slot = asyncio.create_task(handle(thread), name=self._name)
        self._slots[slot] = None
        slot.add_done_callback(partial(self._end_slot, thread))

    def _end_slot(self, thread: HandlerThread, slot: "asyncio.Task[None]") -> None:
        """Start a slot again whose task was ended by its handler, and fail the delivery."""
        handling = self._slots.pop(slot, None)
        error = asyncio.CancelledError() if slot.cancelled() else slot.exception()
        if self._is_ending or error is None or isinstance(error, KeyboardInterrupt):
            return
        if handling is not None:
            self._fail(handling.message, error, summarize(error))
        logger().error("worker.handler_restarted", consumer=self._name, error=type(error).__qualname__)
        self._start_slot(thread)

    async def _wait_for_slots(self) -> None:
        while self._slots:
            await asyncio.wait(list(self._slots))

    async def _end_slots(self) -> None:
        """End the handlers; the messages of those that ignore it are delivered again."""
        self._is_ending = True
        if stuck := await cancel_and_wait(*self._slots, seconds=CANCEL_SECONDS):
            logger().error("worker.handlers_not_stopped", consumer=self._name, count=len(stuck))
            for handling in self._slots.values():
                if handling is not None:
                    self._settlements.release(handling.message, STOPPED)
            self._slots.clear()

    # -- receiving ---

    async def _receive_all(self) -> None:
        failures = 0
        loop = asyncio.get_running_loop()
        since, before = loop.time(), 0
        while not self._stopping.is_set():
            ahead = min(int(self._rate * AHEAD_SECONDS), MAX_AHEAD)
            # The messages of an ordered key, which are handled one after the other, count as one.
            busy = self._consumer.concurrency * self._consumer.batch
            free = busy + ahead - len(self._held) + len(self._behind)
            free = min(free, busy + MAX_AHEAD - len(self._held))
            if free <= 0 or (free < ahead // 2 and not self._queue.empty()):
                self._room.clear()
                await self._room.wait()
                continue
            try:
                received = await self._receive(min(free, MAX_MESSAGES))
                failures = 0
            except (Fenced, MailboxClosed):
                raise
            except (Saturated, Unavailable) as error:
                failures += 1
                await pause_after("worker.receive_failed", error, failures, self._stopping)
                continue
            now, done = loop.time(), self.handled + self.failed
            if now - since >= AHEAD_SECONDS:
                self._rate = (done - before) / (now - since)
                since, before = now, done
            self._held.update(dict.fromkeys([message.receipt for message in received], now))
            for run in _runs_of(received):
                if self._consumer.batch == 1:
                    self._behind.update(message.receipt for message in islice(run, 1, None))
                self._queue.put_nowait(run)
            if self._once and not received:
                await self._settlements.wait_until_flushed()
                if not self._held:
                    return
                self._room.clear()
                await self._room.wait()

    async def _receive(self, count: int) -> Sequence[ReceivedMessage]:
        topics = await self._topics.of(self._consumer)
        if not topics:
            if not self._once:
                await self._pause(REFRESH_SECONDS)
            return ()
        return await self._mailbox.receive_messages(
            topics,
            max_messages=count,
            max_bytes=MAX_BYTES,
            visibility_ms=self._consumer.visibility_ms,
            consumer=self._name,
            wait_ms=0 if self._once else WAIT_MS,
        )

    async def _pause(self, seconds: float) -> None:
        """Wait, or return early to stop."""
        await wait_at_most(seconds, self._stopping.wait())

    # -- handling ---

    async def _handle_batches(self, thread: HandlerThread) -> None:
        call = self._make_call(thread)
        slot = asyncio.current_task()
        assert slot is not None
        rest: deque[ReceivedMessage] = deque()
        try:
            while (batch := await self._next_batch(rest)) is not None:
                if messages := [each for each in batch if each.receipt in self._held]:
                    self._slots[slot] = handling = Handling(self._consumer.handler.name, messages[0])
                    _handling.set(handling)
                    began = perf_counter()
                    with log_context(topic=messages[0].topic, count=len(messages)):
                        await self._handle_batch(call, messages)
                    self.seconds.observe(perf_counter() - began)
                    self._slots[slot] = None
                    if self._aborting.is_set():
                        return
                    await thread.wait_until_idle()
        finally:
            for message in rest:
                self._settlements.release(message, STOPPED)

    async def _next_batch(self, rest: deque[ReceivedMessage]) -> list[ReceivedMessage] | None:
        """Return what is there of the next batch, or None at the end.

        Arguments:
            rest: messages of an ordered key that the batch before had no room for.
        """
        if not rest:
            if (run := await self._queue.get()) is None:
                return None
            rest.extend(run)
        while len(rest) < self._consumer.batch and not self._queue.empty():
            if (run := self._queue.get_nowait()) is None:
                self._queue.put_nowait(None)  # for the next turn
                break
            rest.extend(run)
        return [rest.popleft() for _ in range(min(len(rest), self._consumer.batch))]

    async def _handle_batch(
        self, call: Callable[[Any], Awaitable[Any]], messages: Sequence[ReceivedMessage]
    ) -> None:
        """Handle messages with one call, and settle each of them."""
        decoded: list[tuple[ReceivedMessage, Any]] = []
        for message in messages:
            try:
                decoded.append((message, self._consumer.handler.decode(message)))
            except Exception as error:  # of this message only
                self._fail(message, error, summarize(error))
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
            self._log_failure(failure.error, handled)
            for message in handled:
                self._give_back(message, failure)
            return
        for message, outcome in zip(handled, result or [None] * len(handled), strict=True):
            if isinstance(outcome, BaseException):
                self._fail(message, outcome, summarize(outcome))
            else:
                self._settle(message, outcome)

    async def _handle_all(self, thread: HandlerThread) -> None:
        handle = self._make_handle(self._make_call(thread))
        slot = asyncio.current_task()
        assert slot is not None
        while (run := await self._queue.get()) is not None:
            try:
                # Another consumer may have it by now.
                while run and (message := run.popleft()).receipt in self._held:
                    self._behind.discard(message.receipt)
                    self._slots[slot] = handling = Handling(self._consumer.handler.name, message)
                    _handling.set(handling)
                    began = perf_counter()
                    try:
                        corr_id = correlation_id_of(message)
                        with correlate(corr_id), _log_context(message, corr_id):
                            is_handled = await self._handle(handle, message)
                    finally:
                        self.seconds.observe(perf_counter() - began)
                    self._slots[slot] = None
                    if self._aborting.is_set():
                        return
                    await thread.wait_until_idle()
                    if not is_handled:
                        break
            finally:
                for message in run:
                    reason = STOPPED if self._aborting.is_set() else NOT_HANDLED
                    self._settlements.release(message, reason)

    def _make_call(self, thread: HandlerThread) -> Callable[[Any], Awaitable[Any]]:
        """Return the handler as a coroutine function."""
        handler = self._consumer.handler
        if handler.is_async:
            return handler.call

        async def call(argument: Any) -> Any:
            result = await thread.run(handler.call, argument)
            # A function that wraps a coroutine function, as many decorators do, returns its coroutine.
            return await result if inspect.isawaitable(result) else result

        return call

    def _make_handle(self, call: Callable[[Any], Awaitable[Any]]) -> Handle:
        """Return the handler within the middlewares."""

        async def handle(message: ReceivedMessage) -> Any:
            return await call(message)

        for middleware in reversed(self._consumer.middlewares):
            handle = middleware(handle)
        return handle

    async def _handle(self, handle: Handle, message: ReceivedMessage) -> bool:
        """Return whether the message was handled."""
        result, failure = await self._attempt(lambda: handle(message), [message])
        if failure is not None:
            self._fail(message, *failure)
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
                for message in messages if self._is_ending else ():
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
            self._fail(message, error, summarize(error))
            return False
        self.handled += 1
        self._settlements.ack(message, answer)
        return True

    def _fail(self, message: ReceivedMessage, error: BaseException, reason: str) -> None:
        self._log_failure(error, [message])
        self._give_back(message, Failure(error, reason))

    def _give_back(self, message: ReceivedMessage, failure: Failure) -> None:
        self.failed += not isinstance(failure.error, RetryLater)
        self._settlements.nack(message, self._consumer.retry.decide(message, *failure))

    def _log_failure(self, error: BaseException, messages: Sequence[ReceivedMessage]) -> None:
        """Log why a message, or a batch of them, was not handled."""
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
            return
        is_wanted = isinstance(error, PoisonMessage)
        if not is_wanted and (exception := describe_failure(error, messages)) is not None:
            facts["exception"] = exception
        logger().warning("worker.handler_failed", error=type(error).__qualname__, **facts)

    # -- what is held ---

    def _forget(self, messages: Sequence[ReceivedMessage]) -> None:
        for message in messages:
            self._held.pop(message.receipt, None)
            self._behind.discard(message.receipt)
        self._room.set()

    async def _extend_all(self) -> None:
        """Extend the visibility timeouts of unsettled messages."""
        visibility_ms = self._consumer.visibility_ms
        interval = visibility_ms / EXTENSIONS_PER_VISIBILITY / 1_000
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(interval / 2)
            now = loop.time()
            due = [receipt for receipt, since in self._held.items() if since <= now - interval]
            try:
                answers = await self._mailbox.extend_visibility(due, visibility_ms) if due else []
            except Exception as error:  # an outage, a refusal, or a defect: the next attempt may succeed
                logger().warning("worker.extend_failed", error=summarize(error))
                continue
            for receipt, answer in zip(due, answers, strict=True):
                if answer is None:
                    if receipt in self._held:
                        self._held[receipt] = now
                else:
                    logger().warning("worker.delivery_lost", error=str(answer))
                    self._held.pop(receipt, None)
                    self._behind.discard(receipt)
            self._room.set()
