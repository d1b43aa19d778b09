"""Outboxes and inboxes in the console."""

from pathlib import Path

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.compose.store import open_store
from postroom.application.ports.read_models import ContextBacklog
from tests.support.access import Controlled
from tests.support.clocks import ManualClock
from tests.support.servers.console import Browser


async def test_backlogs_of_contexts_are_shown_to_those_who_see_all_topics(
    stored: Controlled[OwnedMailbox, ManualClock], stored_browser: Browser, tmp_path: Path
) -> None:
    await stored_browser.sign_in(stored.issue())
    empty = (await stored_browser.get("/outboxes")).text
    assert "No context is counted" in empty
    assert "None waits" in empty
    counted = ContextBacklog("bill<b>", "outbox", 1_234, 3, None, stored.clock.wall())
    open_store(str(tmp_path / "store.db")).save_context_backlog([counted])
    text = (await stored_browser.get("/outboxes")).text
    for expected in ("bill&lt;b&gt;", ">outbox<", ">1,234<", ">3<", "postroom outbox list"):
        assert expected in text
    async with Browser.another(stored_browser) as limited:
        await limited.sign_in(stored.issue(topics=["orders"]))
        assert (await limited.get("/outboxes")).status == 403
