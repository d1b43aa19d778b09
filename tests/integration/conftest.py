"""The stores that the handlers are tried on."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from postroom.adapters.compose import Postroom, open_mailbox
from tests.integration.stores import MAILBOX


@pytest.fixture(params=["memory:", "sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    stores: dict[str, Callable[[], str]] = {
        "memory:": lambda: "memory:",
        "sqlite": lambda: str(tmp_path / "store.db"),
        "postgres": lambda: request.getfixturevalue("postgres_store"),
    }
    return stores[request.param]()


@pytest.fixture
async def mailbox(store: str) -> AsyncIterator[Postroom]:
    async with open_mailbox(store, MAILBOX, durability="relaxed") as opened:
        yield opened
