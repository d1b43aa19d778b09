import logging

import pytest


@pytest.fixture(autouse=True)
def quiet_log() -> None:
    """Leave out what the engine logs about the thousands of faults that a simulation injects on purpose."""
    logging.getLogger("postroom").setLevel(logging.CRITICAL)
