"""Read models that are followed into ClickHouse: tests of other followers on chdb, and those of its own."""

import os
import shutil
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import pytest

from postroom.adapters.clickhouse import database, read_model_updater
from postroom.adapters.clickhouse.database import CURSOR, STAGED, ClickHouseDatabase, open_database
from postroom.adapters.clickhouse.read_model_updater import ClickHouseReadModelUpdater
from postroom.adapters.compose.projections import make_follower
from postroom.adapters.compose.queries import open_read_models, open_target
from postroom.adapters.compose.store import open_store
from postroom.application.messages import NewMessage
from postroom.application.ports.read_models import ReadModels
from postroom.application.telemetry import logger
from postroom.domain.errors import Unavailable
from postroom.domain.search import EventFilter
from postroom.projections.projection import MODULES
from tests.integration import follow_crash_worker, test_follow
from tests.integration.test_follow_crashes import is_caught_up, lived, running
from tests.projections import following, histories
from tests.projections.histories import (
    STORY,
    VARIED,
    Store,
    begin,
    build_without_spark,
    finish,
    fold_all,
    live,
    model_store,
    new_follower,
    reference,
    send,
    served_rows,
    take_extents,
)
from tests.properties.test_follow_agrees import agree
from tests.support.chdb import OpenFolder, open_folder
from tests.support.fork_server import shared_server
from tests.support.logs import capture_logs
from tests.support.own_process import IS_OWN_PROCESS, run_own_process
from tests.support.servers.clickhouse import ClickHouseServer, clickhouse_server
from tests.support.waiting import SECONDS, wait_until

POINTS = [
    ("change_messages", "after", 2, 1),
    ("apply_derived", "after", 2, 1),
    ("_commit", "before", 2, 1),  # all is written, and nothing visible
    ("_commit", "after", 2, 2),
]
"""Method, when, which call, and how many batches were visible by then."""

OWN = """
import polars as pl
from postroom.projections.projection import Column, MessageProjection

def derive(messages):
    priority = pl.when(pl.col("attempts") > 0).then(pl.lit("retry")).otherwise(pl.lit("first")).alias("turn")
    last = pl.col("changed_at").max().alias("last_at")
    return messages.group_by("mailbox", priority).agg(last, pl.col("redriven").sum())

PROJECTION = MessageProjection(
    "turns",
    (
        Column("mailbox", "text", "key"),
        Column("turn", "text", "key"),
        Column("last_at", "int", "max", required=True),
        Column("redriven", "int", "sum"),
    ),
    derive=derive,
)
"""

FAILURES = [("mailbox_v", "killed"), ("change", "paused"), ("commit", "paused"), ("is_committed", "killed")]
"""State of the server from a statement of a batch: the table of an insert, or the name of another one."""

if not IS_OWN_PROCESS:

    @pytest.mark.extended
    def test_chdb_is_followed_as_the_suites_say() -> None:
        run_own_process(__file__)

    @pytest.mark.parametrize("kind", ["sqlite", "jetstream"])
    def test_read_models_on_a_server_are_built_followed_and_queried(
        tmp_path: Path, kind: str, request: pytest.FixtureRequest
    ) -> None:
        is_file = kind == "sqlite"
        store: Store = tmp_path / "store.db" if is_file else request.getfixturevalue("jetstream_store")
        live(store, "box0@test", STORY)
        with clickhouse_server(tmp_path / "models") as server:
            build_without_spark(store, into=server.url)
            live(store, "box1@test", VARIED, mode="archive")
            with closing(make_follower(open_store(str(store)), into=server.url)) as follower:
                follower.advance()
            assert_complete(store, server.url)
            with (
                closing(open_read_models(str(store), server.url)) as models,
                models.scan(EventFilter()) as scan,
            ):
                assert sum(map(len, scan.pages)) == len(reference(store).rows["mailbox"])

    @pytest.mark.extended
    def test_a_server_that_is_paused_or_killed_within_a_batch_delays_it_but_loses_and_doubles_no_row(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = tmp_path / "store.db"
        live(store, "box0@test", STORY)
        with clickhouse_server(tmp_path / "models") as server, capture_logs() as logs:
            build_without_spark(store, into=server.url)
            monkeypatch.setattr(database, "ANSWER_SECONDS", 3)
            actions = {"paused": (server.pause, server.resume), "killed": (server.kill, server.serve)}
            for statement, state in FAILURES:
                fail, recover = actions[state]
                live(store, "box0@test", STORY)
                run_before(statement, fail, monkeypatch)
                logs.clear()
                logger().forget()  # the same outage is logged once in a while only
                with running(make_follower(open_store(str(store)), into=server.url)) as follower:
                    wait_until(lambda: outages(logs))
                    recover()
                    wait_until(partial(is_caught_up, follower))
                reason = "did not answer within 3 seconds" if state == "paused" else "can't be used: [Errno "
                assert outages(logs)[0]["error"].startswith(f"The ClickHouse database {server.url} {reason}")
                assert_complete(store, server.url)

    def test_cursors_that_a_server_inserts_late_have_no_effect(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = tmp_path / "store.db"
        live(store, "box0@test", STORY)
        late: list[Callable[[], object]] = []
        command = ClickHouseDatabase.command

        def delayed(self: ClickHouseDatabase, name: str, **names: object) -> object:
            if name != "commit" or late:
                return command(self, name, **names)
            late.append(lambda: command(self, name, **names))
            raise self.unavailable("no answer")

        with clickhouse_server(tmp_path / "models") as server:
            build_without_spark(store, into=server.url)
            live(store, "box0@test", STORY)
            monkeypatch.setattr(ClickHouseDatabase, "command", delayed)
            with closing(make_follower(open_store(str(store)), into=server.url)) as follower:
                with pytest.raises(Unavailable, match="no answer"):
                    follower.run(Event(), once=True)
                follower.run(Event(), once=True)
                late[0]()
            assert_complete(store, server.url)

    @pytest.mark.extended
    def test_a_query_on_a_server_that_is_paused_ends_with_one_sentence(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("postroom.adapters.clickhouse.read_models.SCAN_PAGE_ROWS", 20)
        store = tmp_path / "store.db"
        notes = (Random(number).randbytes(8_000).hex() for number in range(2_000))  # more than sockets buffer
        send(store, "box0@test", [NewMessage("shop", b"", attrs={"note": each}) for each in notes])
        with clickhouse_server(tmp_path / "models") as server:
            build_without_spark(store, into=server.url)
            monkeypatch.setattr(database, "ANSWER_SECONDS", 3)
            with closing(open_read_models(str(store), server.url)) as models:
                with pytest.raises(Unavailable) as cut_off:
                    scan_and_pause(models, server)
                with pytest.raises(Unavailable) as refused:
                    models.search(EventFilter())
            expected = (
                f"The ClickHouse database {server.url} did not answer within 3 seconds. Check that its "
            )
            assert str(cut_off.value).startswith(expected)
            assert str(refused.value).startswith(expected)

else:
    test_a_stop_undoes = test_follow.test_a_stop_undoes_the_batch_under_way_and_the_next_follower_applies_it
    test_a_version_that_becomes_active = (
        test_follow.test_a_version_that_becomes_active_meanwhile_is_followed_from_its_own_cursor
    )
    test_without_read_models = test_follow.test_without_read_models_it_says_what_to_do
    test_parked = test_follow.test_records_that_cannot_be_folded_are_parked_and_the_rest_goes_on
    test_retention = test_follow.test_what_retention_removes_from_the_log_goes_from_the_read_models

    @pytest.fixture(scope="module", autouse=True)
    def folder_of_chdb() -> Iterator[OpenFolder]:
        with open_folder() as opened:
            yield opened

    @pytest.fixture(autouse=True)
    def into_chdb(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(histories, "INTO", "chdb")

    @pytest.fixture
    def store(tmp_path: Path) -> Store:
        return tmp_path / "store.db"

    @pytest.fixture
    def read_models() -> Iterator[Callable[[Store], ReadModels]]:
        with ExitStack() as stack:
            yield lambda store: stack.enter_context(
                closing(open_read_models(str(store), histories.into(store)))
            )

    @pytest.mark.parametrize("most", [[30], [1_000]])
    def test_read_models_agree_with_the_reference_at_every_cursor(store: Store, most: list[int]) -> None:
        agree(store, [STORY, VARIED], most, few_events=1_000)

    @pytest.fixture(scope="module")
    def past(tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A store with a past and read models of its beginning, to be copied and left alone."""
        path = tmp_path_factory.mktemp("past") / "store.db"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(histories, "INTO", "chdb")
            lived(path)
            following.build(path)
        return path

    @pytest.mark.parametrize(("method", "when", "call", "visible"), POINTS)
    def test_killed_at_any_step_of_a_batch_it_is_as_if_nothing_had_happened(
        past: Path,
        folder_of_chdb: OpenFolder,
        tmp_path: Path,
        method: str,
        when: str,
        call: int,
        visible: int,
    ) -> None:
        folder_of_chdb.close()
        shutil.copytree(past.parent, tmp_path, symlinks=True, dirs_exist_ok=True)
        store = tmp_path / past.name
        arguments = [
            follow_crash_worker.__file__,
            str(store),
            method,
            when,
            str(call),
            str(histories.into(store)),
        ]
        worker = shared_server().run(arguments, tmp_path, os.environ, b"", SECONDS)
        assert worker.returncode == -signal.SIGKILL, worker.stderr.decode()
        with closing(new_follower(store)) as follower:
            covered = sum(follower.positions().values())
            assert covered == visible * follow_crash_worker.EVENTS_OF_A_BATCH
            follower.advance()
        assert following.rows(store) == reference(store).rows

    def test_what_another_process_made_visible_in_the_meantime_is_not_applied_twice(
        store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        live(store, "box0@test", STORY)
        following.build(store)
        commit = ClickHouseReadModelUpdater._commit
        with closing(new_follower(store)) as slow, closing(new_follower(store, max_events=9)) as other:

            def overtaken(*arguments: object) -> bool:
                monkeypatch.undo()
                monkeypatch.setattr(histories, "INTO", "chdb")
                assert other.step()
                return commit(*arguments)  # type: ignore[arg-type]

            monkeypatch.setattr(ClickHouseReadModelUpdater, "_commit", overtaken)
            assert slow.step()
            assert slow.counts.events == 0
            slow.advance()
        assert following.rows(store) == reference(store).rows

    def test_compaction_removes_what_ended_and_what_never_became_visible(
        store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        live(store, "box0@test", STORY)
        following.build(store)
        stop_before = ClickHouseReadModelUpdater._commit
        monkeypatch.setattr(ClickHouseReadModelUpdater, "_commit", lambda *_: False)
        with closing(new_follower(store)) as follower:
            follower.step()  # leaves rows that are not visible
        monkeypatch.setattr(ClickHouseReadModelUpdater, "_commit", stop_before)
        with closing(new_follower(store, max_events=30)) as follower:
            follower.advance()
        before = following.rows(store)
        monkeypatch.setattr(read_model_updater, "SNAPSHOT_SECONDS", 0)
        monkeypatch.setattr(read_model_updater, "MIN_REVISIONS", 1)
        database = open_database(str(histories.into(store)))
        read_model_updater.compact(database)
        with database.client() as client:
            for name, rows in before.items():
                assert client.command(f"SELECT count() FROM postroom.{name}_v1") == len(rows)
                assert client.command(f"SELECT count() FROM postroom.{name}_v1_ended") == 0
            assert client.command(f"SELECT count() FROM postroom.{CURSOR}") == 2
            assert not [name for name in database.tables() if name.startswith(STAGED)]
        assert following.rows(store) == before == reference(store).rows
        live(store, "box0@test", STORY)
        with closing(new_follower(store)) as follower:
            follower.advance()
        assert following.rows(store) == reference(store).rows

    def test_an_open_scan_reads_the_rows_as_of_its_beginning(
        store: Store, read_models: Callable[[Store], ReadModels]
    ) -> None:
        live(store, "box0@test", STORY)
        following.build(store, take_extents(store))
        models = read_models(store)
        before = list(models.search(EventFilter(limit=1_000)).items)
        with models.scan(EventFilter()) as scan:
            live(store, "box0@test", STORY)
            with closing(new_follower(store)) as follower:
                follower.advance()
            assert [item for page in scan.pages for item in page] == before[::-1]
        assert len(models.search(EventFilter(limit=1_000)).items) > len(before)

    def test_a_rebuild_of_one_model_is_refused_when_those_that_it_shares_advanced(store: Store) -> None:
        live(store, "box0@test", STORY)
        following.build(store)
        with begin(store, into=model_store(store), models=["backlog"]) as build:
            fold_all(store, build)
            with closing(new_follower(store)) as follower:
                follower.advance()
            with pytest.raises(Unavailable, match="advanced while backlog were built"):
                finish(build)
        assert following.rows(store) == reference(store).rows

    def test_a_projection_of_ones_own_is_followed(
        store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "postroom_test_turns.py").write_text(OWN)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv(MODULES, "postroom_test_turns")
        live(store, "box0@test", STORY)
        following.build(store)
        with closing(new_follower(store, max_events=20)) as follower:
            follower.advance()
        followed = following.rows(store)
        following.build(store, take_extents(store))
        assert followed["turns"] == following.rows(store)["turns"]
        assert len(followed["turns"]) == 2


def run_before(statement: str, action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run an action, once, before the next statement whose name begins so."""
    pending = [action]
    for method in ("command", "insert"):
        original = getattr(ClickHouseDatabase, method)

        def call(
            self: ClickHouseDatabase, name: str, *rest: Any, _original: Any = original, **names: Any
        ) -> Any:
            if pending and name.startswith(statement):
                pending.pop()()
            return _original(self, name, *rest, **names)

        monkeypatch.setattr(ClickHouseDatabase, method, call)


def scan_and_pause(models: ReadModels, server: ClickHouseServer) -> None:
    """Scan all messages, on a server that is paused after the first page."""
    with models.scan(EventFilter()) as scan:
        next(iter(scan.pages))
        server.pause()
        deque(scan.pages, 0)


def outages(logs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the outages that a follower logged."""
    return [each for each in logs if each["event"] == "follow.unavailable"]


def assert_complete(store: Store, url: str) -> None:
    """See that the read models at an address have all that the log has."""
    target = open_target(url)
    for name, rows in reference(store).rows.items():
        assert served_rows(target, name) == rows
