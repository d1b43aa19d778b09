"""A follower that is killed at any step leaves nothing half done, and the next one goes on where it was."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

import pytest

from postroom.adapters.embedded.postgres import PostgresServer
from postroom.adapters.postgres.migrate import migrate
from postroom.projections.follow import Follower
from postroom.projections.logs import take_cuts
from tests.integration import follow_crash_worker
from tests.projections import following
from tests.projections.histories import STORY, VARIED, Store, live, reference

POINTS = [
    ("heads", "before", 2, 1),
    ("records", "before", 3, 1),  # each batch reads two mailboxes
    ("records", "after", 4, 1),
    ("apply", "before", 2, 1),
    ("_move", "after", 2, 1),
    ("_insert_sent", "before", 2, 1),
    ("_insert_sent", "after", 2, 1),
    ("_apply_derived", "after", 2, 1),
    ("_park", "after", 2, 1),  # nothing is left but to commit
    ("apply", "after", 2, 2),  # it is committed, and nobody was told
    ("apply", "after", 1, 1),
]
"""Method, when, which call, and how many batches were committed by then."""


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    path: Store = tmp_path / "store.db"
    if request.param == "postgres":
        path = request.getfixturevalue("postgres_store")
    lived(path)
    following.build(path)
    return path


@pytest.mark.parametrize(
    ("method", "when", "call", "committed"), POINTS, ids=["-".join(map(str, point[:3])) for point in POINTS]
)
def test_killed_at_any_step_of_a_batch_it_is_as_if_nothing_had_happened(
    store: Store, method: str, when: str, call: int, committed: int
) -> None:
    worker = subprocess.run(
        [sys.executable, "-P", follow_crash_worker.__file__, str(store), method, when, str(call)],
        capture_output=True,
        check=False,
    )
    assert worker.returncode == -signal.SIGKILL, worker.stderr.decode()
    with closing(Follower(str(store), most_events=5)) as follower:
        covered = sum(follower.positions().values())
        assert covered == committed * follow_crash_worker.EVENTS_OF_A_BATCH
        follower.advance()
    assert_complete(store)


def test_a_database_that_is_killed_and_comes_back_is_followed_on() -> None:
    with TemporaryDirectory(prefix="postroom-follow-") as folder, PostgresServer(Path(folder)) as server:
        migrate(server.url(), "store")
        lived(server.url())
        following.build(server.url())
        with running(Follower(server.url(), most_events=3)) as follower:
            wait_for(lambda: follower.counts.batches >= 2)
            server.kill()
            wait_for(lambda: follower.counts.outages >= 1)
            server.start()
            wait_for(lambda: is_caught_up(follower))
        assert_complete(server.url())
        server.kill()


@contextmanager
def running(follower: Follower) -> Iterator[Follower]:
    stop = Event()
    thread = Thread(target=follower.run, args=(stop,))
    thread.start()
    try:
        yield follower
    finally:
        stop.set()
        thread.join()
        follower.close()


def is_caught_up(follower: Follower) -> bool:
    lags = follower.counts.lags
    return bool(lags) and all(lag.events == 0 for lag in lags.values())


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def lived(store: Store) -> None:
    live(store, "box0@test", STORY)
    live(store, "box1@test", VARIED, mode="archive")


def assert_complete(store: Store) -> None:
    """See that the read models say all that the log does, and that the cursor is at its end."""
    assert following.rows(store) == reference(store).rows
    with closing(Follower(str(store))) as follower:
        assert follower.positions() == {cut.name: cut.last for cut in take_cuts(str(store))}
