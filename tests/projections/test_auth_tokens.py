"""Publishers' auth tokens stay in the log and never reach the read models."""

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.queries import open_read_models
from postroom.domain.envelope.build import without_auth_token
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.search import EventFilter
from tests.projections import following
from tests.projections.histories import new_follower, take_extents

TOKEN = b"canary-token"


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "store.db")
    url: str = request.getfixturevalue("postgres_store")
    return url


def envelope(id_: str) -> bytes:
    envelope = PrismEnvelope(envelope_version=1)
    envelope.metadata.message_id, envelope.metadata.topic = id_, "orders"
    envelope.metadata.published_at.seconds = 1_700_000_000
    envelope.payload.value = b"payload"
    envelope.security.auth_token = TOKEN.decode()
    envelope.security.publisher_id = "alice"
    return envelope.SerializeToString() + b"\xfa\x3f\x03new"  # a field of a later version


def test_auth_tokens_are_not_in_the_read_models(store: str, tmp_path: Path) -> None:
    asyncio.run(send(store, "rebuilt"))
    version = following.build(store, take_extents(store))
    asyncio.run(send(store, "followed"))
    with closing(new_follower(store, version=version)) as follower:
        follower.advance()
    with closing(open_read_models(store)) as models:
        found = {each.message_id: each.envelope_blob for each in models.search(EventFilter()).items}
    assert found == {id_: without_auth_token(envelope(id_)) for id_ in ("rebuilt", "followed")}
    for file in tmp_path.glob("*-views*"):
        assert TOKEN not in file.read_bytes()


async def send(store: str, id_: str) -> None:
    async with open_mailbox(store) as mailbox:
        await mailbox.send_envelopes([envelope(id_)])
