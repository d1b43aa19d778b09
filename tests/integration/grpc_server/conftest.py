"""A mailbox, its address over gRPC, and a caller."""

from collections.abc import AsyncIterator

import pytest

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from tests.support.grpc_callers import Caller, connected, serve_grpc
from tests.support.stores import MAILBOX


@pytest.fixture
async def mailbox() -> AsyncIterator[OwnedMailbox]:
    async with open_mailbox("memory:", MAILBOX) as opened:
        yield opened


@pytest.fixture
async def address(mailbox: OwnedMailbox) -> AsyncIterator[str]:
    async with serve_grpc(mailbox, "127.0.0.1:0") as served:
        yield served


@pytest.fixture
async def caller(address: str) -> AsyncIterator[Caller]:
    async with connected(address) as opened:
        yield opened
