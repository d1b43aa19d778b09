"""Dead letters in the console: groups, single letters, and what a token may see of them."""

import re
from html import unescape
from pathlib import Path

import pytest

from postroom.adapters.sqlite.read_model_file import views_path
from postroom.domain.capability.rights import Right
from tests.integration.console.dead_letter_store import Desk, opened_desk
from tests.support.stores import copy_store

HELD = (
    "/dead-letters",
    "/dead-letters?by=reason&order=largest",
    "/dead-letters?topics=orders.*&text=CARD&by=fingerprint",
    "/dead-letters/letters?topics=payments",
    "/dead-letters/letters?since=2d",
)
_LINK = re.compile(r'<a [^>]*href="([^"]*)"[^>]*>')


def links(text: str, path: str) -> list[str]:
    """Return the links of a page to a path of the console."""
    found = [unescape(each).removeprefix("/console") for each in _LINK.findall(text)]
    return [each for each in found if each.partition("?")[0] == path]


async def test_groups_are_shown_with_their_trend_and_lead_to_their_letters_and_a_job(desk: Desk) -> None:
    page = await desk.browser.get("/dead-letters")
    assert page.status == 200
    assert "18 dead letters in 5 groups" in page.text
    assert page.text.count('class="spark ') == 5
    letters = links(page.text, "/dead-letters/letters")
    redrives = links(page.text, "/redrives/preview")
    assert len(redrives) == 5
    each = await desk.browser.get(letters[1])  # the first link is of all
    assert each.text.count("Redrive…") == 7
    preview = await desk.browser.get(redrives[0])
    assert "Redrive 7 dead letters?" in preview.text
    assert 'name="topics" value="orders.eu"' in preview.text


async def test_errors_are_escaped_wherever_they_are_shown(desk: Desk) -> None:
    for path in ("/dead-letters", "/dead-letters/letters", "/dead-letters?text=%3Cscript%3E&by=topic"):
        page = await desk.browser.get(path)
        assert "<script>alert" not in page.text
        assert "&lt;script&gt;alert" in page.text
        assert "\u202e" not in page.text
    preview = await desk.browser.post("/redrives/preview", topics="payments")
    assert preview.status == 200
    assert "&lt;script&gt;alert" in preview.text
    assert "<script>alert" not in preview.text
    assert "\u202e" not in preview.text


async def test_criteria_narrow_groups_and_letters_and_stay_in_the_fields(desk: Desk) -> None:
    page = await desk.browser.get("/dead-letters?topics=orders.*&text=CARD&order=largest&by=fingerprint")
    assert "10 dead letters in 1 group." in page.text
    assert 'value="orders.*"' in page.text
    page = await desk.browser.get("/dead-letters?since=1h")
    assert "No dead letters match" in page.text
    for query in ("since=soon", "by=shard", "order=oldest", "cursor=nonsense", f"text={'x' * 1_001}"):
        assert (await desk.browser.get(f"/dead-letters?{query}")).status == 400, query


async def test_a_token_of_some_topics_sees_only_their_dead_letters(desk: Desk) -> None:
    await desk.browser.sign_in(desk.place.issue(topics=["orders.*"], operations=[Right.READ_HEADERS]))
    page = await desk.browser.get("/dead-letters")
    assert "14 dead letters in 3 groups" in page.text
    assert "payments" not in page.text
    assert not links(page.text, "/redrives/preview")
    assert (await desk.browser.get("/dead-letters/letters?topics=payments")).status == 403
    await desk.browser.sign_in(desk.place.issue(operations=[Right.REDRIVE]))
    assert (await desk.browser.get("/dead-letters")).status == 403


async def test_without_read_models_the_dead_letters_of_the_mailbox_are_shown(
    filled: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = copy_store(filled, tmp_path)
    for file in store.parent.glob(f"{views_path(store).name}*"):
        file.unlink()
    async with opened_desk(copy_store(filled, tmp_path_factory.mktemp("whole"))) as desk:
        whole = {path: (await desk.browser.get(path)).text for path in HELD}
    async with opened_desk(store) as desk:
        for path, with_models in whole.items():
            page = await desk.browser.get(path)
            assert page.status == 200
            assert "postroom views rebuild" in page.text
            assert 'role="alert"' not in page.text
            assert facts_of(page.text) == facts_of(with_models), path
        await desk.browser.sign_in(desk.place.issue(topics=["orders.*"], operations=[Right.READ_HEADERS]))
        assert "payments" not in (await desk.browser.get("/dead-letters")).text


def facts_of(text: str) -> tuple[list[str], list[str], list[str]]:
    """Return the sums of a page, and what its table links to and shows of each row."""
    cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", text, re.DOTALL)
    return (
        re.findall(r"<p>(\d+ dead letters? in \d+ groups?)", text),
        [" ".join(re.sub(r"<[^>]*>", " ", each).split()) for each in cells],
        [each for path in ("/dead-letters/letters", "/redrives/preview") for each in links(text, path)],
    )
