"""The two stores that the handlers are tried on."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from postroom.adapters.compose import Postroom, open_mailbox
from tests.integration.stores import MAILBOX


@pytest.fixture(params=["memory:", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    name: str = request.param
    return name if name == "memory:" else str(tmp_path / "store.db")


@pytest.fixture
async def mailbox(store: str) -> AsyncIterator[Postroom]:
    async with open_mailbox(store, MAILBOX, durability="relaxed") as opened:
        yield opened
