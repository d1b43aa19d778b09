"""A rebuild waits while others have locked the read models, and nothing that it built is thrown away."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from threading import Event, Thread, Timer

import psycopg
import pytest

from postroom.adapters.postgres import read_model_store
from postroom.adapters.sqlite import database, read_model_file
from postroom.domain.policy import MailboxLimits
from postroom.projections import rebuild as rebuilding
from postroom.projections.ports.read_model_store import LockTimeout
from postroom.projections.ports.runner import Progress
from postroom.projections.rebuild import RebuildReport
from tests.integration.test_follow_crashes import running
from tests.projections import following
from tests.projections.histories import (
    STORY,
    VARIED,
    Store,
    build_without_spark,
    live,
    model_store,
    new_follower,
    rebuild,
    reference,
    small_parts,
)
from tests.projections.local_runner import LocalRunner
from tests.support.stores import message, postgres_place, sqlite_place
from tests.support.waiting import SECONDS, until

LOCK_SECONDS = 0.5


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each attempt to lock fail soon."""
    monkeypatch.setattr(database, "BULK_BUSY_TIMEOUT_MS", 20)
    monkeypatch.setattr(read_model_store, "LOCK_TIMEOUT_MS", 20)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "store.db"
    live(path, "box0@test", STORY)
    build_without_spark(path)
    live(path, "box1@test", VARIED, mode="archive")
    return path


def rebuild_here(store: Store, progress: Callable[[Progress], None] = lambda _: None) -> RebuildReport:
    with small_parts():
        return rebuild(store, runner=LocalRunner(), progress=progress)


class LockAt:
    """Locks the read models of a SQLite store once, when a rebuild reports a phase.

    Arguments:
        seconds: how long; None until `release`.
    """

    def __init__(self, store: Path, phase: str, seconds: float | None = LOCK_SECONDS) -> None:
        self._file = sqlite3.connect(f"{store}-views", isolation_level=None, check_same_thread=False)
        self._phase = phase
        self._seconds = seconds
        self.is_used = False

    def __call__(self, progress: Progress) -> None:
        if progress.phase == self._phase and not self.is_used:
            self.is_used = True
            self._file.execute("BEGIN IMMEDIATE")
            if self._seconds is not None:
                Timer(self._seconds, self.release).start()

    def release(self) -> None:
        self._file.execute("ROLLBACK")
        self._file.close()


@pytest.mark.parametrize("phase", ["start", "fold", "index", "flip"])
def test_a_rebuild_goes_on_when_another_process_has_ended_its_transaction(store: Path, phase: str) -> None:
    before = model_store(store).active_version()
    assert before is not None
    lock = LockAt(store, phase)
    report = rebuild_here(store, lock)
    assert lock.is_used
    assert report.version == before.version + 1
    assert following.rows(store) == reference(store).rows


@pytest.mark.parametrize("phase", ["fold", "index", "flip"])
def test_what_was_built_is_kept_when_a_lock_is_held_for_too_long(
    store: Path, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = model_store(store).active_version()
    lock = LockAt(store, phase, None)
    with monkeypatch.context() as patch:
        for module in (read_model_file, rebuilding):
            patch.setattr(module, "LOCK_SECONDS", 0.0)
        with pytest.raises(LockTimeout, match="locked by another process"):
            rebuild_here(store, lock)
    lock.release()
    assert model_store(store).active_version() == before
    report = rebuild_here(store)
    assert before is not None
    assert report.version == before.version + 1
    assert report.resumed > 0
    assert following.rows(store) == reference(store).rows


def test_a_version_that_a_long_batch_locks_in_postgresql_is_replaced_afterwards(postgres_store: str) -> None:
    live(postgres_store, "box0@test", STORY)
    build_without_spark(postgres_store)
    with closing(psycopg.connect(postgres_store)) as batch:
        batch.execute("SELECT FROM postroom.projection WHERE status = 'active' FOR SHARE")
        tries = Event()

        def at(progress: Progress) -> None:
            if progress.phase == "flip" and not tries.is_set():
                tries.set()
                Timer(LOCK_SECONDS, batch.rollback).start()

        report = rebuild_here(postgres_store, at)
        assert tries.is_set()
    active = model_store(postgres_store).active_version()
    assert active is not None
    assert active.version == report.version
    assert following.rows(postgres_store) == reference(postgres_store).rows


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_rebuild_a_follower_and_retention_work_side_by_side(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    store: Store = request.getfixturevalue("postgres_store") if kind == "postgres" else tmp_path / "store.db"
    place = postgres_place(str(store)) if kind == "postgres" else sqlite_place(tmp_path)
    limits = MailboxLimits(history_retention_ms=1_000)
    reports: list[RebuildReport] = []
    async with place.open(limits=limits) as mailbox:

        async def work(name: str) -> None:
            await mailbox.send_batch([message(b"%d" % n, topic="orders") for n in range(5)])
            for each in await mailbox.receive_messages("orders", max_messages=4):
                await mailbox.ack_messages([each.receipt])
            place.clock.advance(600)
            await mailbox.retention.enforce_age()

        await work("first")
        build_without_spark(store)
        with running(new_follower(store)):
            thread = Thread(target=lambda: reports.append(rebuild_here(store)))
            thread.start()
            turns = 0
            while thread.is_alive() or turns < 10:
                await work(str(turns))
                turns += 1
            thread.join(SECONDS)
            await mailbox.send_batch([message(b"last", topic="orders")])
            rows = ("mailbox", "backlog", "dead_letters")
            await until(
                lambda: (
                    {name: following.rows(store)[name] for name in rows}
                    == {name: reference(store).rows[name] for name in rows}
                )
            )
    assert len(reports) == 1
