"""Logs of a store that are not mailboxes, such as the audit log."""

from contextlib import closing
from pathlib import Path
from uuid import uuid4

import pytest
from eventsourcing.persistence import StoredEvent

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.queries import describe_mailboxes, read_mailbox
from postroom.adapters.compose.store import Store, open_store
from postroom.adapters.recorder import LogRecorder
from postroom.domain.errors import InvalidRequest
from postroom.domain.names import AUDIT_LOG, CAPABILITY_LOG
from tests.support.stores import MAILBOX


@pytest.fixture(params=["sqlite", "postgres"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "store.db")
    url: str = request.getfixturevalue("postgres_store")
    return url


def write(store: Store, name: str) -> None:
    with closing(store.event_log(name)) as log:
        LogRecorder(log, lambda: 1).insert_events([StoredEvent(uuid4(), 1, "LeaseRenewed.1", b"")])


async def test_queries_and_projections_skip_reserved_logs(address: str) -> None:
    store = open_store(address)
    for name in (AUDIT_LOG, MAILBOX, CAPABILITY_LOG):
        write(store, name)
    assert store.mailboxes() == [MAILBOX]
    reader = store.log_reader("python")
    assert reader.mailboxes().keys() == reader.heads().keys() == {MAILBOX}
    assert [extent.name for extent in reader.extents()] == [MAILBOX]
    with closing(store.read_model_updater()) as updater:
        assert [head.name for head in updater.heads({})] == [MAILBOX]


@pytest.mark.parametrize("name", [AUDIT_LOG, CAPABILITY_LOG])
async def test_a_reserved_log_can_not_be_opened_as_a_mailbox(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / "store.db")
    write(open_store(path), name)
    with pytest.raises(InvalidRequest, match="namespace@proxy"), read_mailbox(path, name):
        pass
    with pytest.raises(InvalidRequest, match="namespace@proxy"):
        async with open_mailbox(path, name):
            pass
    assert await describe_mailboxes(path) == []
