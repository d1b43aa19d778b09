"""Messages of a mailbox whose answers get lost and whose owner changes are linearizable."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.mailbox.engine import MailboxEngine
from postroom.domain.errors import BrokenLog, StaleReceipt
from postroom.domain.message import MessageAcked
from postroom.domain.policy import TopicPolicy
from postroom.domain.record import Event
from postroom.domain.settings import SettingsChanges
from tests.linearizability.checker import NotLinearizable, check_each
from tests.linearizability.history import Recorder
from tests.linearizability.models import REFUSED, message_model
from tests.linearizability.outcomes import message_histories, read_outcome
from tests.support.clocks import ManualClock
from tests.support.messages import MAILBOX, message

OWNERS = 3
CLIENTS = 3
STEPS = 20
LOST = 0.2
"""Share of the answers that get lost."""
POLICY = TopicPolicy(visibility_ms=1_000, max_attempts=1_000, shards=2)


class Client:
    """A client that sends, receives and acks, and to which some answers get lost.

    Arguments:
        believes: whether it takes a call without an answer for one that failed.
    """

    def __init__(self, number: int, seed: int, recorder: Recorder, *, believes: bool) -> None:
        self._name = f"client-{number}"
        self._random = Random(f"{seed} {number}")
        self._recorder = recorder
        self._believes = believes
        self._sent = 0

    async def run(self, mailbox: OwnedMailbox, clock: ManualClock) -> None:
        for _ in range(STEPS):
            if self._random.random() < 0.5:
                await self._send(mailbox)
            else:
                await self._receive(mailbox)
            if self._random.random() < 0.2:
                clock.advance(600)
            await asyncio.sleep(0)

    async def _send(self, mailbox: OwnedMailbox) -> None:
        self._sent += 1
        payload = f"{self._name} {self._sent}"
        call = self._recorder.call(payload, "send", [])
        await mailbox.send_message(message(payload.encode()))
        self._answer(call, True)

    async def _receive(self, mailbox: OwnedMailbox) -> None:
        call = self._recorder.call("", "receive", [])
        received = await mailbox.receive_messages("orders", max_messages=3)
        self._recorder.answer(call, [[each.payload.decode(), each.attempt] for each in received])
        for each in received:
            if self._random.random() < 0.7:
                call = self._recorder.call(each.payload.decode(), "ack", [each.attempt])
                try:
                    await each.ack()
                except StaleReceipt:
                    self._recorder.answer(call, REFUSED)
                else:
                    self._answer(call, True)

    def _answer(self, call: int, output: object) -> None:
        if self._random.random() >= LOST:
            self._recorder.answer(call, output)
        elif self._believes:
            self._recorder.answer(call, REFUSED)


async def use(log: MemoryEventLog, clients: list[Client]) -> None:
    """Have clients use a mailbox through changes of its owner."""
    clock = ManualClock()
    for owner in range(OWNERS):
        engine = MailboxEngine(log, clock)
        await engine.open(f"owner {owner}", settings=SettingsChanges.of(None, POLICY))
        mailbox = OwnedMailbox(engine, clock)
        await asyncio.gather(*(client.run(mailbox, clock) for client in clients))
        await engine.close()


def record(folder: Path, seed: int, *, believes: bool) -> int:
    """Record and check a history; return the number of operations."""
    folder = folder / str(seed)
    folder.mkdir()
    log = MemoryEventLog(MAILBOX)
    with ExitStack() as opened:
        clients = [
            Client(
                number,
                seed,
                opened.enter_context(Recorder(folder / f"{number}.journal", f"client-{number}")),
                believes=believes,
            )
            for number in range(CLIENTS)
        ]
        asyncio.run(use(log, clients))
    statuses = read_outcome(log.read()).statuses
    return check_each(message_model, message_histories(folder.glob("*.journal"), statuses))


def test_messages_are_neither_lost_nor_delivered_after_their_acks(tmp_path: Path) -> None:
    for seed in range(3):
        assert record(tmp_path, seed, believes=False) > CLIENTS * STEPS


def test_a_client_that_believes_that_a_call_without_answer_failed_is_found(tmp_path: Path) -> None:
    with pytest.raises(NotLinearizable, match="message client"):
        record(tmp_path, 0, believes=True)


def test_a_mailbox_that_forgets_acks_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = MemoryEventLog.replay_runs

    def forget(self: MemoryEventLog, after: int = 0) -> Iterator[tuple[int, Sequence[Event]]]:
        return (each for each in replay(self, after) if not isinstance(each[1][0], MessageAcked))

    monkeypatch.setattr(MemoryEventLog, "replay_runs", forget)
    with pytest.raises((NotLinearizable, BrokenLog)):
        record(tmp_path, 0, believes=False)
