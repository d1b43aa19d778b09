"""Searches as of a past moment, compared with the state of the mailbox at each position."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from postroom.adapters.compose.queries import open_read_models
from postroom.application.mailbox.stored_snapshots import fold_at
from postroom.application.page import Page
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries import search_past
from postroom.application.queries.search_past import PastPage, SearchPast, find_moment
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.domain.message import DEAD, IN_FLIGHT, READY
from postroom.domain.search import EventFilter, FoundMessage, Order
from tests.projections.histories import START_US, STORY, VARIED, build_without_spark, live, open_log

MAILBOX = "box0@test"
NOW = START_US + 3_600_000_000


class Store:
    """A store with a past, its log, and a search of its read models."""

    def __init__(self, path: Path) -> None:
        live(path, MAILBOX, [*STORY, *VARIED[:20]])
        build_without_spark(path)
        self._models = open_read_models(str(path))
        self.log: EventLogReader = open_log(path, MAILBOX)
        self.searches = 0

    async def search(self, filter_: EventFilter) -> Page[FoundMessage]:
        self.searches += 1
        return await asyncio.to_thread(self._models.search, filter_)

    def close(self) -> None:
        self.log.close()
        self._models.close()

    async def pages(self, filter_: EventFilter, at: int) -> list[PastPage]:
        """Return all pages of a search."""
        search = SearchPast(self.search, self.log, lambda: NOW)
        pages = [await search(filter_, at)]
        while (cursor := pages[-1].next_cursor) is not None:
            pages.append(await search(msgspec.structs.replace(filter_, cursor=cursor), at))
        return pages


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with closing(Store(tmp_path_factory.mktemp("past") / "store.db")) as store:
        yield store


async def test_at_each_position_statuses_are_those_that_the_mailbox_had(store: Store) -> None:
    head = store.log.head()
    assert head is not None
    filter_ = EventFilter(statuses=(READY, IN_FLIGHT, DEAD), limit=100)
    for position in range(head.position + 1):
        expected = {
            (each.position, each.status, each.attempt)
            for each in fold_at(store.log, position).messages.values()
        }
        (page,) = await store.pages(filter_, position)
        assert {(each.position, each.status, each.attempts) for each in page.items} == expected
        assert (page.moment.position, page.unknown) == (position, 0)


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("bounds", [(250, 2_000), (2, 5)])
async def test_pages_are_disjoint_in_order_and_complete(
    store: Store, order: Order, bounds: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    head = store.log.head()
    assert head is not None
    whole = (await store.pages(EventFilter(limit=1_000, order=order), head.position))[0].items
    monkeypatch.setattr(search_past, "CHUNK", bounds[0])
    monkeypatch.setattr(search_past, "MAX_READ", bounds[1])
    pages = await store.pages(EventFilter(limit=3, order=order), head.position)
    assert [each for page in pages for each in page.items] == list(whole)
    assert all(len(page.items) <= 3 for page in pages)
    dead = await store.pages(EventFilter(limit=3, order=order, statuses=(DEAD,)), head.position)
    assert [each for page in dead for each in page.items] == [each for each in whole if each.status == DEAD]


async def test_a_time_is_the_position_before_it_and_none_in_the_future_is_accepted(store: Store) -> None:
    sent = store.log.at_positions([10])[10].at
    at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=sent)
    moment = find_moment(store.log, at, NOW)
    assert moment.at == sent
    assert moment.position >= 10
    before = find_moment(store.log, at - timedelta(microseconds=1), NOW)
    assert before.position < 10
    for future in (at + timedelta(days=9), 1_000_000):
        with pytest.raises(InvalidRequest):
            find_moment(store.log, future, NOW)


async def test_what_retention_removed_is_said(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.log, "first_position", lambda: 5)
    for position in (0, 1, 4):
        with pytest.raises(NotFound, match="Retention removed"):
            find_moment(store.log, position, NOW)
    assert find_moment(store.log, 5, NOW).position == 5
    monkeypatch.setattr(store.log, "read_streams", lambda _: {})
    search = SearchPast(store.search, store.log, lambda: NOW)
    page = await search(EventFilter(), 9)
    assert page.items == ()
    assert page.unknown == page.count > 0
