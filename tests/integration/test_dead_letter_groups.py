"""Groups of dead letters over HTTP: what a token may see of them."""

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.serve import HttpSettings, open_http_surface, serve_mailbox, unrestricted
from postroom.adapters.system.clock import SystemClock
from postroom.domain.capability.rights import Right
from tests.support.access import Controlled, controlled_mailbox
from tests.support.dead_letters import MAILBOX, fill
from tests.support.stores import copy_store
from tests.support.surfaces import served

DAY_US = 24 * 3_600_000_000
PATH = "/v1/dlq/groups"


class Client:
    """A client of the service of a store with dead letters."""

    def __init__(self, place: Controlled[Any, Any], session: ClientSession) -> None:
        self.place = place
        self._session = session

    async def groups(self, token: str | None = None, **query: Any) -> tuple[int, dict[str, Any]]:
        """Return the status and the answer."""
        headers = {"Authorization": f"Bearer {token or self.place.issue()}"}
        async with self._session.get(PATH, params=query, headers=headers) as answer:
            return answer.status, await answer.json()


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with dead letters of yesterday, to be copied and left alone."""
    store = tmp_path_factory.mktemp("dead") / "store.db"
    fill(store, start_us=time.time_ns() // 1_000 - DAY_US)
    return store


@pytest.fixture
async def client(filled: Path, tmp_path: Path) -> AsyncIterator[Client]:
    store = copy_store(filled, tmp_path)
    surface = open_http_surface("127.0.0.1:0", HttpSettings())
    async with open_mailbox(str(store), MAILBOX) as mailbox:
        place = Controlled(mailbox, SystemClock())
        access = place.control.open_session
        async with (
            serve_mailbox(str(store), mailbox, [surface], access=lambda *_: access) as (url,),
            ClientSession(url) as session,
        ):
            yield Client(place, session)


async def test_a_token_sees_the_groups_of_the_topics_that_it_covers(client: Client) -> None:
    status, page = await client.groups()
    assert (status, page["letters"], page["groups"], page["since"]) == (200, 18, 5, None)
    limited = client.place.issue(topics=["orders.*"])
    status, page = await client.groups(limited)
    assert (status, page["letters"], {each["topic"] for each in page["items"]}) == (
        200,
        14,
        {"orders.eu", "orders.us"},
    )
    for topic in ("payments", "*", "o*"):
        status, page = await client.groups(limited, topics=topic)
        assert (status, page["code"]) == (403, "E_CAP_SCOPE")
    status, page = await client.groups(client.place.issue(topics=["other"]))
    assert (status, page["items"], page["letters"]) == (200, [], 0)
    status, page = await client.groups(client.place.issue(operations=[Right.REDRIVE]))
    assert status == 403


async def test_groups_are_filtered_ordered_and_paged(client: Client) -> None:
    _, page = await client.groups(text="CARD", by="fingerprint", order="largest", bars=4)
    (group,) = page["items"]
    assert (group["topic"], group["reason"], group["count"], sum(group["trend"])) == (
        None,
        "max_attempts",
        12,
        12,
    )
    assert group["sample"]["last_error"] == "card 1 refused"
    _, first = await client.groups(order="largest", limit=2)
    _, rest = await client.groups(order="largest", cursor=first["next_cursor"])
    assert [each["count"] for each in first["items"] + rest["items"]] == [7, 4, 3, 2, 2]
    assert (await client.groups(since=page["items"][0]["last_seen"], bars=0))[1]["letters"] == 1


@pytest.mark.parametrize(
    "query",
    [
        {"by": "shard"},
        {"order": "oldest"},
        {"bars": 201},
        {"since": "9" * 30},
        {"since": "soon"},
        {"until": "-9223372036854775808"},
        {"cursor": "nonsense"},
        {"text": ""},
        {"topics": "\x00"},
    ],
    ids=lambda query: "-".join(map(repr, query.items()))[:30],
)
async def test_a_parameter_out_of_bounds_is_refused_in_words(client: Client, query: dict[str, Any]) -> None:
    status, problem = await client.groups(**query)
    assert (status, problem["code"]) == (400, "E_SCHEMA")


async def test_a_mailbox_in_memory_has_no_groups_and_says_why() -> None:
    async with (
        controlled_mailbox() as place,
        served(place.mailbox, "http", access=unrestricted) as url,
        ClientSession(url) as session,
        session.get(PATH) as answer,
    ):
        assert answer.status == 404
        assert "in memory" in await answer.text()
