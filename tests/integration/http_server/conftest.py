from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers.http import PostroomServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostroomServer]:
    """A server whose deadlines are short enough to wait for."""
    folder: Path = tmp_path_factory.mktemp("server")
    with PostroomServer(
        folder,
        header_timeout="500ms",
        body_timeout="500ms",
        idle_timeout="1s",
        heartbeat="300ms",
        frame_bytes=65_536,
        policy={"visibility": "30s", "shards": 1, "shard_capacity": 50},
    ) as running:
        yield running
