import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.sqlite import database, event_log, message_outbox
from postroom.adapters.sqlite.database import Durability
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.application.mailbox.stored_snapshots import fold
from postroom.application.messages import NewMessage, Sent
from postroom.application.queries.verify import VerifyLog
from postroom.domain.names import DEFAULT_MAILBOX, message_stream
from postroom.domain.policy import MailboxLimits
from tests.integration.power_cut import apsw_sqlite3
from tests.integration.power_cut.disk import CUTS, Disk, DurableFile, restore
from tests.support.logs import capture_logs

ROUNDS = 40


class Cut(NamedTuple):
    """What was left of the files at a moment, and what had been acknowledged until then."""

    files: dict[str, bytes]
    sent: int
    acked: int


class Experiment:
    """Run a sender and a receiver on the disk, and cut its power (a copy of it) at many moments."""

    def __init__(self, store: Path, kind: str, seed: int) -> None:
        self.store = store
        self.sent: list[str] = []
        self.acked: list[str] = []
        self.cuts: list[Cut] = []
        self._kind = kind
        self._chance = random.Random(seed)
        self.disk = Disk(self._maybe_cut)

    async def run(self, durability: Durability) -> None:
        async with open_mailbox(str(self.store), durability=durability) as mailbox:
            for number in range(ROUNDS):
                await asyncio.gather(self._send(mailbox, number), self._receive(mailbox))

    def _maybe_cut(self) -> None:
        if self._chance.random() < 0.1:
            files = self.disk.after_cut(self._kind, self._chance)
            self.cuts.append(Cut(files, len(self.sent), len(self.acked)))

    async def _send(self, mailbox: OwnedMailbox, number: int) -> None:
        payload = random.Random(number).randbytes(4_000)  # which can't be compressed
        new = [NewMessage(topic="orders", payload=payload) for _ in range(number % 5 + 1)]
        for sent in await mailbox.send_batch(new):
            assert isinstance(sent, Sent)
            self.sent.append(sent.message_id)

    async def _receive(self, mailbox: OwnedMailbox) -> None:
        received = await mailbox.receive_messages("orders", max_messages=3)
        assert await mailbox.ack_messages([each.receipt for each in received]) == [None] * len(received)
        self.acked += [each.message_id for each in received]

    def lost_by(self, cut: Cut, directory: Path) -> int:
        """Count the acknowledged sends and acks that are gone once the power is back; the log must verify."""
        restore(cut.files, str(directory))
        log = SqliteEventLog(directory / self.store.name, DEFAULT_MAILBOX)
        try:
            VerifyLog(log)()
            waiting = fold(log).messages
            streams = [message_stream(DEFAULT_MAILBOX, id_) for id_ in self.sent[: cut.sent]]
            lost = len(streams) - len(log.existing_streams(streams))
            acked = [message_stream(DEFAULT_MAILBOX, id_) for id_ in self.acked[: cut.acked]]
            return lost + sum(stream in waiting for stream in acked)
        finally:
            log.close()


class ShrinkingExperiment(Experiment):
    """Remove the settled past after every round, and give its space back to the disk."""

    async def run(self, durability: Durability) -> None:
        limits, reclaimed = MailboxLimits(max_store_bytes=1), 0
        async with open_mailbox(str(self.store), durability=durability, limits=limits) as mailbox:
            for number in range(ROUNDS // 4):
                await asyncio.gather(self._send(mailbox, number), self._receive(mailbox))
                with capture_logs() as logged:
                    await mailbox.retention.enforce_size()
                reclaimed += sum(each.get("reclaimed", 0) for each in logged)
        assert reclaimed > 0

    def lost_by(self, cut: Cut, directory: Path) -> int:
        """Count the messages that wait, as far as is known, and are gone once the power is back."""
        restore(cut.files, str(directory))
        log = SqliteEventLog(directory / self.store.name, DEFAULT_MAILBOX)
        try:
            VerifyLog(log)()
            waiting = fold(log).messages
            settled = set(self.acked)
            streams = [
                message_stream(DEFAULT_MAILBOX, id_) for id_ in self.sent[: cut.sent] if id_ not in settled
            ]
            return sum(stream not in waiting for stream in streams)
        finally:
            log.close()


@pytest.fixture(autouse=True)
def _small_wal() -> Iterator[None]:
    """Move the log back into the store file every few commits, so that cuts hit checkpoints too."""
    with patch.object(database, "CHECKPOINT_PAGES", 12):
        yield


async def cut_power(
    directory: Path, kind: str, durability: Durability, experiment_of: type[Experiment] = Experiment
) -> list[int]:
    """Return for each cut how much of what was acknowledged is gone."""
    # All modules that open the store, as two SQLite libraries in one process would break each other's locks.
    with (
        patch.object(database, "sqlite3", apsw_sqlite3),
        patch.object(event_log, "sqlite3", apsw_sqlite3),
        patch.object(message_outbox, "sqlite3", apsw_sqlite3),
    ):
        experiment = experiment_of(directory / "store.db", kind, seed=1)
        try:
            await experiment.run(durability)
        finally:
            experiment.disk.unregister()
    losses = []
    for number, cut in enumerate(experiment.cuts):
        after = directory / str(number)
        after.mkdir()
        losses.append(experiment.lost_by(cut, after))
    return losses


@pytest.mark.parametrize("kind", CUTS)
async def test_no_power_cut_loses_anything_that_was_acknowledged(kind: str, tmp_path: Path) -> None:
    losses = await cut_power(tmp_path, kind, "full")
    assert len(losses) >= 70, "together these are to be more than 200 cuts"
    assert not any(losses)


@pytest.mark.parametrize("kind", CUTS)
async def test_no_power_cut_hurts_a_store_that_shrinks(kind: str, tmp_path: Path) -> None:
    losses = await cut_power(tmp_path, kind, "full", ShrinkingExperiment)
    assert len(losses) >= 20
    assert not any(losses)


async def test_relaxed_durability_loses_acknowledged_messages_and_the_experiment_sees_it(
    tmp_path: Path,
) -> None:
    assert any(await cut_power(tmp_path, CUTS[0], "relaxed"))


async def test_a_disk_that_only_claims_to_sync_loses_messages_and_the_experiment_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DurableFile, "sync", lambda file: None)
    assert any(await cut_power(tmp_path, CUTS[0], "full"))
