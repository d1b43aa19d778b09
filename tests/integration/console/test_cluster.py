"""The page of the cluster: what its admins tell of runners, leases and routes, and backlogs of contexts."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.compose.store import open_store
from postroom.application.ports.control_plane import Member, PartitionRange
from postroom.application.ports.read_models import ContextBacklog
from postroom.domain.capability.rights import Right
from tests.integration.console.conftest import access_of
from tests.support.access import Controlled
from tests.support.clocks import ManualClock
from tests.support.fixed_control_plane import FixedControlPlane
from tests.support.servers.console import Browser, served_console

Stored = Controlled[OwnedMailbox, ManualClock]


class Admin(FixedControlPlane):
    """A control plane with one proxy."""

    async def list_members(self) -> list[Member]:
        return [
            Member(
                id="east<i>",
                kind="proxy",
                proxy="east<i>",
                address="10.0.0.1:8982",
                partitions=(PartitionRange(0, 127),),
                seen_ms=61_000,
            )
        ]


@asynccontextmanager
async def console_of(stored: Stored, folder: Path, admin: FixedControlPlane | None) -> AsyncIterator[Browser]:
    """Serve the console of a process of a cluster."""

    @asynccontextmanager
    async def open_control_plane() -> AsyncIterator[Any]:
        yield admin

    options: dict[str, Any] = {"store": str(folder / "store.db"), "access": access_of(stored)}
    async with served_console(stored.mailbox, open_control_plane=open_control_plane, **options) as browser:
        await browser.sign_in(stored.issue())
        yield browser


async def test_leases_routes_and_members_are_shown(stored: Stored, tmp_path: Path) -> None:
    admin = Admin()
    admin.lease("acme@east", "10.0.0.2:8983", runner="runner-7", epoch=12)
    async with console_of(stored, tmp_path, admin) as browser:
        page = await browser.get("/cluster")
        for text in ("acme@east", "runner-7", "10.0.0.2:8983", "east&lt;i&gt;", "0 to 127"):
            assert text in page.text
        assert re.search(r"1\smin\s1\ss ago", page.text)
        admin.is_away = True
        page = await browser.get("/cluster")
        assert (page.status, 'role="alert"' in page.text) == (200, True)


async def test_backlogs_of_contexts_are_shown(stored: Stored, tmp_path: Path) -> None:
    counted = ContextBacklog("billing", "outbox", 12_345, 3, None, stored.clock.wall())
    open_store(str(tmp_path / "store.db")).save_context_backlog([counted])
    async with console_of(stored, tmp_path, None) as browser:
        page = await browser.get("/cluster")
        assert "belongs to no cluster" in page.text
        assert "billing" in page.text
        assert "12,345" in page.text


@pytest.mark.parametrize("limit", ["operations", "topics"])
async def test_the_cluster_needs_admin_over_all_topics(
    stored: Stored, stored_browser: Browser, limit: str
) -> None:
    operations = [each for each in Right if each is not Right.ADMIN or limit == "topics"]
    token = stored.issue(topics=["orders" if limit == "topics" else "*"], operations=operations)
    await stored_browser.sign_in(token)
    assert (await stored_browser.get("/cluster")).status == 403
