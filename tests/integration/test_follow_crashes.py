"""A follower that is killed at any step leaves nothing half done, and the next one goes on where it was."""

import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest

from postroom.adapters.postgres.migrate import migrate
from postroom.projections.follow import Follower
from tests.integration import follow_crash_worker
from tests.projections import following
from tests.projections.histories import STORY, VARIED, Store, live, new_follower, reference, take_extents
from tests.support.fixtures import CreateDatabase
from tests.support.fork_server import shared_server
from tests.support.servers.postgres import PostgresServer
from tests.support.stores import copy_store
from tests.support.waiting import SECONDS, wait_until

pytestmark = pytest.mark.extended

POINTS = [
    ("heads", "before", 2, 0),
    ("heads", "before", 3, 1),
    ("_affected_messages", "before", 2, 1),
    ("_affected_messages", "after", 2, 1),
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


@pytest.fixture(scope="module")
def sqlite_past(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a past and its read models, to be copied and left alone."""
    path = tmp_path_factory.mktemp("past") / "store.db"
    lived(path)
    following.build(path)
    return path


@pytest.fixture(scope="module")
def postgres_past(create_shared_database: CreateDatabase, postgres_store_template: str) -> str:
    """The same in PostgreSQL."""
    url = create_shared_database(postgres_store_template)
    lived(url)
    following.build(url)
    return url


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "sqlite":
        return copy_store(request.getfixturevalue("sqlite_past"), tmp_path)
    create: CreateDatabase = request.getfixturevalue("create_database")
    return create(request.getfixturevalue("postgres_past"))


@pytest.mark.parametrize(
    ("method", "when", "call", "committed"), POINTS, ids=["-".join(map(str, point[:3])) for point in POINTS]
)
def test_killed_at_any_step_of_a_batch_it_is_as_if_nothing_had_happened(
    store: Store,
    tmp_path: Path,
    method: str,
    when: str,
    call: int,
    committed: int,
) -> None:
    arguments = [follow_crash_worker.__file__, str(store), method, when, str(call)]
    worker = shared_server().run(arguments, tmp_path, os.environ, b"", SECONDS)
    assert worker.returncode == -signal.SIGKILL, worker.stderr.decode()
    with closing(new_follower(store, max_events=5)) as follower:
        covered = sum(follower.positions().values())
        assert covered == committed * follow_crash_worker.EVENTS_OF_A_BATCH
        follower.advance()
    assert_complete(store)


def test_a_database_that_is_killed_and_comes_back_is_followed_on(postgres_server: PostgresServer) -> None:
    url = postgres_server.url()
    migrate(url, "store")
    lived(url)
    following.build(url)
    with running(new_follower(url, max_events=3)) as follower:
        wait_until(lambda: follower.counts.batches >= 2)
        postgres_server.kill()
        wait_until(lambda: follower.counts.outages >= 1)
        postgres_server.start()
        wait_until(lambda: is_caught_up(follower))
    assert_complete(url)


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


def lived(store: Store) -> None:
    live(store, "box0@test", STORY)
    live(store, "box1@test", VARIED, mode="archive")


def assert_complete(store: Store) -> None:
    """See that the read models say all that the log does, and that the cursor is at its end."""
    assert following.rows(store) == reference(store).rows
    with closing(new_follower(store)) as follower:
        assert follower.positions() == {extent.name: extent.last for extent in take_extents(store)}
