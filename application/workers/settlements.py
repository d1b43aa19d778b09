"""Acks and nacks of a consumer, sent in batches while its handlers run on."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from postroom.application.messages import ReceivedMessage
from postroom.application.operations.mailbox import Mailbox
from postroom.application.telemetry import logger
from postroom.domain.errors import Fenced, MailboxClosed, Rejected, Saturated, Unavailable
from postroom.domain.message import Receipt
from postroom.domain.policy import OutageBackoff, backoff_ms

BATCH = 1_000
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
        self._nacks: dict[tuple[str, int | None], list[ReceivedMessage]] = {}
        self._added = asyncio.Event()
        self._flushed = asyncio.Event()
        self._flushed.set()

    def ack(self, message: ReceivedMessage) -> None:
        """Settle a delivery whose handler returned."""
        self._acks.append(message)
        self._wake()

    def nack(self, message: ReceivedMessage, reason: str, delay_ms: int | None = None) -> None:
        """Fail a delivery; None delays the next by the policy's backoff."""
        self._nacks.setdefault((reason, delay_ms), []).append(message)
        self._wake()

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
            for n in range(0, len(acks), BATCH):
                await self._settle(self._mailbox.ack_messages, acks[n : n + BATCH])
            for (reason, delay_ms), messages in nacks.items():
                nack = partial(self._mailbox.nack_messages, reason=reason, delay_ms=delay_ms)
                await self._settle(nack, messages)
            if not self._added.is_set():
                self._flushed.set()

    def _wake(self) -> None:
        self._added.set()
        self._flushed.clear()

    async def _settle(
        self,
        settle: Callable[[Sequence[Receipt]], Awaitable[list[Rejected | None]]],
        messages: Sequence[ReceivedMessage],
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
                logger().warning("worker.settle_failed", error=str(error), pause_ms=pause_ms)
                await asyncio.sleep(pause_ms / 1_000)
            except Exception:  # a refusal of all, or a defect; the messages are delivered again
                logger().exception("worker.settle_refused")
                break
        for message, answer in zip(messages, answers, strict=False):
            if answer is not None:
                logger().warning("worker.settle_refused", message_id=message.message_id, error=str(answer))
        self._on_settled(messages)
