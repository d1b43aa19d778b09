"""`postroom searches` saves, lists, runs and deletes the searches that the console shows."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from postroom.adapters.cli import searches
from postroom.adapters.cli.output import Output
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import load_settings
from postroom.adapters.cli.values import NOTHING, WrongUsage
from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.projections import LocalTaskRunner, rebuild_projections
from postroom.application.messages import NewMessage
from postroom.domain.errors import IdempotencyConflict, InvalidRequest, NotFound
from tests.support.stores import MAILBOX

QUERY = "topics=orders.*&order=oldest&column=topic&at=5"
Run = Callable[..., Any]


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command, and returns its code and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    async with open_mailbox("store.db", MAILBOX) as mailbox:
        for topic in ("orders.eu", "orders.us", "mail"):
            await mailbox.send_message(NewMessage(topic=topic, payload=b"{}"))

    async def run_command(command: Any, *arguments: Any, as_json: bool = False, **options: Any) -> Any:
        capsys.readouterr()
        settings = load_settings({"store": "store.db", "mailbox": MAILBOX}, {}, None)
        code = await command(Session("searches", settings, Output(as_json)), *arguments, **options)
        return code, capsys.readouterr().out

    return run_command


async def test_a_search_is_saved_listed_and_deleted(run: Run) -> None:
    assert (await run(searches.save, "Orders", f"http://127.0.0.1/console/search?{QUERY}"))[1] == (
        "The search Orders is saved.\n"
    )
    await run(searches.save, "All", "")
    _, text = await run(searches.list_searches)
    assert [line.split()[0] for line in text.splitlines()[-2:]] == ["All", "Orders"]
    assert max(map(len, text.splitlines())) <= 80
    _, text = await run(searches.list_searches, as_json=True)
    (_, saved) = json.loads(text)["searches"]
    assert (saved["name"], saved["query"], saved["topics"]) == ("Orders", QUERY, ["orders.*"])
    with pytest.raises(IdempotencyConflict):
        await run(searches.save, "Orders", "topics=orders.*&limit=5")
    await run(searches.save, "Orders", "topics=orders.*&limit=5", replace=True)
    with pytest.raises(NotFound, match="did you mean Orders"):
        await run(searches.delete, "Order")
    await run(searches.delete, saved["search_id"])
    assert json.loads((await run(searches.list_searches, as_json=True))[1])["searches"][0]["name"] == "All"


async def test_searches_of_one_name_on_other_topics_are_told_apart_by_their_ids(run: Run) -> None:
    for topic in ("orders.*", "mail"):
        await run(searches.save, "Mine", f"topics={topic}")
    with pytest.raises(WrongUsage, match=r"Several searches .* \(topics=mail\)"):
        await run(searches.delete, "Mine")
    saved = json.loads((await run(searches.list_searches, as_json=True))[1])["searches"]
    for each in saved:
        await run(searches.delete, each["search_id"])
    assert json.loads((await run(searches.list_searches, as_json=True))[1]) == {"searches": []}


async def test_a_saved_search_finds_what_the_console_finds(run: Run) -> None:
    await asyncio.to_thread(rebuild_projections, "store.db", runner=LocalTaskRunner())
    await run(searches.save, "Orders", QUERY)
    code, text = await run(searches.run, "Orders", as_json=True)
    assert (code, [json.loads(line)["topic"] for line in text.splitlines()]) == (
        None,
        ["orders.eu", "orders.us"],
    )
    await run(searches.save, "None", "topics=none")
    assert await run(searches.run, "None", as_json=True) == (NOTHING, "")
    await run(searches.save, "Wrong", "statuses=gone")
    with pytest.raises(InvalidRequest, match="gone"):
        await run(searches.run, "Wrong")
