"""The page of the audit log: entries by filter, its verification, and who may read it."""

import os
import pwd
import re
from collections.abc import AsyncIterator
from contextlib import closing
from html import unescape
from pathlib import Path

import pytest

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.compose.access import open_local_access, read_audit_log
from postroom.adapters.compose.console import new_code
from postroom.adapters.console.pages import audit as audit_page
from postroom.adapters.console.pages import log as log_page
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.application.access.audit_log import StoredAuditLog
from postroom.domain.capability.rights import Right
from postroom.domain.errors import Unauthenticated
from postroom.domain.names import AUDIT_LOG
from tests.conformance.audit_log import entry
from tests.integration.console.conftest import access_of
from tests.support.access import Controlled
from tests.support.clocks import ManualClock
from tests.support.messages import MAILBOX, message
from tests.support.servers.console import Answer, Browser, served_console

Stored = Controlled[OwnedMailbox, ManualClock]


@pytest.fixture
async def auditor(stored: Stored, tmp_path: Path) -> AsyncIterator[Browser]:
    """A browser at a console whose store has audit entries of ada and bob."""
    store = tmp_path / "store.db"
    audit = StoredAuditLog(SqliteEventLog(store, AUDIT_LOG), stored.clock)
    for number in range(5):
        await audit.record([entry(number)])
    await audit.record([entry(9, principal="bob <i>", operation="read-payload", outcome="E_CAP_SCOPE")])
    await audit.close()
    async with served_console(stored.mailbox, store=str(store), access=access_of(stored)) as browser:
        await browser.sign_in(stored.issue())
        yield browser


def targets(page: Answer) -> list[str]:
    """Return the messages of the entries that a page shows."""
    return re.findall(r">(m-\d+)<", page.text)


async def test_entries_are_shown_newest_first_page_by_page(
    auditor: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_page, "ROWS", 4)
    page = await auditor.get("/audit")
    assert targets(page) == ["m-9", "m-4", "m-3", "m-2"]
    assert "bob &lt;i&gt;" in page.text
    link = re.search(r'rel="next" href="/console([^"]+)"', page.text)
    assert link
    assert targets(await auditor.get(unescape(link[1]))) == ["m-1", "m-0"]


async def test_each_field_narrows_the_entries(auditor: Browser) -> None:
    for query, shown in (
        ({"principal": "bob <i>"}, ["m-9"]),
        ({"operation": "read-payload"}, ["m-9"]),
        ({"outcome": "E_CAP_SCOPE"}, ["m-9"]),
        ({"target": "m-2"}, ["m-2"]),
        ({"topic": "nothing"}, []),
        ({"capability": "ff"}, []),
        ({"since": "2100-01-01"}, []),
        ({"until": "1990-01-01T00:00:00Z"}, []),
    ):
        assert targets(await auditor.get("/audit", params=query)) == shown
    assert (await auditor.get("/audit", params={"since": "soon"})).status == 400


async def test_a_filter_that_matches_nothing_reads_a_bounded_number_of_entries_a_page(
    auditor: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_page, "READS", 2)
    page = await auditor.get("/audit", params={"target": "m-1"})
    assert "Older entries have not been read yet" in page.text
    assert 'rel="next"' in page.text


async def test_the_chain_of_the_audit_log_is_verified_in_parts(
    auditor: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_page, "EVENTS_PER_PART", 4)
    page = await auditor.get("/audit/verify")
    link = re.search(r'<a class="button primary" href="/console([^"]+)"', page.text)
    assert link
    page = await auditor.get(unescape(link[1]))
    with closing(SqliteEventLog(tmp_path / "store.db", AUDIT_LOG, create_missing=False)) as log:
        head = log.head()
    assert head is not None
    assert "Positions 1 to 6" in page.text
    assert head.chain.hex() in page.text


@pytest.mark.parametrize("path", ["/audit", "/audit/verify"])
async def test_the_audit_log_needs_admin_and_its_reads_are_audited(
    stored: Stored, auditor: Browser, path: str
) -> None:
    rights = [each for each in Right if each is not Right.ADMIN]
    for token in (stored.issue(operations=rights), stored.issue(topics=["orders"])):
        page = await auditor.sign_in(token)
        assert 'href="/console/audit"' not in page.text or "topics" in page.text
        assert (await auditor.get(path)).status == 403
    assert [each.outcome for each in stored.audit.entries] == ["E_CAP_SCOPE"] * 2
    assert {each.operation for each in stored.audit.entries} == {"admin"}


async def test_a_store_without_an_audit_log_says_so(stored: Stored, stored_browser: Browser) -> None:
    await stored_browser.sign_in(stored.issue())
    assert "Nothing has been audited yet" in (await stored_browser.get("/audit")).text
    assert (await stored_browser.get("/audit/verify")).status == 404


async def test_the_session_of_a_local_user_is_recorded_and_so_is_what_it_does(tmp_path: Path) -> None:
    store = str(tmp_path / "store.db")
    user = f"local user {pwd.getpwuid(os.geteuid()).pw_name}"
    async with (
        open_mailbox(store, MAILBOX, durability="relaxed") as mailbox,
        open_local_access(store, MAILBOX) as (access, token),
        served_console(mailbox, store=store, access=access, code=new_code(token)) as browser,
    ):
        await mailbox.send_message(message(message_id="m"))
        session = await access(mailbox, mailbox.search_messages)(token)
        assert (await session.mailbox.get_message("m")).message_id == "m"
        await session.mailbox.pause_topic("orders")
        with pytest.raises(Unauthenticated):
            await access(mailbox, mailbox.search_messages)(None)
        assert (await browser.get("/")).status == 401
    with read_audit_log(store) as reader:
        assert reader is not None
        entries = reader.read().items[::-1]
    assert [(each.principal, each.operation, each.target, each.criteria) for each in entries] == [
        (user, "admin", "", ("session",)),
        (user, "read-payload", "m", ()),
        (user, "admin", "", ("pause",)),
    ]
    assert len({each.capability for each in entries}) == 1
