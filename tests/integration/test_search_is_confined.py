"""What a capability gets from the read models is the same without the messages of other topics."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.export import StoreSearchQueries
from postroom.adapters.compose.projections import LocalTaskRunner, rebuild_projections
from postroom.adapters.compose.queries import open_read_models
from postroom.adapters.system.clock import SystemClock
from postroom.application.access.search import read_dead_letters
from postroom.application.ports.dead_letters import DeadLetterGroupFilter, DeadLetterGroupPage
from postroom.application.ports.facets import SuggestionField
from postroom.domain.errors import PostroomError
from postroom.domain.policy import TopicPolicy
from postroom.domain.search import EventFilter
from tests.support.access import Controlled
from tests.support.stores import MAILBOX, message

OWN, OTHERS = ("a.x", "a.y"), [f"a{number:03}" for number in range(150)]
PUBLISHED_US = 1_700_000_000_000_000
_OF_THE_LOG = {
    "id",
    "position",
    "next_cursor",
    "created_at",
    "first_seen",
    "last_seen",
    "since",
    "start",
    "width",
    "trend",
}


async def fill(store: str, topics: list[str]) -> None:
    """Give each topic a ready message, and a dead letter unless it is one of many."""
    async with open_mailbox(store, MAILBOX, durability="relaxed") as mailbox:
        fields: dict[str, Any] = {"published_at_us": PUBLISHED_US, "principal": "shop"}
        many = [each for each in topics if each in OTHERS]
        await mailbox.send_batch([message(b"0", each, **fields) for each in many])
        for topic in (each for each in topics if each not in OTHERS):
            await mailbox.set_topic_policy(topic, TopicPolicy(max_attempts=1))
            await mailbox.send_message(message(b"1", topic, message_id=f"{topic} 1", **fields))
            (received,) = await mailbox.receive_messages(topic)
            await received.nack(reason=f"error of {topic}")
            await mailbox.send_message(message(b"2", topic, message_id=f"{topic} 2", **fields))


def view(answer: Any) -> Any:
    match answer:
        case msgspec.Struct():
            names = [name for name in answer.__struct_fields__ if name not in _OF_THE_LOG]
            return {name: view(getattr(answer, name)) for name in names}
        case list() | tuple():
            return [view(each) for each in answer]
        case bytes():
            return len(answer)
        case _:
            return answer


async def answers(store: str) -> dict[str, Any]:
    """Return the answers to all queries of a capability for `a.*`, or their errors."""
    await asyncio.to_thread(rebuild_projections, store, runner=LocalTaskRunner())
    own, results = EventFilter(topics=("a.*",)), {}
    with closing(open_read_models(store)) as models:
        async with open_mailbox(store, MAILBOX, durability="relaxed") as mailbox:
            place = Controlled(mailbox, SystemClock())

            async def search(filter_: EventFilter) -> Any:
                return await asyncio.to_thread(models.search, filter_)

            place._search = search  # type: ignore[method-assign] # of the read models
            session = await place.control.open_session(place.issue(topics=["a.*"]))
            queries = session.search_queries(StoreSearchQueries(store, models, MAILBOX))

            async def read(filter_: DeadLetterGroupFilter) -> DeadLetterGroupPage:
                return await asyncio.to_thread(models.dead_letter_groups, filter_)

            async def groups(filter_: DeadLetterGroupFilter) -> DeadLetterGroupPage:
                return await read_dead_letters(
                    session, filter_, read, DeadLetterGroupPage(()), lambda page: page.letters, "groups"
                )

            calls: dict[str, Any] = {
                "search": session.search(own),
                "search of principals": session.search(EventFilter(topics=("a.*",), principals=("shop",))),
                "search of everything": session.search(EventFilter()),
                "facets": queries.facets(own),
                "timeline": queries.timeline(own),
                "groups": groups(DeadLetterGroupFilter()),
                "groups of topics": groups(DeadLetterGroupFilter(topics=("a.*",))),
                **{
                    f"suggest {start!r}": queries.suggest(SuggestionField.TOPIC, start)
                    for start in ("", "a", "a.y")
                },
                "suggest a principal": queries.suggest(SuggestionField.PRINCIPAL, ""),
            }
            for name, call in calls.items():
                try:
                    results[name] = view(await call)
                except PostroomError as error:
                    results[name] = str(error)
    return results


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
async def test_no_query_of_the_read_models_depends_on_messages_of_other_topics(
    store: str, tmp_path: Path
) -> None:
    alone = str(tmp_path / "alone.db")
    await fill(alone, [*OWN])
    await fill(store, [*OTHERS, *OWN, "b"])
    expected = await answers(alone)
    assert expected["suggest ''"] == ["a.x", "a.y"]
    assert len(expected["search"]["items"]) == 4
    assert await answers(store) == expected
