"""Capabilities of a mailbox in a store, which another process issues and revokes."""

from pathlib import Path
from typing import Any

import pytest

from postroom.adapters.compose import list_mailboxes, open_mailbox
from postroom.adapters.compose.access import (
    open_access,
    open_access_control,
    open_capabilities,
    open_key_ring,
    read_audit_log,
)
from postroom.adapters.compose.store import open_store
from postroom.domain.capability.token import Token
from postroom.domain.errors import InvalidRequest, Unauthenticated
from postroom.domain.names import CAPABILITY_LOG
from tests.support.access import MemoryAuditLog
from tests.support.stores import MAILBOX, message


@pytest.fixture(params=["sqlite", "postgres", "jetstream"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param != "sqlite":
        return str(request.getfixturevalue(f"{request.param}_store"))
    return str(tmp_path / "orders.db")


async def no_search(_: Any) -> Any:
    raise NotImplementedError


async def test_another_process_issues_and_revokes_a_capability(store: str, tmp_path: Path) -> None:
    keys, audit = open_key_ring(store, str(tmp_path / "keys")), MemoryAuditLog()
    async with open_mailbox(store, MAILBOX, durability="relaxed") as mailbox:
        with open_capabilities(store, keys) as capabilities, open_capabilities(store, keys) as elsewhere:
            elsewhere.rotate()
            token = elsewhere.issue("shop")
            async with open_access_control(mailbox, no_search, capabilities, keys, audit) as control:
                session = await control.open_session(token)
                await session.mailbox.send_message(message())
                elsewhere.revoke(Token.decode(token).read_identifier().nonce)
                await control.refresh()
                with pytest.raises(Unauthenticated):
                    await session.mailbox.send_message(message())
    assert list_mailboxes(store) == [MAILBOX]
    assert [each.name for each in open_store(store).log_reader().extents()] == [MAILBOX]
    with pytest.raises(InvalidRequest):
        async with open_mailbox(store, CAPABILITY_LOG):
            pass
    log = open_store(store).existing_log(CAPABILITY_LOG)
    assert [record.type for record in log.read()][-1] == "CapabilityRevoked"
    log.close()


async def test_callers_of_a_store_have_sessions_as_soon_as_there_is_a_key(tmp_path: Path) -> None:
    store = str(tmp_path / "orders.db")
    with pytest.raises(InvalidRequest, match="There is no key"):
        async with open_access(store):
            pass
    with open_capabilities(store, open_key_ring(store)) as capabilities:
        capabilities.rotate()
        token = capabilities.issue("shop")
    async with open_mailbox(store, MAILBOX, durability="relaxed") as mailbox, open_access(store) as access:
        sent = await mailbox.send_message(message())
        session = await access(mailbox, no_search)(token)
        assert (await session.mailbox.get_message(sent.message_id)).topic == "orders"
    with read_audit_log(store) as log:
        assert log is not None
