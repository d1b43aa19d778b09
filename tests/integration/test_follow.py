"""Read models that are followed stay as the log is, whoever else is at work and whatever can't be folded."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from threading import Barrier, Event, Thread
from typing import Any

import psycopg
import pytest

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.compose.store import open_store
from postroom.adapters.postgres.hints import TableHints
from postroom.adapters.sqlite import database
from postroom.application.telemetry import logger
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.domain.policy import DAY_MS, MailboxLimits
from postroom.domain.record import StoredEvent
from postroom.domain.search import BodyRules, EventFilter
from postroom.projections import follow
from postroom.projections.follow import Follower
from postroom.projections.projection import MODULES
from tests.conformance.records import append, life
from tests.integration.test_follow_crashes import is_caught_up, running
from tests.projections import following
from tests.projections.histories import (
    POISON,
    STORY,
    VARIED,
    Store,
    build_without_spark,
    live,
    model_store,
    new_follower,
    open_log,
    reference,
    send,
    take_extents,
)
from tests.support.fixtures import OpenReadModels
from tests.support.stores import message, postgres_place, sqlite_place
from tests.support.waiting import SECONDS, wait_until


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_store"))
    return tmp_path / "store.db"


def test_what_is_written_while_it_follows_is_there_soon(store: Store) -> None:
    live(store, "box0@test", STORY)
    built = take_extents(store)
    following.build(store, built)
    with running(new_follower(store)) as follower:
        live(store, "box1@test", VARIED, mode="archive")
        live(store, "box0@test", STORY)
        written = sum(extent.last for extent in take_extents(store)) - built[0].last
        wait_until(lambda: follower.counts.events >= written)
        assert follower.counts.events == written
    assert following.rows(store) == reference(store).rows


def test_an_idle_follower_is_told_of_a_commit(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "LOST_SECONDS", 3_600)
    live(store, "box0@test", STORY)
    following.build(store)
    told: list[bool | None] = []
    follower = new_follower(store)
    wait = follower._wait_for_commit

    def note(stop: Event) -> bool | None:
        told.append(wait(stop))
        return told[-1]

    monkeypatch.setattr(follower, "_wait_for_commit", note)
    with running(follower):
        for _ in range(3):
            wait_until(lambda: is_caught_up(follower))
            told.clear()
            wait_until(lambda: True in told)  # of what was committed before it began to wait
            live(store, "box0@test", STORY)
        wait_until(lambda: is_caught_up(follower))


def test_a_follower_polls_when_the_session_in_which_it_is_told_has_ended(postgres_store: Store) -> None:
    updater = open_store(str(postgres_store)).read_model_updater()
    with closing(updater), updater.leader_lock() as leads:
        assert leads
        assert updater.wait_for_commit(0)
        assert updater.wait_for_commit(0) is False
        with psycopg.connect(str(postgres_store)) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        wait_until(lambda: updater.wait_for_commit(60) is None)
        assert updater.wait_for_commit(60) is None


def test_a_follower_that_stops_tells_another_one_that_relies_on_its_session(postgres_store: Store) -> None:
    place = open_store(str(postgres_store))
    first, second = place.read_model_updater(), place.read_model_updater()
    with closing(first), closing(second), second.leader_lock("lake"):
        with first.leader_lock():
            assert first.wait_for_commit(0)
            assert second.wait_for_commit(0)
            assert second.wait_for_commit(0) is False
        assert second.wait_for_commit(SECONDS)


def test_sessions_that_rely_on_another_one_warn_of_nothing(postgres_store: Store) -> None:
    live(postgres_store, "box0@test", STORY)
    url = str(postgres_store)
    notices: list[str | None] = []
    with psycopg.connect(url, autocommit=True) as one, psycopg.connect(url, autocommit=True) as other:
        both = [TableHints(each, url, "log") for each in (one, other)]
        for connection, waiting in zip((one, other), both, strict=True):
            connection.add_notice_handler(lambda notice: notices.append(notice.message_primary))
            assert waiting.wait(0)
        live(postgres_store, "box0@test", STORY)
        assert all(waiting.wait(SECONDS) for waiting in both)
    assert notices == []


def test_a_session_that_failed_to_stop_waiting_stops_the_next_time(postgres_store: Store) -> None:
    live(postgres_store, "box0@test", STORY)
    url = str(postgres_store)
    with psycopg.connect(url, autocommit=True) as session, psycopg.connect(url, autocommit=True) as other:
        assert TableHints(session, url, "log").wait(0)  # and keeps its lock
        again = TableHints(session, url, "log")
        assert again.wait(0)
        again.close()
        assert TableHints(other, url, "log").wait(0)
        held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 100 AND pid = %s"
        assert session.execute(held, (session.info.backend_pid,)).fetchone() == (0,)


def test_once_it_ends_where_the_log_ended(store: Store) -> None:
    live(store, "box0@test", STORY)
    following.build(store)
    with closing(new_follower(store, max_events=10)) as follower:
        follower.run(Event(), once=True)
        assert is_caught_up(follower)
        follower.run(Event(), once=True)
        assert follower.counts.events == take_extents(store)[0].last


def test_a_batch_ends_where_its_records_take_too_much_memory(store: Store) -> None:
    live(store, "box0@test", STORY)
    live(store, "box1@test", VARIED, mode="archive")
    first, second = take_extents(store)
    following.build(store, ())
    with closing(new_follower(store, max_bytes=1)) as follower:
        assert follower.step()
        assert follower.positions() == {first.name: first.last}
        follower.advance()
        assert follower.positions() == {first.name: first.last, second.name: second.last}
        assert follower.counts.batches == 2
    assert following.rows(store) == reference(store).rows


def test_a_stop_undoes_the_batch_under_way_and_the_next_follower_applies_it(store: Store) -> None:
    live(store, "box0@test", STORY)
    following.build(store)
    before, stop = following.rows(store), Event()
    stop.set()
    with closing(new_follower(store)) as follower:
        follower.advance(stop=stop)
        assert follower.counts.batches == 0
        assert follower.positions() == {}
        assert following.rows(store) == before
    with closing(new_follower(store)) as follower:
        follower.advance()
    assert following.rows(store) == reference(store).rows


def test_of_two_that_apply_at_once_no_record_is_applied_twice(store: Store) -> None:
    live(store, "box0@test", STORY)
    live(store, "box1@test", VARIED, mode="archive")
    following.build(store)
    both = [new_follower(store, max_events=most) for most in (2, 3)]
    start = Barrier(2)

    def advance(follower: Follower) -> None:
        start.wait(SECONDS)
        follower.advance()

    threads = [Thread(target=advance, args=(follower,)) for follower in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert following.rows(store) == reference(store).rows
    assert sum(follower.counts.events for follower in both) == sum(
        extent.last for extent in take_extents(store)
    )
    for follower in both:
        follower.close()


def test_a_second_one_stands_by_and_takes_over(store: Store, read_models: OpenReadModels) -> None:
    live(store, "box0@test", POISON)
    following.build(store)
    models = read_models(store)
    assert not models.status().is_following
    with (
        closing(open_store(str(store)).read_model_updater()) as first,
        running(new_follower(store)) as second,
    ):
        wait_until(lambda: models.status().is_following)
        wait_until(lambda: is_caught_up(second))
        with first.leader_lock() as leads:
            assert not leads
    assert not models.status().is_following


def test_a_version_that_becomes_active_meanwhile_is_followed_from_its_own_cursor(store: Store) -> None:
    live(store, "box0@test", STORY)
    following.build(store)
    extents = take_extents(store)
    with closing(new_follower(store, max_events=10)) as follower:
        follower.advance()
        live(store, "box0@test", STORY)
        follower.step()
        version = following.build(store, extents)
        live(store, "box1@test", VARIED, mode="archive")
        follower.advance()
        assert follower.counts.version == version
        assert follower.positions() == {extent.name: extent.last for extent in take_extents(store)}
    assert following.rows(store) == reference(store).rows


def test_a_version_is_caught_up_before_it_is_served_and_to_exact_positions(store: Store) -> None:
    live(store, "box0@test", STORY)
    served = following.build(store)
    version = following.build(store, flip=False)
    with closing(new_follower(store, version=version)) as follower:
        follower.advance({"box0@test": 5})
        assert follower.positions() == {"box0@test": 5}
        follower.advance()
        assert follower.positions() == {extent.name: extent.last for extent in take_extents(store)}
    with closing(open_store(str(store)).read_model_updater()) as tables:
        active = tables.active()
        assert active is not None
        assert active.number == served
        assert tables.cursors(active) == {}


def test_a_rebuild_ends_though_records_are_written_before_each_batch_of_its_catch_up(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(store, "box0@test", [message()])
    steps, step = count(1), Follower.step

    def send_and_step(*arguments: Any) -> bool:
        assert next(steps) < 10
        send(store, "box0@test", [message()])
        return step(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Follower, "step", send_and_step)
        build_without_spark(store)
    with closing(new_follower(store)) as follower:
        follower.advance()
    assert following.rows(store) == reference(store).rows


def test_rows_that_are_read_keep_no_follower_from_writing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BULK_BUSY_TIMEOUT_MS", 20)
    live(store, "box0@test", STORY)
    build_without_spark(store)
    send(store, "box0@test", [message()])
    with closing(new_follower(store)) as follower:
        rows = model_store(store).rows("mailbox")
        next(rows)
        follower.advance()
        assert is_caught_up(follower)
    assert following.rows(store) == reference(store).rows


def test_a_file_of_read_models_that_is_deleted_and_built_anew_is_followed_on(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    live(store, "box0@test", STORY)
    following.build(store)
    with closing(new_follower(store, max_events=10)) as follower:
        follower.step()
        for file in tmp_path.glob("store.db-views*"):
            file.unlink()
        following.build(store)
        follower.advance()
    assert following.rows(store) == reference(store).rows


def test_without_read_models_it_says_what_to_do(store: Store) -> None:
    live(store, "box0@test", POISON)
    with closing(new_follower(store)) as follower, pytest.raises(NotFound, match="postroom views rebuild"):
        follower.step()


def test_records_that_cannot_be_folded_are_parked_and_the_rest_goes_on(
    store: Store, read_models: OpenReadModels
) -> None:
    live(store, "box0@test", STORY)
    following.build(store)
    with closing(open_log(store, "box0@test")) as log:
        head = log.head()
        assert head is not None
        unknown = StoredEvent(bytes(16), 1, head.at, "MessageFolded", b"")
        append(log, [unknown, *life(1, at=head.at)], epoch=head.epoch)
    with closing(new_follower(store, max_events=3)) as follower:
        follower.advance()
    assert following.rows(store) == reference(store).rows
    status = read_models(store).status()
    told = [(each.position, each.type) for each in status.parked_records]
    assert told == [(each.place % (1 << 40), each.type) for each in reference(store).parked]
    assert status.parked == len(told) > 0
    assert "unknown type" in status.parked_records[0].error
    assert [lag.lag for lag in status.lags] == [0]


def test_a_record_at_which_a_projection_of_ones_own_raises_is_parked_alone(
    store: Store, read_models: OpenReadModels, own_projection: Callable[[], None]
) -> None:
    own_projection()
    live(store, "box0@test", STORY)
    following.build(store)
    with closing(new_follower(store)) as follower:
        follower.advance()
        assert follower.counts.parked == read_models(store).status().parked > 0
    rows = following.rows(store)
    (sends,) = rows["sends"]
    status = read_models(store).status(100)
    assert {each.type for each in status.parked_records} == {"MessageSent"}
    assert all("sends" in each.error for each in status.parked_records)
    assert sends["messages"] == len(rows["mailbox"]) - status.parked


def test_records_that_a_projection_fails_at_alike_are_logged_by_one_line(
    store: Store, own_projection: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    own_projection()
    live(store, "box0@test", STORY)
    following.build(store)
    logger().forget()
    with closing(open_log(store, "box0@test")) as log:
        head = log.head()
        assert head is not None
        unknown = [StoredEvent(bytes([n]) * 16, 1, head.at, "MessageFolded", b"") for n in range(6)]
        append(log, unknown, epoch=head.epoch)
    with closing(new_follower(store, max_events=3)) as follower:
        follower.advance()
        assert follower.counts.parked >= len(unknown)
    lines = [each for each in caplog.messages if "follow.parked" in each and "MessageFolded" in each]
    assert len(lines) == 1
    assert "count=3" in lines[0]


async def test_what_retention_removes_from_the_log_goes_from_the_read_models(
    store: Store, read_models: OpenReadModels
) -> None:
    place = postgres_place(store) if isinstance(store, str) else sqlite_place(store.parent)
    limits = MailboxLimits(history_retention_ms=DAY_MS)
    with closing(new_follower(store, max_events=20)) as follower:
        async with place.open(limits=limits) as mailbox:
            await send_and_settle(mailbox)
            following.build(store)
            follower.step()
            place.clock.advance(2 * DAY_MS)
            await mailbox.retention.enforce_age()
            await mailbox.send_batch([message(b"new", topic="later"), message(b"new")])
        follower.advance()
    rows = following.rows(store)
    assert [row["topic"] for row in rows["mailbox"]] == ["later", "orders"]
    for name in ("mailbox", "backlog", "dead_letters"):
        assert rows[name] == reference(store).rows[name]
    models = read_models(store)
    assert models.stats().total_events == 2
    assert not models.search(EventFilter(text="region")).items
    assert not models.search(EventFilter(headers={"region": "eu"})).items
    assert len(models.search(EventFilter(text="later")).items) == 1


def test_the_messages_of_a_batch_are_one_segment_of_a_text_index(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    live(store, "box0@test", [*VARIED, *STORY])
    version = following.build(store)
    with closing(new_follower(store)) as follower:
        follower.advance()
        assert follower.counts.batches == 1
    with closing(sqlite3.connect(f"{store}-views")) as views:
        for name in ("text_index", "word_index"):
            query = f"SELECT count(DISTINCT segid) FROM {name}_v{version}_idx"
            assert views.execute(query).fetchone() == (1,)


def test_words_of_bodies_are_found_in_messages_that_were_followed(
    store: Store, read_models: OpenReadModels
) -> None:
    live(store, "box0@test", POISON)
    build_without_spark(store, BodyRules(("orders",)))
    send(store, "box0@test", [message(b"an invoice", topic=topic) for topic in ("orders", "others")])
    with closing(new_follower(store)) as follower:
        follower.advance()
    (found,) = read_models(store).search(EventFilter(match="invoice")).items
    assert found.topic == "orders"


async def send_and_settle(mailbox: OwnedMailbox) -> None:
    sent = [message(b"%d" % n, attrs={"region": "eu"}, topic="orders") for n in range(20)]
    await mailbox.send_batch([*sent, message(b"x", topic="gone")])
    for topic in ("orders", "gone"):
        while taken := await mailbox.receive_messages(topic, max_messages=100):
            await mailbox.ack_messages([each.receipt for each in taken])


def test_a_version_with_a_model_that_nobody_knows_is_not_followed(
    store: Store, own_projection: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_projection()
    live(store, "box0@test", POISON)
    following.build(store)
    monkeypatch.delenv(MODULES)
    with closing(new_follower(store)) as follower, pytest.raises(InvalidRequest, match="sends"):
        follower.step()


OWN = """
import polars as pl
from postroom.projections.projection import Column, EventProjection

def fold(records):
    sent = records.filter(pl.col("event") == "MessageSent")
    if sent["topic"].is_in(["shop"]).any():
        raise ValueError("we are closed")
    return sent.group_by("mailbox").agg(pl.len().cast(pl.Int64).alias("messages"))

PROJECTION = EventProjection(
    "sends",
    (Column("mailbox", "text", "key"), Column("messages", "int", "sum")),
    reads=("mailbox", "event", "topic"),
    fold=fold,
)
"""


@pytest.fixture
def own_projection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have a projection of one's own found, that counts what is sent and raises at the topic `shop`."""

    def add() -> None:
        (tmp_path / "postroom_test_sends.py").write_text(OWN)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv(MODULES, "postroom_test_sends")

    return add


def test_a_store_with_many_mailboxes_is_followed(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    send(store, "box0@test", [message(message_id="m-1")])
    with closing(sqlite3.connect(store)) as file, file:
        file.executemany(
            "INSERT INTO mailbox_names (name) VALUES (?)", [(f"other{n}@test",) for n in range(600)]
        )
    following.build(store)
    with closing(new_follower(store)) as follower:
        follower.advance()
    assert following.rows(store) == reference(store).rows
