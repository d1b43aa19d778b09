"""The sink conformance suite on SQLite and PostgreSQL, and what only one of them can promise."""

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

from postroom.adapters.compose.backup import back_up
from postroom.adapters.compose.restore import restore
from postroom.adapters.postgres.database import connect
from postroom.adapters.postgres.url import is_url
from postroom.adapters.sqlite.read_model_file import views_path
from postroom.application.messages import NewMessage
from postroom.domain.errors import Unavailable
from postroom.domain.search import EventFilter
from tests.conformance.read_model_store import MAILBOX, OpenStore, ReadModelStoreConformance, fill, rows
from tests.projections import following
from tests.projections.histories import (
    Store,
    begin,
    build_without_spark,
    finish,
    fold_all,
    model_store,
    reference,
    send,
    take_extents,
)
from tests.support.fixtures import CreateDatabase, OpenReadModels
from tests.support.stores import copy_store
from tests.support.waiting import SECONDS, wait_until


@pytest.fixture(scope="module")
def postgres_past(create_shared_database: CreateDatabase, postgres_store_template: str) -> str:
    """A PostgreSQL store with a past, to be copied and left alone."""
    url = create_shared_database(postgres_store_template)
    fill(url)
    return url


@pytest.fixture(scope="module")
def sqlite_past(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite store with a past, to be copied and left alone."""
    path = tmp_path_factory.mktemp("past") / "store.db"
    fill(path)
    return path


@pytest.fixture
def file(sqlite_past: Path, tmp_path: Path) -> Path:
    """A SQLite store with a past."""
    return copy_store(sqlite_past, tmp_path)


@pytest.fixture(params=["sqlite", "postgres"])
def store(
    request: pytest.FixtureRequest,
    create_database: CreateDatabase,
) -> Store:
    """A store with a past, of either kind."""
    if request.param == "postgres":
        return create_database(request.getfixturevalue("postgres_past"))
    path: Path = request.getfixturevalue("file")
    return path


@pytest.fixture
def open_models(store: Store) -> OpenStore:
    return lambda: model_store(store)


class TestSinks(ReadModelStoreConformance):
    pass


def test_the_version_before_is_kept_and_older_ones_are_dropped(
    store: Store, read_models: OpenReadModels
) -> None:
    versions = [build_without_spark(store) for _ in range(3)]
    assert [bool(tables(store, version)) for version in versions] == [False, True, True]
    shown = read_models(store).status().versions
    assert [each.status for each in shown] == ["active", "retired", "dropped"]
    assert rest(store) == []


def test_a_second_rebuild_is_refused_while_one_runs(store: Store, read_models: OpenReadModels) -> None:
    with begin(store) as build:
        running = read_models(store).status().rebuild
        assert running is not None
        assert running.version == build.version
        with pytest.raises(Unavailable, match=f"being rebuilt by process {os.getpid()}"), begin(store):
            pass


def test_a_killed_rebuild_blocks_nobody_and_leaves_nothing(store: Store, read_models: OpenReadModels) -> None:
    served = build_without_spark(store)
    code = (
        "import os, signal, sys; from tests.projections.histories import begin, fold_all\n"
        "with begin(sys.argv[1]) as build:\n"
        "    fold_all(sys.argv[1], build); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run(
        [sys.executable, "-c", code, str(store)], cwd=Path(__file__).parents[2], check=False
    )
    assert killed.returncode == -signal.SIGKILL
    status = read_models(store).status()
    assert status.rebuild is None
    assert status.active is not None
    assert status.active.version == served
    assert tables(store, served + 1) != set()
    with begin(store, restart=True) as build:
        fold_all(store, build)
        finish(build)
    shown = read_models(store).status().versions
    assert [each.status for each in shown] == ["active", "failed", "retired"]
    assert shown[1].error == "the rebuild was killed"
    assert tables(store, served + 1) == set()
    assert rest(store) == []


def test_rolling_back_to_a_version_that_shares_what_has_read_on_is_refused(
    store: Store, open_models: OpenStore
) -> None:
    build_without_spark(store)
    with begin(store, models=["mailbox"]) as build:
        fold_all(store, build)
        finish(build)
    move_on(store, build.version)
    with pytest.raises(Unavailable, match=r"shares activity, backlog, dead_letters.*--only mailbox"):
        open_models().roll_back()


def test_rolling_back_to_a_version_that_shares_all_it_has_keeps_what_was_read(
    store: Store, open_models: OpenStore
) -> None:
    first = ("mailbox", "backlog")
    with begin(store, models=first) as build:
        fold_all(store, build)
        finish(build)
    with begin(store, models=["activity"]) as build:
        fold_all(store, build)
        finish(build)
    move_on(store, build.version)
    read = open_models().active_version()
    assert read is not None
    assert open_models().roll_back() < build.version
    again = open_models().active_version()
    assert again is not None
    assert set(again.models) == set(first)
    assert again.positions == read.positions


def test_a_search_that_began_before_a_flip_goes_on_in_the_version_after(
    store: Store, read_models: OpenReadModels
) -> None:
    build_without_spark(store)
    models = read_models(store)
    page = models.search(EventFilter(limit=2))
    for _ in range(3):  # the version that the first page came from is dropped
        build_without_spark(store)
    left = models.search(EventFilter(cursor=page.next_cursor, limit=1_000))
    found = {(item.mailbox, item.message_id) for item in (*page.items, *left.items)}
    assert len(found) == len(reference(store).rows["mailbox"])


def test_text_that_postgresql_cannot_hold_comes_back_as_it_was(store: Store, open_models: OpenStore) -> None:
    odd = NewMessage(topic="shop", payload=b"", principal="a\0b\x1ac", attrs={"it's\0": "ünïcode\x1a0"})
    send(store, MAILBOX, [odd])
    build_without_spark(store)
    assert rows(open_models()) == reference(store).rows
    assert any(row["principal"] == "a\0b\x1ac" for row in rows(open_models())["mailbox"])


def test_a_file_that_is_no_database_is_reported_to_who_rebuilds(file: Path) -> None:
    views_path(file).touch(0o600)
    views_path(file).write_bytes(b"not a database, but long enough to be taken for one" * 100)
    with pytest.raises(Unavailable, match=r"can't be used.*delete the file"), begin(file):
        pass
    views_path(file).unlink()
    assert build_without_spark(file) == 1


def test_what_a_killed_task_left_half_written_is_passed_over(file: Path) -> None:
    with begin(file) as build:
        fold_all(file, build)
        staging = next(views_path(file).parent.glob("*-staging-v*"))
        shutil.copytree(staging / "part-000000", staging / ".part-000000-half")
        finish(build)
    assert rows(model_store(file)) == reference(file).rows


def test_a_file_of_an_earlier_release_is_built_beside_what_it_has(
    file: Path, read_models: OpenReadModels
) -> None:
    views_path(file).touch(0o600)
    with closing(sqlite3.connect(views_path(file))) as connection:
        connection.execute(
            "CREATE TABLE projection (version INTEGER PRIMARY KEY AUTOINCREMENT, status TEXT, owner TEXT,"
            " started_at INTEGER, finished_at INTEGER, cuts TEXT, counts TEXT, seconds TEXT, error TEXT)"
        )
        connection.execute("INSERT INTO projection VALUES (4, 'active', 'it', 1, 2, '[]', '{}', '{}', NULL)")
        connection.execute("CREATE TABLE mailbox_v4 (id INTEGER)")
        connection.commit()
    assert build_without_spark(file) == 5
    assert [each.status for each in read_models(file).status().versions] == ["active", "retired"]


def test_what_was_staged_is_gone_after_a_crash_of_the_server_and_so_the_build_begins_anew(
    create_database: CreateDatabase, postgres_past: str
) -> None:
    store = create_database(postgres_past)
    with begin(store) as build:
        fold_all(store, build)
    with closing(connect(store, "test")) as database:  # as a crash does with tables that are not logged
        database.execute(f"TRUNCATE postroom.pieces_v{build.version}".encode())
    with begin(store) as again:
        assert again.version > build.version
        assert not again.parts_done()


def test_a_reader_of_a_version_that_is_to_go_does_not_hold_a_rebuild_up(
    create_database: CreateDatabase, postgres_past: str
) -> None:
    store = create_database(postgres_past)
    first = build_without_spark(store)
    with closing(connect(store, "a slow reader")) as reader, reader.transaction():
        reader.execute(f"SELECT count(*) FROM postroom.mailbox_v{first}".encode())
        for _ in range(2):
            build_without_spark(store)
        assert tables(store, first) != set()
    build_without_spark(store)
    assert tables(store, first) == set()


def test_tables_of_others_in_the_schema_of_a_store_are_kept(
    create_database: CreateDatabase, postgres_past: str, tmp_path: Path
) -> None:
    store = create_database(postgres_past)
    others = ("orders_v1", "orders_v2", "mailbox_v99", "staged_orders_v1", "pieces_orders_v2")
    with closing(psycopg.connect(store, autocommit=True)) as connection:
        for name in others:
            connection.execute(f"CREATE TABLE postroom.{name} AS SELECT 1 AS id".encode())
        for _ in range(3):
            build_without_spark(store)
        back_up(store, tmp_path / "backup")
        asyncio.run(restore(tmp_path / "backup", store, replace=True))
        assert tables(store, 3) == set()
        for name in others:
            assert connection.execute(f"SELECT id FROM postroom.{name}".encode()).fetchall() == [(1,)]
    assert build_without_spark(store) == 4
    assert rows(model_store(store)) == reference(store).rows


def test_a_database_that_was_not_migrated_is_reported_to_who_rebuilds(empty_database: str) -> None:
    for ask in (take_extents, lambda url: model_store(url).roll_back(), build_without_spark):
        with pytest.raises(Unavailable, match="run `postroom migrate"):
            ask(empty_database)


def test_who_may_not_create_tables_is_told_so(postgres_store: str) -> None:
    role = f"reader_{os.getpid()}"
    with closing(connect(postgres_store, "test")) as database:
        database.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'hush'".encode())
        database.execute(f"GRANT USAGE ON SCHEMA postroom TO {role}".encode())
        database.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA postroom TO {role}".encode())
        url = urlsplit(postgres_store)
        as_reader = url._replace(netloc=f"{role}:hush@{url.hostname}:{url.port}").geturl()
        with pytest.raises(
            Unavailable, match=r"denies a privilege that Postroom needs: permission denied.*grant it"
        ):
            build_without_spark(as_reader)
        database.execute(f"DROP OWNED BY {role}".encode())
        database.execute(f"DROP ROLE {role}".encode())


def move_on(store: Store, version: int) -> None:
    """Have a version read on by a record, as `follow` does."""
    statement = "UPDATE {}projection_cursor SET position = position + 1 WHERE version = {}"
    if is_url(str(store)):
        with closing(connect(str(store), "test")) as database:
            database.execute(statement.format("postroom.", version).encode())
        return
    with closing(sqlite3.connect(views_path(store))) as file:
        file.execute(statement.format("", version))
        file.commit()


def tables(store: Store, version: int) -> set[str]:
    """Return the tables of a version, those in which its rows were staged among them."""
    return {name for name in all_tables(store) if name.endswith(f"_v{version}")}


def rest(store: Store) -> list[str]:
    """Return what was staged and not removed."""
    if is_url(str(store)):
        return sorted(name for name in all_tables(store) if name.startswith(("pieces_", "staged_")))
    path = views_path(store)
    return sorted(each.name for each in path.parent.glob(f"{path.name}-staging*"))


def all_tables(store: Store) -> set[str]:
    if is_url(str(store)):
        with closing(connect(str(store), "test")) as database:
            found = database.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'postroom'")
            return {name for (name,) in found}
    with closing(sqlite3.connect(views_path(store))) as connection:
        return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def test_a_switch_of_versions_waits_for_the_batch_that_a_follower_applies(
    create_database: CreateDatabase, postgres_past: str
) -> None:
    store = create_database(postgres_past)
    following.build(store)
    lock = "SELECT FROM postroom.projection WHERE status = 'active' FOR SHARE"
    waiting = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with closing(connect(store, "follower")) as follower, closing(connect(store, "observer")) as observer:
        pool = ThreadPoolExecutor(1)
        with follower.transaction():
            follower.execute(lock)
            build = pool.submit(following.build, store)
            wait_until(lambda: observer.execute(waiting).fetchone() is not None)
            time.sleep(2.5)  # longer than a rebuild waits for other locks
            assert not build.done()
        version = build.result(SECONDS)
        pool.shutdown()
    active = model_store(store).active_version()
    assert active is not None
    assert active.version == version
