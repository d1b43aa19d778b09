"""Versions of the read models: built beside each other, flipped, kept, rolled back, cleaned up."""

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import pytest

from postroom.adapters.postgres.database import connect
from postroom.adapters.postgres.url import is_url
from postroom.application.messages import NewMessage
from postroom.application.ports.read_models import views_path
from postroom.domain.errors import NotFound, Unavailable
from postroom.domain.search import EventFilter
from postroom.projections.logs import take_cuts
from postroom.projections.session import find_java
from postroom.projections.views import open_views, roll_back
from tests.fixtures import OpenReadModels
from tests.projections.histories import Store, build_without_spark, send

MAILBOX = "main@test"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A SQLite store with a message."""
    path = tmp_path / "store.db"
    send(path, MAILBOX, [NewMessage(topic="shop", payload=b"")])
    return path


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest) -> Store:
    """A store with a message, of either kind."""
    if request.param == "postgres":
        url = str(request.getfixturevalue("postgres_store"))
        send(url, MAILBOX, [NewMessage(topic="shop", payload=b"")])
        return url
    return cast(Path, request.getfixturevalue("file"))


def test_the_version_before_is_kept_and_older_ones_are_dropped(
    store: Store, read_models: OpenReadModels
) -> None:
    versions = [build_without_spark(store) for _ in range(3)]
    assert [bool(tables(store, version)) for version in versions] == [False, True, True]
    shown = read_models(store).status().versions
    assert [each.status for each in shown] == ["active", "retired", "dropped"]


def test_rolling_back_serves_the_version_before_at_once(store: Store, read_models: OpenReadModels) -> None:
    first = build_without_spark(store)
    send(store, MAILBOX, [NewMessage(topic="shop", payload=b"")])
    build_without_spark(store)
    models = read_models(store)
    assert len(models.search(EventFilter()).items) == 2
    assert roll_back(str(store)) == first
    assert len(models.search(EventFilter()).items) == 1


def test_without_a_version_before_there_is_nothing_to_roll_back_to(store: Store) -> None:
    with pytest.raises(NotFound, match="postroom project rebuild"):
        roll_back(str(store))
    build_without_spark(store)
    with pytest.raises(NotFound, match="no earlier version"):
        roll_back(str(store))


def test_a_second_rebuild_is_refused_while_one_runs(store: Store, read_models: OpenReadModels) -> None:
    with open_views(str(store)) as views:
        version = views.begin([])
        running = read_models(store).status().rebuild
        assert running is not None
        assert running.version == version
        with (
            pytest.raises(Unavailable, match=f"being rebuilt by process {os.getpid()}"),
            open_views(str(store)),
        ):
            pass


def test_a_killed_rebuild_blocks_nobody_and_leaves_nothing(store: Store, read_models: OpenReadModels) -> None:
    served = build_without_spark(store)
    code = (
        "import os, signal, sys; from postroom.projections.views import open_views\n"
        "with open_views(sys.argv[1]) as views: views.begin([]); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(store)], check=False)
    assert killed.returncode == -signal.SIGKILL
    status = read_models(store).status()
    assert status.rebuild is None
    assert status.active is not None
    assert status.active.version == served
    assert tables(store, served + 1) != set()
    build_without_spark(store)
    shown = read_models(store).status().versions
    assert [each.status for each in shown] == ["active", "failed", "retired"]
    assert shown[1].error == "the rebuild was killed"
    assert tables(store, served + 1) == set()


def test_a_search_that_began_before_a_flip_goes_on_in_the_version_after(
    store: Store, read_models: OpenReadModels
) -> None:
    send(store, MAILBOX, [NewMessage(topic="shop", payload=b"") for _ in range(5)])
    build_without_spark(store)
    models = read_models(store)
    page = models.search(EventFilter(limit=2))
    for _ in range(3):  # the version that the first page came from is dropped
        build_without_spark(store)
    rest = models.search(EventFilter(cursor=page.next_cursor))
    assert len({item.message_id for item in (*page.items, *rest.items)}) == 6


def test_a_file_that_is_no_database_is_reported_to_who_rebuilds(file: Path) -> None:
    views_path(file).write_bytes(b"not a database, but long enough to be taken for one" * 100)
    with pytest.raises(Unavailable, match=r"can't be used.*delete the file"), open_views(str(file)):
        pass
    views_path(file).unlink()
    assert build_without_spark(file) == 1


def test_without_java_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", "restored after the test, as it was before")
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(Unavailable, match="Java 17"):
        find_java()
    (tmp_path / "jdk" / "bin").mkdir(parents=True)
    (tmp_path / "jdk" / "bin" / "java").touch()
    find_java()
    assert os.environ["JAVA_HOME"] == str(tmp_path / "jdk")


def test_a_reader_of_a_version_that_is_to_go_does_not_hold_a_rebuild_up(postgres_store: str) -> None:
    first = build_without_spark(postgres_store)
    with closing(connect(postgres_store, "a slow reader")) as reader, reader.transaction():
        reader.execute(f"SELECT count(*) FROM postroom.mailbox_v{first}".encode())
        for _ in range(2):
            build_without_spark(postgres_store)
        assert tables(postgres_store, first) != set()
    build_without_spark(postgres_store)
    assert tables(postgres_store, first) == set()


def test_a_database_is_read_and_sent_to_while_its_read_models_are_built(
    postgres_store: str, read_models: OpenReadModels
) -> None:
    send(postgres_store, MAILBOX, [NewMessage(topic="shop", payload=b"")])
    build_without_spark(postgres_store)
    with open_views(postgres_store) as views:
        version = views.begin([])
        send(postgres_store, MAILBOX, [NewMessage(topic="shop", payload=b"")])
        assert read_models(postgres_store).stats().total_events == 1
        views.index(version, lambda done, total: None)
        views.flip(version, {}, {})
        assert read_models(postgres_store).stats().total_events == 0


def test_a_database_that_was_not_migrated_is_reported_to_who_rebuilds(empty_database: str) -> None:
    for ask in (take_cuts, roll_back, build_without_spark):
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
        with pytest.raises(Unavailable, match=r"forbids what Postroom needs: permission denied.*grant it"):
            build_without_spark(as_reader)
        database.execute(f"DROP OWNED BY {role}".encode())
        database.execute(f"DROP ROLE {role}".encode())


def tables(store: Store, version: int) -> set[str]:
    if is_url(str(store)):
        with closing(connect(str(store), "test")) as database:
            found = database.execute(
                "SELECT tablename FROM pg_tables WHERE schemaname = 'postroom' AND tablename ~ %s",
                [f"_v{version}$"],
            )
            return {name for (name,) in found}
    with closing(sqlite3.connect(views_path(store))) as connection:
        names = connection.execute("SELECT name FROM sqlite_master WHERE name GLOB ?", (f"*_v{version}*",))
        return {name for (name,) in names}
