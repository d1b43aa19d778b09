from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from playwright.sync_api import Browser

from postroom.domain.errors import Unavailable
from tests.support.browser import chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium for the tests of a file; while it runs, none of them may run an event loop."""
    with ExitStack() as opened:
        try:
            started = opened.enter_context(chromium())
        except Unavailable as error:
            pytest.skip(str(error))
        yield started
