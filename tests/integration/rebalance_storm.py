"""A rebalance storm: members join and leave a consumer group every second while messages are published.

Every message that Kafka acknowledged is stored once, byte for byte, in the order of its key. As a module:
`python -m tests.integration.rebalance_storm 60` storms for 60 seconds.
"""

import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import aclosing, suppress
from pathlib import Path

import msgspec

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.ingest import open_namespace
from postroom.application.ingest.namespace import Namespace
from postroom.application.mailbox.administer import CommandHandlers
from postroom.application.threads import cancel_and_wait
from postroom.domain.errors import Unavailable
from tests.integration.broker_drill import KafkaBroker, read_archive
from tests.integration.ingest_world import MAILBOX, namespace
from tests.support.stores import envelope

KEYS = 16
PARTITIONS = 12
MAX_MEMBERS = 5
BEAT_SECONDS = 1.0
PAUSE_SECONDS = 0.02
"""Between two messages of a key."""
PATIENCE_SECONDS = 600


class Figures(msgspec.Struct):
    """What one run saw.

    Arguments:
        deliveries: messages that members received; more than `messages` are redeliveries.
        served: members that received a message before they left.
    """

    messages: int = 0
    joined: int = 0
    left: int = 0
    cancelled: int = 0
    served: int = 0
    deliveries: int = 0
    seconds: float = 0.0


class Member:
    """A member of the group, which stores what it receives until it leaves."""

    def __init__(self, what: Namespace, mailbox: CommandHandlers, figures: Figures) -> None:
        self._what = what
        self._mailbox = mailbox
        self._figures = figures
        self._leaving = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def leave(self) -> None:
        """Store and commit what is in progress, and leave."""
        self._leaving.set()
        await self._task
        self._figures.left += 1

    async def cancel(self) -> None:
        """Leave at once, with messages in progress."""
        await cancel_and_wait(self._task)
        self._figures.cancelled += 1

    async def _run(self) -> None:
        while not self._leaving.is_set():
            with suppress(Unavailable):  # joining takes too long: a supervisor starts it again
                async with open_namespace(self._what) as opened:
                    ingester = opened.ingester(self._mailbox)
                    ingesting = asyncio.create_task(ingester.run())
                    try:
                        leaving = asyncio.create_task(self._leaving.wait())
                        await asyncio.wait({ingesting, leaving}, return_when=asyncio.FIRST_COMPLETED)
                        leaving.cancel()
                        ingester.stop()
                        await ingesting
                    finally:
                        await cancel_and_wait(ingesting)
                        self._figures.deliveries += ingester.counts.received
                        self._figures.served += ingester.counts.received > 0


async def storm(broker: KafkaBroker, folder: Path, seconds: float, beat: float = BEAT_SECONDS) -> Figures:
    """Let members join and leave for some seconds; check what the archive holds then.

    Arguments:
        beat: seconds between two changes of the group.
    """
    figures, began, dice = Figures(), time.monotonic(), random.Random(15)
    store = str(folder / "store.db")
    what = msgspec.structs.replace(namespace("", store, batch_size=100), source=broker.source())
    sent: dict[str, bytes] = {}
    await broker.create()
    is_over = asyncio.Event()

    async def publish(key: int) -> None:
        n = 0
        while not is_over.is_set():
            id_ = f"{key}-{n}"
            sent[id_] = envelope(id_)
            while not await broker.publish(str(key), sent[id_]):
                await asyncio.sleep(0.05)
            n += 1
            await asyncio.sleep(PAUSE_SECONDS)

    async with aclosing(broker), open_mailbox(store, MAILBOX, mode="archive") as mailbox:
        members = [Member(what, mailbox, figures)]
        async with asyncio.timeout(PATIENCE_SECONDS + seconds), asyncio.TaskGroup() as tasks:
            for key in range(KEYS):
                tasks.create_task(publish(key))
            ends_at = time.monotonic() + seconds
            while time.monotonic() < ends_at:
                await asyncio.sleep(beat)
                if len(members) == 1 or (len(members) < MAX_MEMBERS and dice.random() < 0.5):
                    members.append(Member(what, mailbox, figures))
                    figures.joined += 1
                else:
                    member = members.pop(dice.randrange(len(members)))
                    tasks.create_task(member.leave() if dice.random() < 0.5 else member.cancel())
            is_over.set()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(read_archive(store)) < len(sent):
                await asyncio.sleep(0.2)
        for member in members:
            await member.leave()
    figures.messages, figures.seconds = len(sent), round(time.monotonic() - began, 1)
    archive = read_archive(store)
    assert Counter(id_ for id_, _ in archive) == Counter(sent.keys())
    assert dict(archive) == sent
    for key in range(KEYS):
        numbers = [int(id_.partition("-")[2]) for id_, _ in archive if id_.startswith(f"{key}-")]
        assert numbers == sorted(numbers), f"key {key} is out of order"
    return figures


def main(seconds: str = "60") -> None:
    with tempfile.TemporaryDirectory() as name:
        broker = KafkaBroker(Path(name) / "broker", PARTITIONS)
        with broker.server:
            print(asyncio.run(storm(broker, Path(name), float(seconds))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
