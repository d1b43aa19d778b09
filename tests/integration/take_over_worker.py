"""A process that sends, receives and acks by `connect`, and notes in a journal what it was answered.

    python -m tests.integration.take_over_worker STORE JOURNAL NAME COUNT STOP_FILE

Lines of the journal: `sending NUMBER`, `sent ID`, `got ID` with the time before the receive, `acked ID` with
the time after the ack, and `call START END`. Times are of the machine's monotonic clock, in ns. What the
process logs goes to its standard error.
"""

import asyncio
import logging
import sys
from pathlib import Path
from time import monotonic_ns
from typing import TextIO

from postroom import Mailbox, NewMessage, Unavailable, connect

TOPIC = "orders"
TOPICS = (TOPIC, "mail", "audit", "small")
"""The topic, and subscriptions that a test may create."""
VISIBILITY_MS = 2_000
SENDERS = RECEIVERS = 4
KEYS = 8
PAUSE_SECONDS = 0.05
"""Between two sends, so that processes are killed in the midst of them."""
TIMEOUT_MS = 60_000


def next_number(journal: Path) -> int:
    """Return the first number that no earlier run of this worker tried to send."""
    lines = journal.read_text("utf-8").splitlines() if journal.exists() else []
    return max((int(line.split()[1]) + 1 for line in lines if line.startswith("sending ")), default=0)


class Worker:
    """The senders and receivers of one process."""

    def __init__(self, mailbox: Mailbox, journal: TextIO, name: str, numbers: range, stop: Path) -> None:
        self.mailbox, self.journal, self.name, self.stop = mailbox, journal, name, stop
        self.numbers = iter(numbers)

    def note(self, *words: object) -> None:
        self.journal.write(" ".join(map(str, words)) + "\n")
        self.journal.flush()

    async def send(self) -> None:
        for number in self.numbers:
            self.note("sending", number)
            start = monotonic_ns()
            payload, key = f"{self.name} {number}".encode(), f"{self.name} {number % KEYS}"
            message = NewMessage(topic=TOPIC, payload=payload, sticky_key=key)
            sent = await self.mailbox.send_message(message)
            self.note("sent", sent.message_id)
            self.note("call", start, monotonic_ns())
            await asyncio.sleep(PAUSE_SECONDS)

    async def receive(self) -> None:
        while not self.stop.exists():
            start = monotonic_ns()
            messages = await self.mailbox.receive_messages(
                TOPICS, visibility_ms=VISIBILITY_MS, wait_ms=200, consumer=self.name
            )
            for message in messages:
                self.note("got", message.message_id, start)
            receipts = [message.receipt for message in messages]
            refusals = await self.mailbox.ack_messages(receipts) if receipts else []
            end = monotonic_ns()
            self.note("call", start, end)
            for message, refusal in zip(messages, refusals, strict=True):
                if refusal is None:
                    self.note("acked", message.message_id, end)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(SENDERS):
                tasks.create_task(self.send())
            for _ in range(RECEIVERS):
                tasks.create_task(self.receive())


async def main(store: str, journal: Path, name: str, count: int, stop: Path) -> None:
    numbers = range(next_number(journal), count)
    with journal.open("a", encoding="utf-8") as lines:
        while True:
            try:
                async with connect(store, timeout_ms=TIMEOUT_MS) as mailbox:
                    print("connected", flush=True)
                    await Worker(mailbox, lines, name, numbers, stop).run()
                    return
            except Unavailable as error:  # at the start, while processes are killed
                print(error, flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    store, journal, name, count, stop = sys.argv[1:]
    asyncio.run(main(store, Path(journal), name, int(count), Path(stop)))
