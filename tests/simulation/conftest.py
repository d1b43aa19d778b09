import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet_log() -> Iterator[None]:
    """Leave out what the engine logs about the thousands of faults that a simulation injects on purpose."""
    logger = logging.getLogger("postroom")
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(logging.NOTSET)
