"""Members that join and leave lose nothing and store nothing twice; the long form is `rebalance_storm`."""

from pathlib import Path

import pytest

from postroom.domain.errors import Unavailable
from tests.integration.broker_drill import KafkaBroker
from tests.integration.rebalance_storm import PARTITIONS, storm


@pytest.mark.extended
async def test_a_rebalance_storm_loses_nothing_and_stores_nothing_twice(tmp_path: Path) -> None:
    try:
        broker = KafkaBroker(tmp_path / "broker", PARTITIONS)
    except Unavailable as error:
        pytest.skip(str(error))
    with broker.server:
        figures = await storm(broker, tmp_path, 6.0, 0.5)
    assert min(figures.joined, figures.left + figures.cancelled) > 0
