"""Being connected to a NATS server."""

import pytest

from postroom.adapters.embedded.process import free_port
from postroom.adapters.nats.connection import NatsSettings, connect
from postroom.domain.errors import Unavailable


async def test_a_server_that_nobody_runs_is_unavailable_soon_and_by_name() -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    with pytest.raises(
        Unavailable, match=rf"NATS at {url} can't be reached: .*Connect call failed.*\[nats\] url"
    ):
        async with connect(NatsSettings(url), "test"):
            pytest.fail("connected to nobody")
