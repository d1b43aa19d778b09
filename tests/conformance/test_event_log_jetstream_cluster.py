"""The event log and ownership conformance suites on three NATS servers."""

from collections.abc import Iterator
from uuid import uuid4

import pytest

from postroom.adapters.jetstream.ownership import JetStreamOwnership
from tests.conformance.event_log import EventLogConformance
from tests.conformance.ownership import OwnershipConformance
from tests.conformance.test_event_log_jetstream import JetStreamStore
from tests.support.servers.nats_cluster import NatsCluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    with NatsCluster(tmp_path_factory.mktemp("nats-cluster")) as cluster:
        yield cluster


@pytest.fixture
def store(cluster: NatsCluster) -> Iterator[JetStreamStore]:
    hosts = cluster.url.replace("nats://", "")
    store = JetStreamStore(f"nats://{hosts}/STORE_{uuid4().hex[:12]}?sync=always")
    yield store
    store.close()


class TestReplicatedJetStreamEventLog(EventLogConformance):
    pass


class TestReplicatedJetStreamOwnership(OwnershipConformance):
    @pytest.fixture
    def ownership(self, store: JetStreamStore) -> JetStreamOwnership:
        return JetStreamOwnership(store.streams)
