"""Queries that take long keep nothing else waiting."""

import asyncio
import threading
from typing import Any

from postroom.adapters.compose.export import StoreSearchQueries
from postroom.domain.search import EventFilter
from tests.support.waiting import SECONDS


class SlowReadModels:
    """Read models whose queries end when a test lets them."""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def facets(self, filter_: EventFilter) -> str:
        """Return when the test lets it."""
        self.may_end.wait(SECONDS)
        return "done"


async def test_a_mailbox_has_threads_to_read_its_log_however_many_searches_run() -> None:
    models: Any = SlowReadModels()
    queries = StoreSearchQueries("unused.db", models, "main@local")
    searches = [asyncio.create_task(queries.facets(EventFilter())) for _ in range(100)]
    try:
        await asyncio.sleep(0)
        async with asyncio.timeout(SECONDS / 2):
            assert await asyncio.to_thread(lambda: "log") == "log"
    finally:
        models.may_end.set()
    assert [str(each) for each in await asyncio.gather(*searches)] == ["done"] * 100
