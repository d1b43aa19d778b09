from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def quiet_log() -> Iterator[None]:
    """Leave out what the engine logs about the thousands of faults that a simulation injects on purpose."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    yield
    structlog.reset_defaults()
