"""Waits of the tests of a cluster."""

from collections.abc import Awaitable, Callable

import pytest

from tests.support.waiting import until


@pytest.fixture
def settled() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """Return the wait until a condition holds."""
    return until
