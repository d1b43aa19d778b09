"""The run of one consumer: receive ahead, handle up to `concurrency` messages at once, settle in batches."""

import asyncio
import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any

from postroom.application.mailbox.administer import CommandHandlers
from postroom.application.metrics import new_histogram
from postroom.application.operations.mailbox import Mailbox
from postroom.application.received_messages import ReceivedMessage
from postroom.application.telemetry import log_context, logger, summarize
from postroom.application.threads import cancel_and_wait, wait_at_most
from postroom.application.tracing import correlate
from postroom.application.worker_reports import HandlerState
from postroom.application.workers.consumer import REFRESH_SECONDS, Consumer, Once, Topics, group_by_key
from postroom.application.workers.handler import HandlerThread, correlation_id_of
from postroom.application.workers.handler_calls import STOPPED, HandlerCalls, Handling, LoopWatch
from postroom.application.workers.retry import Settlements
from postroom.application.workers.sending import current_mailbox
from postroom.domain.arguments import MAX_TEXT_CHARS
from postroom.domain.errors import Fenced, MailboxClosed, Saturated, Unavailable
from postroom.domain.message import Receipt
from postroom.domain.policy import OutageBackoff, backoff_ms

WAIT_MS = 1_000
"""Wait of one receive; without messages, a stop may take as long, and so may noticing new topics."""
IDLE_WAIT_MS = 30_000
"""Wait of a receive after one without messages, if a stop can end it."""
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
NOT_HANDLED = "an earlier message of its key was not handled"
_handling: ContextVar[Handling | None] = ContextVar("postroom_handling", default=None)


async def pause_after(event: str, error: Exception, failures: int, stop: asyncio.Event) -> None:
    """Log a failure, and pause, the longer the more there were in a row; return early when `stop` is set."""
    pause_ms = backoff_ms(BACKOFF, failures, random.random())
    logger().retry(event, error=str(error), pause_ms=pause_ms)
    await wait_at_most(pause_ms / 1_000, stop.wait())


class ConsumerRun:
    """One run of a consumer.

    Arguments:
        name: recorded as the consumer of its deliveries.
        once: common end of runs when no message is ready; None to go on until stopped.
        watch: told of the messages that are handled.
    """

    def __init__(
        self,
        consumer: Consumer,
        mailbox: Mailbox,
        topics: Topics,
        name: str,
        *,
        once: Once | None,
        watch: LoopWatch,
    ) -> None:
        self._consumer = consumer
        self._mailbox = mailbox
        self._topics = topics
        self._name = name
        self._once = once
        self._watch = watch
        self._stopping = asyncio.Event()
        self._aborting = asyncio.Event()
        self._queue: asyncio.Queue[deque[ReceivedMessage] | None] = asyncio.Queue()
        self._held: dict[Receipt, float] = {}  # unsettled, with the time when the visibility timeout began
        self._behind: set[Receipt] = set()  # held, but an earlier message of the ordered key is handled first
        self._slots: dict[asyncio.Task[None], Handling | None] = {}  # with what each is handling
        self._room = asyncio.Event()
        self._waiting: asyncio.Task[Sequence[ReceivedMessage]] | None = None
        self._rate = 0.0
        self._settlements = Settlements(mailbox, self._forget)
        self._calls = HandlerCalls(consumer, self._settlements)
        self.seconds = new_histogram()
        """Duration of the handler's calls."""

    @property
    def topic(self) -> str:
        """Return the topic of the consumer, or the pattern."""
        return self._consumer.topic

    @property
    def handled(self) -> int:
        """Return the number of deliveries that were acked."""
        return self._calls.handled

    @property
    def failed(self) -> int:
        """Return the number of deliveries that failed."""
        return self._calls.failed

    @property
    def in_progress(self) -> int:
        """Return the number of messages in progress."""
        return sum(handling is not None for handling in self._slots.values())

    def describe(self) -> HandlerState:
        """Return what the worker reports of the consumer."""
        consumer = self._consumer
        name = consumer.handler.name[:MAX_TEXT_CHARS]
        counts = self.in_progress, self.handled, self.failed
        return HandlerState(consumer.topic, name, self._name, consumer.concurrency, *counts)

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
        if self._waiting is not None:
            self._waiting.cancel()

    def abort(self) -> None:
        """Cancel the handlers that run; their messages and those not yet handled are released."""
        self.stop()
        self._aborting.set()

    async def run(self) -> None:
        """Handle messages until stopped.

        Raises: Fenced when the mailbox was taken over, MailboxClosed when it was closed, InvalidRequest for a
            name that it refuses.
        """
        current_mailbox.set(self._mailbox)
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
        if self._calls.is_ending or error is None or isinstance(error, KeyboardInterrupt):
            return
        if handling is not None:
            self._calls.fail(handling.message, error, summarize(error))
        logger().error("worker.handler_restarted", consumer=self._name, error=type(error).__qualname__)
        self._start_slot(thread)

    async def _wait_for_slots(self) -> None:
        while self._slots:
            await asyncio.wait(list(self._slots))

    async def _end_slots(self) -> None:
        """End the handlers; the messages of those that ignore it are delivered again."""
        self._calls.is_ending = True
        if stuck := await cancel_and_wait(*self._slots, seconds=CANCEL_SECONDS):
            logger().error("worker.handlers_not_stopped", consumer=self._name, count=len(stuck))
            for handling in self._slots.values():
                for message in () if handling is None else (handling.message, *handling.others):
                    self._settlements.release(message, STOPPED)
            self._slots.clear()

    # -- receiving ---

    async def _receive_all(self) -> None:
        failures = 0
        loop = asyncio.get_running_loop()
        since, before = loop.time(), 0
        # An owner releases the messages of a cancelled receive; a server may not learn of the cancellation.
        may_wait = isinstance(self._mailbox, CommandHandlers) and not self._consumer.is_pattern
        may_wait &= self._once is None
        is_idle, can_wait = True, False
        while not self._stopping.is_set() and not (self._once and self._once.is_over.is_set()):
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
                receive = self._wait if can_wait else self._receive
                received = await receive(min(free, MAX_MESSAGES))
                failures = 0
                can_wait = not received and may_wait
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
            for group in group_by_key(received):
                if self._consumer.batch == 1:
                    self._behind.update(message.receipt for message in islice(group, 1, None))
                self._queue.put_nowait(group)
            if not self._once or received:
                is_idle = False
            elif is_idle:
                await self._once.wait_for_others(self)
            else:  # settled messages let others of their key follow, and handlers send others
                await self._settlements.wait_until_flushed()
                is_idle = not self._held
                if is_idle:
                    self._once.look_again()
                else:
                    self._room.clear()
                    await self._room.wait()

    async def _wait(self, count: int) -> Sequence[ReceivedMessage]:
        """Receive messages, and wait long for them, unless stopped in the meantime."""
        self._waiting = asyncio.create_task(self._receive(count, IDLE_WAIT_MS))
        try:
            await asyncio.wait([self._waiting])
            return () if self._waiting.cancelled() else self._waiting.result()
        finally:
            self._waiting.cancel()
            self._waiting = None

    async def _receive(self, count: int, wait_ms: int = WAIT_MS) -> Sequence[ReceivedMessage]:
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
            wait_ms=0 if self._once else wait_ms,
        )

    async def _pause(self, seconds: float) -> None:
        """Wait, or return early to stop."""
        await wait_at_most(seconds, self._stopping.wait())

    # -- handling ---

    async def _handle_batches(self, thread: HandlerThread) -> None:
        call = self._calls.make_call(thread)
        slot = asyncio.current_task()
        assert slot is not None
        rest: deque[ReceivedMessage] = deque()
        messages: list[ReceivedMessage] = []
        try:
            while (batch := await self._next_batch(rest)) is not None:
                if messages := [each for each in batch if each.receipt in self._held]:
                    context = log_context(topic=messages[0].topic, count=len(messages))
                    with self._handling(slot, messages[0], [*messages[1:], *rest]), context:
                        await self._calls.handle_batch(call, messages)
                    messages = []
                    if self._aborting.is_set():
                        return
                    await thread.wait_until_idle()
        finally:
            for message in [*messages[1:], *rest]:  # `_end_slot` fails the first one
                self._settlements.release(message, STOPPED)

    async def _next_batch(self, rest: deque[ReceivedMessage]) -> list[ReceivedMessage] | None:
        """Wait for a message, and return it with others that are there, up to a batch; None at the end.

        Arguments:
            rest: messages of an ordered key that the batch before had no room for.
        """
        if not rest:
            if (group := await self._queue.get()) is None:
                return None
            rest.extend(group)
        while len(rest) < self._consumer.batch and not self._queue.empty():
            if (group := self._queue.get_nowait()) is None:
                self._queue.put_nowait(None)  # for the next turn
                break
            rest.extend(group)
        return [rest.popleft() for _ in range(min(len(rest), self._consumer.batch))]

    async def _handle_all(self, thread: HandlerThread) -> None:
        handle = self._calls.make_handle(thread)
        slot = asyncio.current_task()
        assert slot is not None
        while (group := await self._queue.get()) is not None:
            try:
                # Another consumer may have it by now.
                while group and (message := group.popleft()).receipt in self._held:
                    self._behind.discard(message.receipt)
                    with self._handling(slot, message):
                        corr_id = correlation_id_of(message)
                        context = log_context(
                            corr_id=corr_id,
                            topic=message.topic,
                            message_id=message.message_id,
                            attempt=message.attempt,
                        )
                        with correlate(corr_id), context:
                            is_handled = await self._calls.handle(handle, message)
                    if self._aborting.is_set():
                        return
                    await thread.wait_until_idle()
                    if not is_handled:
                        break
            finally:
                for message in group:
                    reason = STOPPED if self._aborting.is_set() else NOT_HANDLED
                    self._settlements.release(message, reason)

    @contextmanager
    def _handling(
        self, slot: "asyncio.Task[Any]", message: ReceivedMessage, others: Sequence[ReceivedMessage] = ()
    ) -> Iterator[None]:
        """Note what a slot handles, and measure for how long; after an error, `_end_slot` needs the note."""
        self._slots[slot] = handling = Handling(self._consumer.handler.name, message, others)
        _handling.set(handling)
        self._watch.note()
        began = perf_counter()
        try:
            yield
        finally:
            self.seconds.observe(perf_counter() - began)
        self._slots[slot] = None

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
                logger().retry("worker.extend_failed", error=summarize(error))
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
