"""The policy simulator in the console."""

import asyncio

import pytest

from postroom.adapters.console.pages import what_if
from postroom.domain.capability.rights import Right
from tests.integration.console.dead_letter_store import Desk


async def test_the_outcome_is_compared_with_what_was_recorded(desk: Desk) -> None:
    page = await desk.browser.get("/what-if")
    assert (page.status, "Change a setting" in page.text) == (200, True)
    page = await desk.browser.get("/what-if?topic=orders.*&max_attempts=3&visibility_ms=60000")
    assert page.status == 200
    assert "14 messages</strong>" in page.text
    assert "Dead-lettered messages. Recorded: 14, Best case: 0, Worst case: 14" in page.text
    assert 'value="60000"' in page.text
    part = await desk.browser.get("/what-if?max_attempts=3", headers={"HX-Request": "true"})
    assert part.text.startswith('<div id="outcome"')
    assert "18 messages</strong>" in part.text
    assert (await desk.mailbox.get_topic_policy("orders.eu")).max_attempts == 1


async def test_the_size_of_the_sample_is_said(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(what_if, "SIZES", (10, 5_000))
    page = await desk.browser.get("/what-if?max_attempts=3&events=10")
    assert "the latest 10 of " in page.text
    assert " (a sample)." in page.text
    page = await desk.browser.get("/what-if?max_attempts=3&topic=none")
    assert "No message to replay" in page.text


@pytest.mark.parametrize(
    "query",
    [
        "max_attempts=0",
        "max_attempts=1001",
        "max_attempts=many",
        "visibility_ms=1",
        "backoff_base_ms=-1",
        f"backoff_max_ms={'9' * 30}",
        "max_attempts=3&events=7",
        f"max_attempts=3&topic={'x' * 256}",
    ],
    ids=range(8),
)
async def test_a_field_out_of_bounds_is_refused_in_words(desk: Desk, query: str) -> None:
    page = await desk.browser.get(f"/what-if?{query}")
    assert (page.status, 'role="alert"' in page.text) == (400, True)


async def test_one_simulation_runs_at_a_time_and_then_the_next(desk: Desk) -> None:
    pages = await asyncio.gather(*(desk.browser.get("/what-if?max_attempts=3") for _ in range(4)))
    assert {each.status for each in pages} <= {200, 429}
    assert 200 in {each.status for each in pages}
    assert (await desk.browser.get("/what-if?max_attempts=3")).status == 200


async def test_a_token_of_some_topics_replays_only_those(desk: Desk) -> None:
    token = desk.place.issue(topics=["orders.*"], operations=[Right.READ_HEADERS])
    await desk.browser.sign_in(token)
    assert (await desk.browser.get("/what-if")).status == 200
    assert "payments" not in (await desk.browser.get("/what-if")).text
    assert (await desk.browser.get("/what-if?max_attempts=3&topic=orders.*")).status == 200
    assert (await desk.browser.get("/what-if?max_attempts=3&topic=payments")).status == 403
    assert "Name a topic" in (await desk.browser.get("/what-if?max_attempts=3")).text
    await desk.browser.sign_in(desk.place.issue(operations=[Right.SEND]))
    assert (await desk.browser.get("/what-if")).status == 403
