"""Searching a PostgreSQL store from the command line."""

from typing import Any
from urllib.parse import urlsplit

from postroom.application.messages import NewMessage
from postroom.domain.search import BodyRules
from tests.e2e.conftest import Postroom
from tests.projections.histories import build_without_spark, send


def test_a_database_is_searched_and_summed_up_and_says_how_far_behind_it_is(
    postroom: Postroom, postgres_store: str
) -> None:
    url = urlsplit(postgres_store)
    secret = url._replace(netloc=f"{url.username}:open-sesame@{url.hostname}:{url.port}").geturl()
    there: dict[str, Any] = {"POSTROOM_STORE": secret}
    messages = [
        NewMessage(topic="orders", payload=b"Refund", attrs={"number": str(n)}, principal="shop-lima")
        for n in range(3)
    ]
    send(postgres_store, "main@local", messages)

    unbuilt = postroom("search", "--json", **there)
    assert unbuilt.code != 0
    assert "postroom views rebuild" in unbuilt.error["message"]
    assert "open-sesame" not in unbuilt.err
    (lag,) = postroom.ok("views", "status", "--json", **there).json["lags"]
    assert lag["lag"] == lag["head"] > 3

    build_without_spark(postgres_store, BodyRules(("orders",)))
    found = postroom.ok("search", "--header", "number=1", "--json", **there).lines
    assert [each["custom_headers"]["number"] for each in found] == ["1"]
    assert len(postroom.ok("search", "order", "--json", **there).lines) == 3
    for match, count in (("LIMA refund", 3), ("order", 0), ("ord* number 2", 1)):
        answer = postroom("search", "--match", match, "--json", **there)
        assert len(answer.lines) == count
    assert "No word in '*'" in postroom("search", "--match", "*", "--json", **there).error["message"]
    totals = postroom.ok("stats", "--json", **there).json
    assert totals["total_events"] == 3
    assert totals["total_size_bytes"] > 0
    assert postroom.ok("views", "status", "--json", **there).json["lags"][0]["lag"] == 0
