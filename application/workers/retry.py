"""Settlements of a worker: acks and nacks in batches, repeated until the mailbox answers.

A handler decides on a delivery that failed: whether it is retried, and when.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial

import msgspec

from postroom.application.mailbox.settle import NackOptions, with_results
from postroom.application.messages import MessageResult
from postroom.application.operations.mailbox import Mailbox
from postroom.application.received_messages import ReceivedMessage
from postroom.application.telemetry import logger
from postroom.application.text import UNITS_MS, duration_ms
from postroom.domain.arguments import check_int, check_items, check_type
from postroom.domain.errors import (
    Fenced,
    FrameTooLarge,
    InvalidRequest,
    MailboxClosed,
    PoisonMessage,
    Rejected,
    Saturated,
    StaleReceipt,
    Unavailable,
)
from postroom.domain.message import Receipt
from postroom.domain.policy import MAX_COUNT, MAX_DURATION_MS, OutageBackoff, backoff_ms

Duration = str | timedelta
"""A duration such as `500ms`, `30s`, `5m`, `1h` or `7d`, or a timedelta."""


class RetryLater(Exception):
    """A handler raises it to have its message delivered again after a time.

    Arguments:
        after: the time, which replaces every backoff.
        count: whether the delivery counts as an attempt; without it, a message may wait for any number of
            times.

    Raises: InvalidRequest for a time that is malformed, negative or above a century.
    """

    def __init__(self, after: Duration = "0", *, count: bool = True) -> None:
        self.after_ms = read_duration("after", after)
        self.count = check_type("count", count, bool)
        super().__init__(f"the handler asked for another delivery after {self.after_ms} ms")


class Reject(PoisonMessage):
    """A handler raises it to have its message dead-lettered at once; `PoisonMessage` does the same."""


class Backoff(msgspec.Struct, frozen=True):
    """Pauses between the attempts of a handler, in ms; `exponential` makes one."""

    first_ms: int
    max_ms: int
    factor: float
    jitter: float

    def pause_ms(self, attempt: int, jitter: float) -> int:
        """Return the pause after a failed attempt.

        Arguments:
            attempt: counted from 1.
            jitter: a uniform random number in [0, 1).
        """
        try:
            full = min(float(self.max_ms), self.first_ms * self.factor ** (attempt - 1))
        except OverflowError:
            full = self.max_ms
        return round(full * (1 - self.jitter * jitter))


def exponential(
    first: Duration,
    *,
    max: Duration = "10m",
    factor: float = 2.0,
    jitter: float = 0.2,
) -> Backoff:
    """Return a backoff that grows with each attempt.

    Arguments:
        first: the pause after the first attempt.
        max: the longest pause.
        factor: ratio of each pause to the pause before; 1 for equal pauses.
        jitter: the part, from 0 to 0.5, by which a pause may be shorter at random, so that messages that
            failed together do not come back together.

    Raises: InvalidRequest for an argument that is malformed or out of range.
    """
    first_ms, max_ms = read_duration("first", first), read_duration("max", max)
    if max_ms < first_ms:
        raise InvalidRequest(f"max must not be below first ({first_ms} ms); it was {max_ms} ms.")
    for name, value, least, most in (("factor", factor, 1, 1_000), ("jitter", jitter, 0, MAX_JITTER)):
        if type(value) not in (int, float) or not least <= value <= most:
            raise InvalidRequest(f"{name} must be a number from {least} to {most}; it was {value!r}.")
    return Backoff(first_ms, max_ms, float(factor), float(jitter))


MAX_JITTER = 0.5
"""No retry comes earlier than half of its backoff."""


class Retry(msgspec.Struct, frozen=True):
    """How the failed deliveries of a consumer are retried.

    The policy of the topic applies, too: after its `max_attempts`, a message is dead-lettered in any case.

    Arguments:
        attempts: deliveries after which a message is dead-lettered; None for `max_attempts` of its topic.
        backoff: pauses between them; None for the backoff of the topic's policy.
        never: exceptions after which a message is dead-lettered at once.
    """

    attempts: int | None = None
    backoff: Backoff | None = None
    never: tuple[type[BaseException], ...] = ()

    def validate(self) -> "Retry":
        """Return this.

        Raises: InvalidRequest naming the first field of a wrong type or out of range.
        """
        if self.attempts is not None:
            check_int("attempts", self.attempts, 1, MAX_COUNT)
        if self.backoff is not None:
            check_type("backoff", self.backoff, Backoff)
        for each in check_items("never", self.never):
            if not (isinstance(each, type) and issubclass(each, BaseException)):
                raise InvalidRequest(f"never must be a tuple of exception classes; one was {each!r}.")
        return self

    def decide(
        self, message: ReceivedMessage, error: BaseException, reason: str, traceback: str | None = None
    ) -> NackOptions:
        """Return how to nack a delivery whose handler raised an error."""
        is_last = self.attempts is not None and message.attempt >= self.attempts
        if isinstance(error, RetryLater) and not (is_last and error.count):
            return NackOptions(reason, error.after_ms, "retry" if error.count else "release")
        if is_last or isinstance(error, (PoisonMessage, *self.never)):
            return NackOptions(reason, action="reject", traceback=traceback)
        pause_ms = None
        if self.backoff is not None:
            pause_ms = self.backoff.pause_ms(message.attempt, random.random())
        return NackOptions(reason, pause_ms, traceback=traceback)


def read_duration(name: str, value: object, least: int = 0, most: int = MAX_DURATION_MS) -> int:
    """Return a duration in ms, or raise InvalidRequest unless it is from `least` to `most` ms."""
    ms = None
    if isinstance(value, timedelta):
        ms = round(value / timedelta(milliseconds=1))
    elif isinstance(value, str):
        ms = duration_ms(value)
    if ms is None or not least <= ms <= most:
        raise InvalidRequest(
            f"{name} must be a timedelta, or a duration such as 500ms, 30s, 5m, 1h or 7d, from {least}ms to "
            f"{most // UNITS_MS['d']}d; it was {str(value)[:40]!r}."
        )
    return ms


BATCH = 1_000
NACKS_AT_ONCE = 64
BACKOFF = OutageBackoff(50, 5_000)
"""Backoff while the mailbox can't be used."""


class Settlements:
    """Settled messages that the mailbox has not confirmed yet.

    Acks are final and idempotent, so they are repeated while the mailbox is unavailable.

    Arguments:
        on_settled: called with the messages that the mailbox has settled or refused to.
    """

    def __init__(self, mailbox: Mailbox, on_settled: Callable[[Sequence[ReceivedMessage]], None]) -> None:
        self._mailbox = mailbox
        self._on_settled = on_settled
        self._acks: list[ReceivedMessage] = []
        self._results: dict[Receipt, MessageResult] = {}
        self._nacks: dict[NackOptions, list[ReceivedMessage]] = {}
        self._added = asyncio.Event()
        self._flushed = asyncio.Event()
        self._flushed.set()

    def ack(self, message: ReceivedMessage, result: MessageResult | None = None) -> None:
        """Settle a delivery whose handler returned."""
        self._acks.append(message)
        if result is not None:
            self._results[message.receipt] = result
        self._wake()

    def nack(self, message: ReceivedMessage, options: NackOptions) -> None:
        """Give a delivery back; see `Mailbox.nack_messages`."""
        self._nacks.setdefault(options, []).append(message)
        self._wake()

    def release(self, message: ReceivedMessage, reason: str) -> None:
        """Return a message that was not handled to the queue."""
        self.nack(message, NackOptions(reason, action="release"))

    async def wait_until_flushed(self) -> None:
        """Return when the mailbox has answered all of them."""
        await self._flushed.wait()

    async def run(self) -> None:
        """Send settlements until cancelled; those added in the meantime go together in the next batch."""
        while True:
            await self._added.wait()
            self._added.clear()
            acks, self._acks = self._acks, []
            nacks, self._nacks = self._nacks, {}
            results, self._results = self._results, {}
            ack = with_results(self._mailbox.ack_messages, results)
            for n in range(0, len(acks), BATCH):
                await self._settle(ack, acks[n : n + BATCH])
            failed = list(nacks.items())  # each may have a reason and a delay of its own
            for n in range(0, len(failed), NACKS_AT_ONCE):
                await asyncio.gather(*(self._nack(*each) for each in failed[n : n + NACKS_AT_ONCE]))
            if not self._added.is_set():
                self._flushed.set()

    def _wake(self) -> None:
        self._added.set()
        self._flushed.clear()

    async def _nack(self, options: NackOptions, messages: Sequence[ReceivedMessage]) -> None:
        nack = partial(self._mailbox.nack_messages, **options._asdict())
        await self._settle(nack, messages, is_release=options.action == "release")

    async def _settle(
        self,
        settle: Callable[[Sequence[Receipt]], Awaitable[list[Rejected | None]]],
        messages: Sequence[ReceivedMessage],
        *,
        is_release: bool = False,
    ) -> None:
        receipts = [message.receipt for message in messages]
        answers: list[Rejected | None] = []
        failures = 0
        while True:
            try:
                answers = await settle(receipts)
                break
            except (Fenced, MailboxClosed) as error:  # the next owner delivers the messages again
                logger().warning("worker.settle_failed", error=str(error))
                break
            except (Saturated, Unavailable) as error:
                failures += 1
                pause_ms = backoff_ms(BACKOFF, failures, random.random())
                logger().retry("worker.settle_failed", error=str(error), pause_ms=pause_ms)
                await asyncio.sleep(pause_ms / 1_000)
            except Exception:  # a refusal of all, or a defect; the messages are delivered again
                logger().exception("worker.settle_refused")
                break
        refused: list[ReceivedMessage] = []
        for message, answer in zip(messages, answers, strict=False):
            # The owner releases messages itself when an earlier one of their ordered key fails.
            if answer is not None and not (is_release and isinstance(answer, StaleReceipt)):
                logger().warning("worker.settle_refused", message_id=message.message_id, error=str(answer))
            if isinstance(answer, FrameTooLarge):  # of its result: the delivery failed
                refused.append(message)
                self.nack(message, NackOptions(str(answer)))
        self._on_settled([each for each in messages if each not in refused] if refused else messages)
