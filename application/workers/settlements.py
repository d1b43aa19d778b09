"""Settlements of a worker: acks and nacks in batches, repeated until the mailbox answers."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from postroom.application.mailbox.settle import NackOptions, with_results
from postroom.application.messages import MessageResult, ReceivedMessage
from postroom.application.operations.mailbox import Mailbox
from postroom.application.telemetry import logger
from postroom.domain.errors import (
    Fenced,
    FrameTooLarge,
    MailboxClosed,
    Rejected,
    Saturated,
    StaleReceipt,
    Unavailable,
)
from postroom.domain.message import Receipt
from postroom.domain.policy import OutageBackoff, backoff_ms

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
