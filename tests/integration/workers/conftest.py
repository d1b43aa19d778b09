"""A mailbox for the handlers of a worker."""

from collections.abc import AsyncIterator

import pytest

from postroom import TopicPolicy, open_mailbox
from postroom.adapters.compose import OwnedMailbox

FAST = TopicPolicy(max_attempts=2, backoff_base_ms=1, backoff_max_ms=1)


@pytest.fixture
async def mailbox() -> AsyncIterator[OwnedMailbox]:
    async with open_mailbox("memory:", default_policy=FAST) as opened:
        yield opened
