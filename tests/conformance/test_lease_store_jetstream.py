"""The lease store conformance suite on JetStream."""

from collections.abc import Iterator
from uuid import uuid4

import pytest

from postroom.adapters.jetstream.lease_store import JetStreamLeaseStore
from postroom.adapters.jetstream.settings import EVENTS_PER_AGGREGATE, LeaseStreamSettings
from postroom.adapters.nats.settings import NatsSettings
from tests.conformance.lease_store import PATIENT_MS, LeaseStoreConformance, OpenStore
from tests.support.servers.nats import NatsServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(tmp_path_factory.mktemp("nats"), sync_always=True) as server:
        yield server


class TestJetStreamLeaseStore(LeaseStoreConformance):
    @pytest.fixture
    def open_store(self, server: NatsServer, request: pytest.FixtureRequest) -> OpenStore:
        # The stream removes old events by itself, which the other tests of the suite want to see.
        removes = "removing_old_events" in request.node.name
        settings = LeaseStreamSettings(
            nats=NatsSettings(server.url),
            stream=f"LEASES_{uuid4().hex}",
            assume_sync_always=True,
            events_per_aggregate=EVENTS_PER_AGGREGATE if removes else 1_000,
            timeout_ms=PATIENT_MS,
        )
        return lambda: JetStreamLeaseStore(settings)
