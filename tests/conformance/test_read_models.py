"""The read models conformance suite on every adapter, and what only one of them can promise."""

import asyncio
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.queries import open_read_models
from postroom.adapters.postgres.database import connect
from postroom.adapters.postgres.read_models import PostgresReadModels
from postroom.adapters.sqlite.read_model_file import views_path
from postroom.application.messages import NewMessage
from postroom.application.ports.dead_letters import DeadLetterFilter
from postroom.application.ports.facets import SuggestionField
from postroom.application.ports.read_models import BacklogFilter, ReadModels
from postroom.domain.errors import InvalidRequest, NotFound, Rejected, Unavailable
from postroom.domain.search import EventFilter
from tests.conformance.read_models import BODIES, TOLD, Build, ReadModelsConformance, SendOne
from tests.conformance.search_statistics import SearchStatisticsConformance
from tests.projections import histories
from tests.projections.histories import STORY, VARIED, Receive, Send, build_without_spark, live
from tests.support.fixtures import CreateDatabase, OpenReadModels
from tests.support.stores import copy_store, envelope

BATCH = 500
EARLIER_PLAN = "UPDATE {}projection SET plan = replace(plan, '\"format\":', '\"later\":')"
"""Makes the plan of a version one of a release whose tables had another format."""


def fill(store: Path | str) -> None:
    """Give a store a past and read models of it."""
    live(store, "box0@test", [*STORY, *VARIED, *map(Send, TOLD), Receive("shop")])
    live(store, "box1@test", [*STORY, *VARIED])
    build_without_spark(store, BODIES)


@pytest.fixture(scope="module")
def sqlite_past(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite store with a past, to be copied and left alone."""
    path = tmp_path_factory.mktemp("past") / "store.db"
    fill(path)
    return path


@pytest.fixture
def store(sqlite_past: Path, tmp_path: Path) -> Path:
    return copy_store(sqlite_past, tmp_path)


@pytest.fixture(scope="module")
def postgres_past(create_shared_database: CreateDatabase, postgres_store_template: str) -> str:
    """A PostgreSQL store with a past, to be copied and left alone."""
    url = create_shared_database(postgres_store_template)
    fill(url)
    return url


@pytest.fixture(params=["few messages", "many messages"])
def models(
    request: pytest.FixtureRequest, store: Path | str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ReadModels]:
    if request.param == "many messages":  # so many that every bound of the query planner is passed
        monkeypatch.setattr("postroom.adapters.sqlite.read_models.SAMPLE_ROWS", 3)
        monkeypatch.setattr("postroom.adapters.sql.access_path.MAX_SELECTIVE_ROWS", 4)
        monkeypatch.setattr("postroom.adapters.sql.access_path.SUFFICIENT_ROWS", 1)
        monkeypatch.setattr("postroom.adapters.sql.access_path.MAX_CANDIDATES", 4)
        monkeypatch.setattr("postroom.adapters.sql.access_path.MAX_COUNTED_ROWS", 12)
        monkeypatch.setattr("postroom.adapters.sql.search.MAX_BRANCHES", 2)
    with closing(open_read_models(str(store))) as opened:
        yield opened


@pytest.fixture
def build(store: Path | str) -> Build:
    return lambda: build_without_spark(store, BODIES)


@pytest.fixture
def send(store: Path | str) -> SendOne:
    def send_one(message: NewMessage) -> None:
        histories.send(store, "box0@test", [message])

    return send_one


class TestSqliteReadModels(ReadModelsConformance, SearchStatisticsConformance):
    pass


class TestPostgresReadModels(ReadModelsConformance, SearchStatisticsConformance):
    @pytest.fixture
    def store(self, create_database: CreateDatabase, postgres_past: str) -> str:
        return create_database(postgres_past)


@pytest.fixture(params=["sqlite", "postgres"])
def unbuilt(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """A store with a message, of which nothing was built yet."""
    store: Path | str = tmp_path / "store.db"
    if request.param == "postgres":
        store = str(request.getfixturevalue("postgres_store"))
    histories.send(store, "main@test", [NewMessage(topic="shop", payload=b"")])
    return store


def test_before_the_first_rebuild_every_question_says_what_to_run(
    unbuilt: Path | str, read_models: OpenReadModels
) -> None:
    models = read_models(unbuilt)
    for ask in (
        lambda: models.search(EventFilter()),
        lambda: models.backlog(BacklogFilter()),
        lambda: models.dead_letters(DeadLetterFilter()),
        models.stats,
        lambda: models.facets(EventFilter()),
        lambda: models.timeline(EventFilter()),
        lambda: models.suggest(SuggestionField.TOPIC, ""),
    ):
        with pytest.raises(NotFound, match="postroom views rebuild"):
            ask()
    status = models.status()
    assert status.active is None
    assert [each.lag for each in status.lags] == [each.head for each in status.lags]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_read_models_in_the_format_of_an_earlier_release_say_to_rebuild(
    request: pytest.FixtureRequest, kind: str, tmp_path: Path, read_models: OpenReadModels
) -> None:
    earlier: Path | str = tmp_path / "store.db"
    if kind == "postgres":
        earlier = str(request.getfixturevalue("postgres_store"))
    histories.send(earlier, "main@test", [NewMessage(topic="shop", payload=b"")])
    build_without_spark(earlier)
    if isinstance(earlier, Path):
        with closing(sqlite3.connect(views_path(earlier))) as file:
            file.execute(EARLIER_PLAN.format(""))
            file.commit()
    else:
        with closing(connect(earlier, "test")) as database:
            database.execute(EARLIER_PLAN.format("postroom.").encode())
    models = read_models(earlier)
    with pytest.raises(Unavailable, match=r"built by an earlier release; rebuild them"):
        models.search(EventFilter())
    with closing(histories.new_follower(earlier)) as follower, pytest.raises(InvalidRequest, match="rebuild"):
        follower.advance()
    assert models.status().active is not None
    build_without_spark(earlier)
    assert len(models.search(EventFilter(text="sho", match="shop")).items) == 1
    with pytest.raises(Unavailable, match=r"built by an earlier release; rebuild them"):
        histories.model_store(earlier).roll_back()


# -- SQLite only ---


def test_the_file_is_readable_by_its_owner_only(store: Path) -> None:
    assert stat.S_IMODE(views_path(store).stat().st_mode) == 0o600


def test_a_file_that_is_no_database_is_reported(store: Path, read_models: OpenReadModels) -> None:
    views_path(store).write_bytes(b"not a database, but long enough to be taken for one" * 100)
    for suffix in ("-wal", "-shm"):
        views_path(store).with_name(views_path(store).name + suffix).unlink(missing_ok=True)
    with pytest.raises(Unavailable, match=r"can't be read.*rebuild"):
        read_models(store).search(EventFilter())


def test_every_index_of_the_rfc_is_there(store: Path) -> None:
    connection = sqlite3.connect(views_path(store))
    indexed = {
        connection.execute(f"SELECT name FROM pragma_index_info('{name}') WHERE seqno = 0").fetchone()[0]
        for (name,) in connection.execute("SELECT name FROM pragma_index_list('mailbox_v1')")
    }
    connection.close()
    assert {"timestamp", "topic", "principal", "correlation_id", "trace_id", "message_id"} <= indexed


@pytest.fixture(scope="module")
def long_past(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite store with thousands of messages that have the same headers."""
    path = tmp_path_factory.mktemp("long-past") / "store.db"
    message = NewMessage(topic="shop", payload=b"", attrs={"kind": "plain"})

    async def send() -> None:
        async with open_mailbox(str(path), "main@test", durability="relaxed") as mailbox:
            for _ in range(8):
                await mailbox.send_batch([message] * BATCH)

    asyncio.run(send())
    build_without_spark(path)
    return path


@pytest.fixture
def connections() -> Iterator[list[sqlite3.Connection]]:
    """The connections to SQLite that are opened in the test."""
    opened: list[sqlite3.Connection] = []

    def connected(connection: sqlite3.Connection, _: object) -> None:
        opened.append(connection)

    event.listen(Engine, "connect", connected)
    yield opened
    event.remove(Engine, "connect", connected)


@pytest.mark.parametrize(
    "wanted", [EventFilter(headers={"kind": "plain"}), EventFilter(match="plain")], ids=["header", "word"]
)
def test_a_page_of_what_most_messages_have_is_read_without_the_ids_of_all(
    long_past: Path,
    read_models: OpenReadModels,
    connections: list[sqlite3.Connection],
    monkeypatch: pytest.MonkeyPatch,
    wanted: EventFilter,
) -> None:
    models, steps = read_models(long_past), list[int]()

    def count_step() -> None:
        steps[-1] += 1

    models.search(wanted)
    connections[0].set_progress_handler(count_step, 1)
    for limit in (100, 1_000):
        monkeypatch.setattr("postroom.adapters.sql.access_path.MAX_CANDIDATES", limit)
        steps.append(0)
        assert len(models.search(wanted).items) == wanted.limit
    assert steps[-1] == steps[-2]


def test_parts_of_ids_are_sought_in_indexes_on_ids(
    long_past: Path, read_models: OpenReadModels, connections: list[sqlite3.Connection]
) -> None:
    models, run = read_models(long_past), list[str]()
    models.search(EventFilter())
    connections[0].set_trace_callback(run.append)
    assert models.search(EventFilter(text="0123-4567-89ab-cdef")).items == ()
    plans = [
        detail
        for statement in run
        if "UNION ALL" in statement and statement.startswith("SELECT count(*)")
        for *_, detail in connections[0].execute(f"EXPLAIN QUERY PLAN {statement}").fetchall()
    ]
    reads = [each for each in plans if "mailbox_v" in each]
    assert len(reads) == 5
    assert all("COVERING INDEX" in each for each in reads)


# -- PostgreSQL only ---


def test_a_database_that_was_not_migrated_or_is_not_there_says_so(
    empty_database: str, read_models: OpenReadModels
) -> None:
    with pytest.raises(Unavailable, match="run `postroom migrate"):
        read_models(empty_database).search(EventFilter())
    with pytest.raises(Unavailable, match="can't be reached") as refused:
        read_models("postgresql://me:hush@127.0.0.1:1/nowhere").stats()
    assert "hush" not in str(refused.value)


def test_answers_come_from_transactions_that_can_not_write(postgres_store: str) -> None:
    with (
        closing(PostgresReadModels(postgres_store)) as models,
        pytest.raises(Unavailable, match="read-only transaction"),
        models._transaction() as db,  # what queries are given
    ):
        db.exec_driver_sql("DELETE FROM postroom.projection")


def test_a_connection_that_the_server_ended_is_made_anew(
    postgres_store: str, read_models: OpenReadModels
) -> None:
    build_without_spark(postgres_store)
    models = read_models(postgres_store)
    assert models.stats().total_events == 0
    with closing(connect(postgres_store, "test")) as database:
        database.execute(
            "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity"
            " WHERE application_name = 'postroom search' AND datname = current_database()"
        )
    assert models.stats().total_events == 0


def test_text_that_postgresql_can_not_hold_is_found_as_it_was(
    postgres_store: str, read_models: OpenReadModels
) -> None:
    odd = "a\0b\x1ac\x1a0"
    long = "x" * 10_000
    for number, principal in enumerate((odd, long, long + "y")):
        attrs = {"plain": "here", principal: principal}
        asyncio.run(store_envelope(postgres_store, envelope(str(number), principal=principal, attrs=attrs)))
    build_without_spark(postgres_store)
    models = read_models(postgres_store)
    for principal in (odd, long, long + "y"):
        (found,) = models.search(EventFilter(principals=(principal,))).items
        assert found.principal == principal
        assert models.search(EventFilter(headers={principal: found.custom_headers[principal]})).items == (
            found,
        )
    assert len(models.search(EventFilter(headers={"plain": "here"}, text="b\x1ac")).items) == 1
    assert len(models.search(EventFilter(principals=(odd, long, *map(str, range(40))))).items) == 2


async def store_envelope(store: str, blob: bytes) -> None:
    """Store an envelope from outside, whose headers may be longer than those that we accept ourselves."""
    async with open_mailbox(store, "main@test") as mailbox:
        (answer,) = await mailbox.send_envelopes([blob])
        assert not isinstance(answer, Rejected)
