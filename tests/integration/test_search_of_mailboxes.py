"""A mailbox of a store is searched by its owner and by other processes alike."""

import asyncio
from pathlib import Path

import pytest

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.connect import share_mailbox
from postroom.domain.errors import NotFound
from postroom.domain.search import EventFilter
from tests.projections import following
from tests.projections.histories import STORY, live, take_extents
from tests.support.messages import message

MAILBOX = "acme@one"


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_store"))
    return str(tmp_path / "store.db")


async def test_a_search_finds_what_a_rebuild_has_read_of_this_mailbox(store: str) -> None:
    await asyncio.to_thread(live, store, "acme@other", STORY)
    async with open_mailbox(store, MAILBOX) as owned, share_mailbox(store, MAILBOX) as shared:
        sent = [await owned.send_message(message(payload)) for payload in (b"1", b"2", b"3")]
        for mailbox in (owned, shared):
            with pytest.raises(NotFound):
                await mailbox.search_messages(EventFilter())
        await asyncio.to_thread(lambda: following.build(store, take_extents(store)))
        await owned.send_message(message(b"4"))
        page = await owned.search_messages(EventFilter(limit=2))
        assert page == await shared.search_messages(EventFilter(limit=2))
        rest = await shared.search_messages(EventFilter(limit=2, cursor=page.next_cursor))
        found = [*page.items, *rest.items]
        assert {each.message_id for each in found} == {each.message_id for each in sent}
        assert {each.mailbox for each in found} == {MAILBOX}
        assert rest.next_cursor is None
