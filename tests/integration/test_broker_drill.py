"""Each broker's messages are stored once, whatever is killed or paused; the large form is `broker_drill`."""

from pathlib import Path

import pytest

from postroom.domain.errors import Unavailable
from tests.integration.broker_drill import BROKERS, run


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["kafka", "redis"])
async def test_kills_and_pauses_of_ingester_and_broker_lose_nothing_and_store_nothing_twice(
    kind: str, tmp_path: Path
) -> None:
    try:
        broker = BROKERS[kind](tmp_path / "broker")
    except Unavailable as error:
        pytest.skip(str(error))
    with broker.server:
        figures = await run(broker, tmp_path, 1_000, 1, 1.0)
    assert figures.faults["ingester killed"] == figures.faults["broker paused"] == 1
