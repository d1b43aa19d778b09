"""NATS servers of the lease store: one that is alone, and a cluster of three."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from uuid import uuid4

import pytest

from postroom.adapters.jetstream.lease_store import JetStreamLeaseStore
from postroom.adapters.jetstream.settings import LeaseStreamSettings
from postroom.adapters.nats.settings import NatsSettings
from tests.support.servers.nats import NatsServer
from tests.support.servers.nats_cluster import NatsCluster

OpenLeaseStore = Callable[..., JetStreamLeaseStore]


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server for the whole run; every test uses a stream of its own."""
    with NatsServer(tmp_path_factory.mktemp("nats"), sync_always=True) as server:
        yield server


@pytest.fixture(scope="session")
def nats_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    """Three servers for the whole run; a test that stops some of them heals the cluster."""
    with NatsCluster(tmp_path_factory.mktemp("nats-cluster")) as cluster:
        yield cluster


@pytest.fixture
def stream() -> str:
    """Return the name of a stream that no other test uses."""
    return f"LEASES_{uuid4().hex[:12]}"


@pytest.fixture
def open_store(stream: str) -> Iterator[OpenLeaseStore]:
    """Open lease stores on the test's stream; all are closed when the test is over."""
    with ExitStack() as opened:

        def open_(url: str, **settings: object) -> JetStreamLeaseStore:
            defaults: dict[str, object] = {"stream": stream, "assume_sync_always": True}
            store = JetStreamLeaseStore(
                LeaseStreamSettings(nats=NatsSettings(url), **(defaults | settings))  # type: ignore[arg-type]  # any
            )
            opened.callback(store.close)
            return store

        yield open_
