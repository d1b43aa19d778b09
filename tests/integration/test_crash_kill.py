"""`kill -9` while messages are sent and received: what was acknowledged stays, what was settled stays so."""

import asyncio
import random
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.compose.queries import read_mailbox
from postroom.application.messages import NewMessage, Sent

KILLS = 20
VISIBILITY_MS = 250
TOPIC = "orders"


def message(key: str) -> NewMessage:
    return NewMessage(topic=TOPIC, payload=f"payload of {key}".encode(), idem_key=key)


# -- the process that gets killed: it says on stdout what the mailbox acknowledged ---


async def work(store: str, run: str) -> None:
    async with open_mailbox(store) as mailbox:
        await asyncio.gather(send(mailbox, run), receive(mailbox))


async def send(mailbox: OwnedMailbox, run: str) -> None:
    for number in count():
        keys = [f"{run}-{number}-{place}" for place in range(number % 4 + 1)]
        for key, sent in zip(keys, await mailbox.send_batch([message(key) for key in keys]), strict=True):
            assert isinstance(sent, Sent)
            say("sent", sent.message_id, key)


async def receive(mailbox: OwnedMailbox) -> None:
    while True:
        received = await mailbox.receive_messages(
            TOPIC, visibility_ms=VISIBILITY_MS, max_messages=4, wait_ms=100
        )
        for each in received:
            say("received", each.message_id)
        settled = received[: len(received) * 3 // 4 + 1]
        await mailbox.ack_messages([each.receipt for each in settled])
        for each in settled:
            say("acked", each.message_id)


def say(*words: str) -> None:
    print(*words, flush=True)


# -- the test ---


class Witness:
    """Remember what the killed processes were told."""

    def __init__(self) -> None:
        self.sent: dict[str, str] = {}
        self.acked: set[str] = set()

    def note(self, line: str) -> None:
        kind, id_, *key = line.split()
        if kind == "sent":
            assert id_ not in self.sent.values()
            self.sent[key[0]] = id_
        elif kind == "acked":
            self.acked.add(id_)
        else:
            assert id_ not in self.acked, f"{id_} was delivered again after its ack"


async def test_twenty_kills_lose_nothing_that_was_acknowledged_and_undo_no_ack(tmp_path: Path) -> None:
    store = str(tmp_path / "store.db")
    witness = Witness()
    moments = random.Random(1)
    for run in range(KILLS):
        run_until_killed(store, f"run{run}", moments.randint(1, 50), witness)
        await check(store, witness)
    assert len(witness.sent) > 5 * KILLS
    assert len(witness.acked) > KILLS
    await drain(store, witness)
    with read_mailbox(store) as reader:
        for id_ in witness.sent.values():
            ending = reader.get_message(id_).history[-1].event
            # Not every ack was answered, and a message whose attempts all timed out is dead.
            assert ending == "MessageAcked" or (ending == "MessageDeadLettered" and id_ not in witness.acked)


def run_until_killed(store: str, run: str, lines: int, witness: Witness) -> None:
    """Run a worker, kill it once it has said so many lines, and note all that it said."""
    with subprocess.Popen(
        [sys.executable, __file__, store, run], stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        for _ in range(lines):
            witness.note(worker.stdout.readline())
        worker.send_signal(signal.SIGKILL)
        for line in worker.stdout:
            if line.endswith("\n"):
                witness.note(line)
    assert worker.returncode == -signal.SIGKILL


async def check(store: str, witness: Witness) -> None:
    with read_mailbox(store) as reader:
        verified = reader.verify_log()
        assert verified.last - verified.first + 1 == sum(1 for _ in reader.log.read())
        assert verified.messages >= len(witness.sent)
    async with open_mailbox(store) as mailbox:
        key, id_ = list(witness.sent.items())[-1]
        assert await mailbox.send_message(message(key)) == Sent(id_, duplicate=True)


async def drain(store: str, witness: Witness) -> None:
    """Consume what is left."""
    async with open_mailbox(store) as mailbox:
        while received := await mailbox.receive_messages(TOPIC, wait_ms=2 * VISIBILITY_MS):
            for each in received:
                witness.note(f"received {each.message_id}")
            assert await mailbox.ack_messages([each.receipt for each in received]) == [None] * len(received)


if __name__ == "__main__":
    asyncio.run(work(*sys.argv[1:]))
