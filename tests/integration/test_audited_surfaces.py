"""What callers of HTTP and gRPC read is in the audit log before they get it."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.compose.access import open_access, open_capabilities, open_key_ring, read_audit_log
from postroom.adapters.compose.connect import connect_remote
from postroom.application.access.audit import AuditEntry
from postroom.domain.capability.rights import Right, Rights, Topics
from postroom.domain.errors import Forbidden, PostroomError, Unavailable
from tests.support.access import controlled_mailbox
from tests.support.stores import MAILBOX, message
from tests.support.surfaces import served

TIMEOUT_MS = 60_000
REPEAT_MS = 2_000
"""How long a client repeats a call that is unavailable."""
READ = (Right.READ_HEADERS, Right.READ_PAYLOAD)


@pytest.fixture(params=["http", "grpc"])
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A store with a key."""
    path = str(tmp_path / "store.db")
    with open_capabilities(path, open_key_ring(path)) as capabilities:
        capabilities.rotate()
    return path


@asynccontextmanager
async def serve(store: str, protocol: str) -> AsyncIterator[tuple[OwnedMailbox, str]]:
    """Serve a mailbox of a store with access control; yield it and the URL."""
    async with (
        open_mailbox(store, MAILBOX, durability="relaxed") as mailbox,
        open_access(store) as access,
        served(mailbox, protocol, access=access) as url,
    ):
        yield mailbox, url


def issue(store: str, *operations: Right) -> str:
    """Issue a capability on the topic `orders`, and return its token."""
    with open_capabilities(store, open_key_ring(store)) as capabilities:
        return capabilities.issue("ada", Rights(operations=operations), [Topics(("orders",))])


def entries(store: str) -> Sequence[AuditEntry]:
    """Return the entries of the audit log, oldest first."""
    with read_audit_log(store) as log:
        assert log is not None
        log.verify()
        return log.read().items[::-1]


async def test_reads_and_refusals_are_recorded_and_no_payload_or_token_is(store: str, protocol: str) -> None:
    reader, narrow = issue(store, *READ), issue(store, Right.READ_HEADERS)
    async with serve(store, protocol) as (mailbox, url):
        sent = await mailbox.send_message(message(b"canary payload"))
        other = await mailbox.send_message(message(topic="payments"))
        async with connect_remote(url, timeout_ms=TIMEOUT_MS, token=reader) as remote:
            await remote.get_message(sent.message_id)
            assert len(await remote.peek_messages("orders")) == 1
            with pytest.raises(PostroomError):
                await remote.get_message(other.message_id)
        async with connect_remote(url, timeout_ms=TIMEOUT_MS, token=narrow) as remote:
            with pytest.raises(Forbidden):
                await remote.get_message(sent.message_id)
    read, peek, uncovered, refused = (each for each in entries(store) if each.operation == "read-payload")
    assert (read.principal, read.mailbox, read.target) == ("ada", MAILBOX, sent.message_id)
    assert (read.outcome, read.matches) == ("allowed", 1)
    assert (peek.topics, peek.target, peek.matches) == (("orders",), "", 1)
    assert (uncovered.target, uncovered.matches) == (other.message_id, 0)
    assert uncovered.outcome.startswith("E_")
    assert refused.outcome == "E_CAP_SCOPE"
    assert len({read.capability, refused.capability}) == 2
    assert all(each.corr_id for each in (read, peek, uncovered, refused))
    with read_audit_log(store) as log:
        assert log is not None
        shown = repr(log.read().items)
    assert "canary" not in shown
    assert reader not in shown


async def test_a_payload_is_not_sent_when_the_read_can_not_be_recorded(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = []

    async def fail(*_: object) -> None:
        refusals.append("full")
        raise Unavailable("The disk is full.")

    async with controlled_mailbox() as controlled:
        access = controlled.control.open_session
        async with served(controlled.mailbox, protocol, access=lambda *_: access) as url:
            sent = await controlled.mailbox.send_message(message())
            token = controlled.issue()
            async with connect_remote(url, timeout_ms=TIMEOUT_MS, token=token) as remote:
                await remote.get_message(sent.message_id)
                monkeypatch.setattr(controlled.audit, "record", fail)
                with pytest.raises(Unavailable):
                    async with connect_remote(url, timeout_ms=REPEAT_MS, token=token) as other:
                        await other.get_message(sent.message_id)
                await remote.list_topics()
    assert refusals
