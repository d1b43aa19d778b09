"""Traffic of the demo: the messages of a shop, the same in every run, and their consumers."""

import asyncio
from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING

import msgspec

from postroom.application.messages import NewMessage
from postroom.domain.errors import Rejected, Saturated

if TYPE_CHECKING:
    from postroom.adapters.compose.connect import SharedMailbox
    from postroom.application.messages import ReceivedMessage

MESSAGES = 20_000
TOPICS = ("orders.created", "orders.paid", "orders.shipped", "stock.changed", "mail.requested")
SHOPS = ("shop-berlin", "shop-lima", "shop-osaka")
DUPLICATES, POISON = 0.02, 0.001
BATCH = 100
SEED = 37
IDLE_SECONDS = 0.02


def generate(count: int = MESSAGES) -> Iterator[NewMessage]:
    """Yield `count` messages; some are duplicates, and some can't be processed."""
    random = Random(SEED)
    recent: list[NewMessage] = []
    for number in range(count):
        if recent and random.random() < DUPLICATES:
            yield random.choice(recent)
            continue
        customer = f"customer-{random.randrange(500)}"
        amount = round(random.uniform(1, 500), 2)
        if random.random() < POISON:
            amount = -amount
        order = {"order": number, "customer": customer, "amount": amount}
        message = NewMessage(
            topic=random.choice(TOPICS),
            payload=msgspec.json.encode(order),
            idem_key=f"order-{number}",
            sticky_key=customer,
            principal=random.choice(SHOPS),
            correlation_id=f"visit-{random.randrange(10**6):06}",
            content_type="application/json",
            attrs={"currency": "EUR"},
        )
        recent = [*recent[-20:], message]
        yield message


class Sender:
    """A sender of all messages in batches, which waits while the mailbox is saturated."""

    def __init__(self, postroom: "SharedMailbox", count: int = MESSAGES) -> None:
        self._postroom = postroom
        self._count = count
        self.sent = self.duplicates = 0

    async def __call__(self) -> None:
        """Send until all messages are accepted."""
        messages = list(generate(self._count))
        for start in range(0, len(messages), BATCH):
            batch = messages[start : start + BATCH]
            while batch:
                answers = await self._postroom.send_batch(batch)
                remaining = [
                    message
                    for message, answer in zip(batch, answers, strict=True)
                    if isinstance(answer, Saturated)
                ]
                for answer in answers:
                    self._count_answer(answer)
                if remaining:
                    await asyncio.sleep(IDLE_SECONDS)
                batch = remaining

    def _count_answer(self, answer: object) -> None:
        if isinstance(answer, Rejected):
            if not isinstance(answer, Saturated):
                raise answer
            return
        self.sent += 1
        self.duplicates += answer.duplicate  # type: ignore[attr-defined]


class Consumer:
    """A consumer that acknowledges messages, and returns those that can't be processed.

    Arguments:
        hangs_after: stop after this many messages, with the next batch in flight; None never stops.
    """

    def __init__(self, postroom: "SharedMailbox", name: str, hangs_after: int | None = None) -> None:
        self._postroom = postroom
        self._hangs_after = hangs_after
        self.name = name
        self.acked = self.nacked = 0
        self.unsettled: list[str] = []
        self.hangs = asyncio.Event()
        self._stopped = False

    def stop(self) -> None:
        """Return from `__call__` once all that was received is settled and counted."""
        self._stopped = True

    async def __call__(self) -> None:
        """Process messages until stopped."""
        while not self._stopped:
            idle = True
            for topic in TOPICS:
                messages = await self._postroom.receive_messages(
                    topic, max_messages=BATCH, consumer=self.name
                )
                if messages:
                    idle = False
                    await self._process(messages)
            if idle:
                await asyncio.sleep(IDLE_SECONDS)

    async def _process(self, messages: "list[ReceivedMessage]") -> None:
        if self._hangs_after is not None and self.acked >= self._hangs_after:
            self.unsettled = [message.message_id for message in messages]
            self.hangs.set()
            await asyncio.Event().wait()
        receipts = []
        for message in messages:
            amount = msgspec.json.decode(message.payload)["amount"]
            if amount >= 0:
                receipts.append(message.receipt)
                continue
            self.nacked += 1
            reason = f"amount {amount} is negative"
            await self._postroom.nack_messages([message.receipt], reason=reason)
        self.acked += (await self._postroom.ack_messages(receipts)).count(None)
