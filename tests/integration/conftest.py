"""The stores that the handlers are tried on."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from nats.aio.client import Client

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from tests.integration.ingest_world import stream_of
from tests.support.stores import MAILBOX, Place, jetstream_place, memory_place, postgres_place, sqlite_place


@pytest.fixture(params=["memory:", "sqlite", "postgres", "jetstream"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    stores: dict[str, Callable[[], str]] = {
        "memory:": lambda: "memory:",
        "sqlite": lambda: str(tmp_path / "store.db"),
        "postgres": lambda: request.getfixturevalue("postgres_store"),
        "jetstream": lambda: request.getfixturevalue("jetstream_store"),
    }
    return stores[request.param]()


@pytest.fixture
async def mailbox(store: str) -> AsyncIterator[OwnedMailbox]:
    async with open_mailbox(store, MAILBOX, durability="relaxed") as opened:
        yield opened


@pytest.fixture(params=["memory", "sqlite", "postgres", "jetstream"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    places: dict[str, Callable[[], Place]] = {
        "memory": memory_place,
        "sqlite": lambda: sqlite_place(tmp_path),
        "postgres": lambda: postgres_place(request.getfixturevalue("postgres_store")),
        "jetstream": lambda: jetstream_place(request.getfixturevalue("jetstream_store")),
    }
    return places[request.param]()


@pytest.fixture
async def client(nats_url: str) -> AsyncIterator[Client]:
    """Connect to a server with the streams of the ingestion tests."""
    async with stream_of(nats_url) as client:
        yield client


@pytest.fixture
def sqlite(tmp_path: Path) -> str:
    return str(tmp_path / "store.db")
