"""The stored backlog of a context's outbox and inbox equals the live one."""

from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import cast
from uuid import uuid4

import psycopg
import pytest

from postroom.adapters.compose.inbox import open_inbox
from postroom.adapters.compose.outbox import MessagingSettings, open_outbox
from postroom.adapters.compose.projections import context_backlogs
from postroom.adapters.compose.queries import open_read_models
from postroom.adapters.compose.store import open_store
from postroom.adapters.postgres.messaging.inbox import PostgresInbox
from postroom.adapters.postgres.messaging.inbox_queue import count_backlog
from postroom.adapters.postgres.messaging.outbox import Outbox
from postroom.adapters.postgres.messaging.settings import Tables
from postroom.adapters.sqlite.read_model_file import views_path
from postroom.application.messaging import ContextBacklogRefresher
from postroom.application.outbox.relay import OutboxSettings
from postroom.application.ports.read_models import ContextBacklog
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable
from postroom.domain.search import EventFilter
from tests.projections.histories import POISON, Store, build_without_spark, live
from tests.support.memory_stream import MemoryStream
from tests.support.outboxes import CONTEXT, order_placed, record, relaying

SUBJECT = "land.event.ordered.v1"
NOW = 1_766_959_200_000_000


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A store without read models, of either kind."""
    return (
        tmp_path / "store.db"
        if request.param == "sqlite"
        else cast(str, request.getfixturevalue("postgres_store"))
    )


@pytest.fixture
async def inbox(messaging_database: str) -> AsyncIterator[PostgresInbox]:
    opened = PostgresInbox(messaging_database)
    yield opened
    await opened.close()


def kept(store: Store) -> tuple[ContextBacklog, ...]:
    with closing(open_read_models(str(store))) as models:
        return models.contexts()


async def agree(store: Store, database: str, context: str = CONTEXT) -> dict[str, tuple[int, int]]:
    """Refresh, check that the read models tell what the live queries do, and return each box's counts."""
    context_backlogs(str(store), MessagingSettings(database, context)).refresh()
    told = {each.box: each for each in kept(store) if each.context == context}
    messaging = MessagingSettings(database, context)
    async with open_outbox(messaging) as outbox, open_inbox(messaging) as inbox:
        for box, live_ in (("outbox", await outbox.get_backlog()), ("inbox", await inbox.get_backlog())):
            oldest = None if live_.oldest_at is None else round(live_.oldest_at.timestamp() * 1_000_000)
            assert (told[box].context, told[box].count, told[box].oldest_at) == (context, live_.count, oldest)
    return {box: (each.count, each.parked) for box, each in told.items()}


async def refuse(subject: str, payload: bytes) -> None:
    raise InvalidRequest("No stream listens.")


async def test_events_count_until_they_are_published_and_are_parked_when_given_up(
    store: Store, messaging_database: str
) -> None:
    assert await agree(store, messaging_database) == {"outbox": (0, 0), "inbox": (0, 0)}
    record(messaging_database, order_placed("o-1", 1), order_placed("o-1", 2), order_placed("o-2", 1))
    assert await agree(store, messaging_database) == {"outbox": (3, 0), "inbox": (0, 0)}
    at_once = OutboxSettings(max_attempts=1)
    async with relaying(messaging_database, MemoryStream(refuse), settings=at_once) as relay:
        while await relay.relay_once():
            pass
    assert await agree(store, messaging_database) == {"outbox": (3, 2), "inbox": (0, 0)}
    async with open_outbox(MessagingSettings(messaging_database, CONTEXT)) as outbox:
        await outbox.retry_events.all()
        assert await agree(store, messaging_database) == {"outbox": (3, 0), "inbox": (0, 0)}
    async with relaying(messaging_database, MemoryStream()) as relay:
        while await relay.relay_once():
            pass
    assert await agree(store, messaging_database) == {"outbox": (0, 0), "inbox": (0, 0)}


async def test_an_event_that_commits_after_later_ones_is_not_missed(
    store: Store, messaging_database: str
) -> None:
    with psycopg.connect(messaging_database) as slow:
        Outbox().record(slow, order_placed("o-1", 1))  # the first in order, and the last to commit
        record(messaging_database, order_placed("o-2", 1))
        async with relaying(messaging_database, MemoryStream()) as relay:
            await relay.relay_once()
        assert await agree(store, messaging_database) == {"outbox": (0, 0), "inbox": (0, 0)}
        slow.commit()
    assert await agree(store, messaging_database) == {"outbox": (1, 0), "inbox": (0, 0)}


async def test_an_event_that_is_rolled_back_or_inserted_by_plain_sql_counts_as_the_table_has_it(
    store: Store, messaging_database: str
) -> None:
    with psycopg.connect(messaging_database) as service:
        Outbox().record(service, order_placed("o-1", 1))
        service.rollback()
        assert await agree(store, messaging_database) == {"outbox": (0, 0), "inbox": (0, 0)}
        service.execute(
            "INSERT INTO outbox_events (id, aggregate_type, aggregate_id, event_type, payload)"
            " VALUES (gen_random_uuid(), 'order', 'o-1', 'order_placed', '{}')"
        )
    assert await agree(store, messaging_database) == {"outbox": (1, 0), "inbox": (0, 0)}


async def test_messages_count_until_they_are_processed_and_are_parked_as_dead_letters(
    store: Store, messaging_database: str, inbox: PostgresInbox
) -> None:
    ids = [uuid4() for _ in range(3)]
    for number, id_ in enumerate(ids):
        await inbox.insert(id_, SUBJECT, NOW + number)
    assert await agree(store, messaging_database, "land") == {"outbox": (0, 0), "inbox": (3, 0)}
    await inbox.mark_processed(ids[0], NOW + 5)
    await inbox.mark_dead_lettered(ids[1], "poison", NOW + 6)
    assert await agree(store, messaging_database, "land") == {"outbox": (0, 0), "inbox": (1, 1)}
    await inbox.insert(ids[1], SUBJECT, NOW + 7, redrive=True)
    await inbox.mark_processed(ids[1], NOW + 8)
    await inbox.mark_processed(ids[2], NOW + 8)
    assert await agree(store, messaging_database, "land") == {"outbox": (0, 0), "inbox": (0, 0)}


def test_backlogs_of_several_contexts_survive_a_rebuild(store: Store, messaging_database: str) -> None:
    live(store, "box0@test", POISON)
    record(messaging_database, order_placed("o-1", 1))
    context_backlogs(str(store), MessagingSettings(messaging_database, "sea")).refresh()
    context_backlogs(str(store), MessagingSettings(messaging_database, "land")).refresh()
    before = kept(store)
    build_without_spark(store)
    build_without_spark(store)
    assert kept(store) == before
    assert [(each.context, each.box) for each in before] == [
        ("land", "inbox"),
        ("land", "outbox"),
        ("sea", "inbox"),
        ("sea", "outbox"),
    ]


def test_a_count_that_was_overtaken_by_a_later_one_changes_nothing(
    store: Store, messaging_database: str
) -> None:
    early = count_backlog(messaging_database, CONTEXT, Tables())
    record(messaging_database, order_placed("o-1", 1))
    context_backlogs(str(store), MessagingSettings(messaging_database, CONTEXT)).refresh()
    open_store(str(store)).save_context_backlog(early)
    assert {each.box: each.count for each in kept(store)} == {"outbox": 1, "inbox": 0}


def test_read_models_that_have_only_contexts_are_not_built_yet(store: Store, messaging_database: str) -> None:
    context_backlogs(str(store), MessagingSettings(messaging_database, CONTEXT)).refresh()
    with closing(open_read_models(str(store))) as models:
        with pytest.raises(NotFound, match="postroom views rebuild"):
            models.search(EventFilter())
        assert models.status().active is None


def test_an_unreachable_database_is_reported_and_changes_no_counts(
    store: Store, messaging_database: str
) -> None:
    context_backlogs(str(store), MessagingSettings(messaging_database, CONTEXT)).refresh()
    before = kept(store)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        context_backlogs(
            str(store), MessagingSettings("postgresql://nobody@127.0.0.1:1/none", CONTEXT)
        ).refresh()
    assert kept(store) == before


def test_a_file_of_read_models_that_is_none_says_so(tmp_path: Path, messaging_database: str) -> None:
    views_path(tmp_path / "store.db").touch(0o600)
    views_path(tmp_path / "store.db").write_bytes(b"no database" * 100)
    with pytest.raises(Unavailable, match=r"store\.db-views"):
        context_backlogs(str(tmp_path / "store.db"), MessagingSettings(messaging_database, CONTEXT)).refresh()


def test_a_failed_refresh_is_repeated(store: Store, messaging_database: str) -> None:
    saved = Event()
    failures = [Unavailable("down"), Unavailable("still down")]

    def count() -> list[ContextBacklog]:
        if failures:
            raise failures.pop()
        return count_backlog(messaging_database, CONTEXT, Tables())

    def save(backlogs: Sequence[ContextBacklog]) -> None:
        open_store(str(store)).save_context_backlog(backlogs)
        saved.set()

    with ContextBacklogRefresher(count, save, CONTEXT).refreshing(every_seconds=0.01):
        assert saved.wait(30)
    assert len(kept(store)) == 2
