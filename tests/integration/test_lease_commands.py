"""`postroom lease` and `postroom route`, against an admin."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from postroom.adapters.cli import admin as commands
from postroom.adapters.cli.output import Output
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import load_settings
from postroom.adapters.cli.values import WrongUsage
from postroom.adapters.compose.control_plane import LeaseStores, RunningAdmin, serve_admin
from postroom.adapters.grpc.node_access import NodeAccess
from postroom.adapters.memory.lease_store import MemoryLeaseStore
from postroom.domain.errors import InvalidRequest, NotFound, Unauthenticated, Unavailable
from tests.support.lease_requests import lease_request

MAILBOX = "orders@proxy-1"
TOKEN = "node-" + "t" * 40
COLUMNS = 80

Open = Callable[..., Session]


@pytest.fixture
async def admin() -> AsyncIterator[RunningAdmin]:
    store = LeaseStores(MemoryLeaseStore())
    async with serve_admin(store, "127.0.0.1:0", access=NodeAccess(TOKEN)) as served:
        await served.control_plane.acquire_lease(lease_request())
        await served.control_plane.acquire_lease(lease_request("invoices@proxy-1", "r" * 60))
        yield served


@pytest.fixture
def session(admin, monkeypatch: pytest.MonkeyPatch) -> Open:
    monkeypatch.delenv("COLUMNS", raising=False)

    def open_session(*, as_json: bool = False, **environment: str) -> Session:
        cluster = {
            "POSTROOM_CLUSTER__ADMIN": f"127.0.0.1:1,{admin.url.partition('://')[2]}",
            "POSTROOM_CLUSTER__NODE_TOKEN": TOKEN,
        }
        return Session("test", load_settings({}, cluster | environment), Output(as_json))

    return open_session


def lines(captured: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines on stdout, each of which fits a terminal."""
    printed = captured.readouterr().out.splitlines()
    assert [line for line in printed if len(line) > COLUMNS] == []
    return printed


def document(captured: pytest.CaptureFixture[str]) -> Any:
    return json.loads(captured.readouterr().out)


async def test_leases_are_listed_as_a_table_and_as_json(session, capsys) -> None:
    await commands.list_leases(session())
    header, _, invoices, orders = lines(capsys)
    assert header.split() == ["mailbox", "runner", "status", "epoch", "remaining", "renewed", "health"]
    assert invoices.startswith("invoices@proxy-1")
    assert orders.split()[:4] == [MAILBOX, "runner-1", "active", "1"]

    await commands.list_leases(session(as_json=True))
    (_, described) = document(capsys)["leases"]
    assert (described["mailbox"], described["ttl_ms"], described["grace_ms"]) == (MAILBOX, 300_000, 60_000)


async def test_routes_are_listed_as_a_table_and_as_json(session, capsys) -> None:
    await commands.list_routes(session())
    header, _, _, orders = lines(capsys)
    assert header.split() == ["mailbox", "proxy", "runner", "address", "partition", "epoch"]
    assert orders.split()[:4] == [MAILBOX, "proxy-1", "runner-1", "127.0.0.1:7001"]

    await commands.list_routes(session(as_json=True))
    table = document(capsys)
    assert [each["mailbox"] for each in table["routes"]] == ["invoices@proxy-1", MAILBOX]
    assert table["position"] == 2


async def test_a_lease_that_is_renewed_is_released_by_force_only(session, admin, capsys) -> None:
    with pytest.raises(InvalidRequest, match="use --force"):
        await commands.release(session(), MAILBOX)
    await commands.release(session(), MAILBOX, force=True)
    assert lines(capsys) == [f"Released the lease of {MAILBOX} of runner runner-1."]
    with pytest.raises(NotFound, match="has ended already"):
        await commands.release(session(), MAILBOX, force=True)
    with pytest.raises(NotFound, match=f"did you mean {MAILBOX}"):
        await commands.release(session(), "order@proxy-1", force=True)
    with pytest.raises(InvalidRequest, match="namespace@proxy"):
        await commands.release(session(), "orders")
    routes = await admin.control_plane.list_routes()
    assert [each.mailbox for each in routes.routes] == ["invoices@proxy-1"]


async def test_a_wrong_token_or_address_is_one_clear_error(session) -> None:
    with pytest.raises(Unauthenticated, match="node_token"):
        await commands.list_leases(session(POSTROOM_CLUSTER__NODE_TOKEN="other-" + TOKEN))
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        await commands.list_leases(session(), "127.0.0.1:1")
    for address in ("127.0.0.1", "", "a b:1", ","):
        with pytest.raises((InvalidRequest, WrongUsage)):
            await commands.list_routes(session(), address)
