"""Capabilities of a mailbox in a file, which another process issues and revokes."""

from pathlib import Path
from typing import Any

import pytest

from postroom.adapters.compose import list_mailboxes, open_mailbox
from postroom.adapters.compose.access import open_access_control, open_capabilities, open_key_ring
from postroom.adapters.compose.store import open_store
from postroom.domain.capability.token import Token
from postroom.domain.errors import InvalidRequest, Unauthenticated
from postroom.domain.names import CAPABILITY_LOG
from tests.support.access import MemoryAuditLog
from tests.support.stores import MAILBOX, message


async def test_another_process_revokes_a_capability_of_a_served_mailbox(tmp_path: Path) -> None:
    """And the log of capabilities is no mailbox."""
    store = str(tmp_path / "orders.db")
    keys = open_key_ring(store)

    async def search(_: Any) -> Any:
        raise NotImplementedError

    async with open_mailbox(store, MAILBOX, durability="relaxed") as mailbox:
        with open_capabilities(store, keys) as capabilities, open_capabilities(store, keys) as elsewhere:
            opening = open_access_control(mailbox, search, capabilities, keys, MemoryAuditLog())
            with pytest.raises(InvalidRequest, match="There is no key"):
                await opening.__aenter__()
            elsewhere.rotate()
            token = elsewhere.issue("shop")
            async with open_access_control(mailbox, search, capabilities, keys, MemoryAuditLog()) as control:
                session = await control.open_session(token)
                await session.mailbox.send_message(message())
                elsewhere.revoke(Token.decode(token).read_identifier().nonce)
                await control.refresh()
                with pytest.raises(Unauthenticated):
                    await session.mailbox.send_message(message())
    assert list_mailboxes(store) == [MAILBOX]
    assert list(open_store(store).log_reader().mailboxes()) == [MAILBOX]
    assert [each.name for each in open_store(store).log_reader().extents()] == [MAILBOX]
    with pytest.raises(InvalidRequest):
        async with open_mailbox(store, CAPABILITY_LOG):
            pass
    log = open_store(store).existing_log(CAPABILITY_LOG)
    assert len(list(log.read())) == 4
    log.close()
