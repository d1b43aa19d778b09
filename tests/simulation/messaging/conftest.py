from collections.abc import Iterator

import pytest

from postroom.adapters.compose.maintenance import migrate_messaging
from tests.simulation.messaging.world import Servers
from tests.support.fixtures import CreateDatabase


@pytest.fixture(scope="session")
def servers(
    tmp_path_factory: pytest.TempPathFactory, create_shared_database: CreateDatabase
) -> Iterator[Servers]:
    """A NATS server of the simulation's own, which crashes at times, and an empty outbox and inbox."""
    database = create_shared_database(None)
    migrate_messaging(database)
    with Servers(tmp_path_factory.mktemp("messaging"), database).running() as servers:
        yield servers
