"""The event log and ownership conformance suites on JetStream, and what only this store promises."""

from collections.abc import Iterator

import pytest

from postroom.adapters.jetstream import log_index
from postroom.adapters.jetstream.event_log import JetStreamEventLog
from postroom.adapters.jetstream.ownership import JetStreamOwnership
from postroom.adapters.jetstream.settings import parse_store_url
from postroom.adapters.jetstream.store_streams import StoreStreams
from postroom.application.ports.event_log import EventLog
from tests.conformance.event_log import EventLogConformance
from tests.conformance.log_store import ONE, Store
from tests.conformance.ownership import OwnershipConformance


class JetStreamStore(Store):
    is_durable = True
    durability = "power-cut"

    def __init__(self, url: str) -> None:
        self.url = url
        self.streams = StoreStreams(parse_store_url(self.url))
        self._opened: list[EventLog] = []

    def open(self, mailbox: str = ONE) -> JetStreamEventLog:
        log = JetStreamEventLog(self.streams, mailbox)
        self._opened.append(log)
        return log

    def open_reader(self, mailbox: str = ONE) -> JetStreamEventLog:
        log = JetStreamEventLog(self.streams, mailbox, create_missing=False)
        self._opened.append(log)
        return log

    def close(self) -> None:
        for log in self._opened:
            log.close()


@pytest.fixture
def store(jetstream_store: str) -> Iterator[JetStreamStore]:
    store = JetStreamStore(jetstream_store)
    yield store
    store.close()


class TestJetStreamEventLog(EventLogConformance):
    pass


class TestJetStreamEventLogWithSmallRuns(EventLogConformance):
    """The index is saved again and again, and read from the store."""

    @pytest.fixture(autouse=True)
    def _small_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(log_index, "RUN_ENTRIES", 3)
        monkeypatch.setattr(log_index, "CACHED_RUNS", 2)


class TestJetStreamEventLogInParts(EventLogConformance):
    """Nearly every append is larger than a message, and the stream takes no batches."""

    @pytest.fixture
    def store(self, jetstream_store: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[JetStreamStore]:
        monkeypatch.setattr(
            "postroom.adapters.jetstream.client.StreamClient.max_bytes", property(lambda _: 20_000)
        )
        monkeypatch.setattr("postroom.adapters.jetstream.store_streams.ATOMIC_API_LEVEL", 99)
        store = JetStreamStore(jetstream_store)
        yield store
        store.close()


class TestJetStreamOwnership(OwnershipConformance):
    @pytest.fixture
    def ownership(self, store: JetStreamStore) -> JetStreamOwnership:
        return JetStreamOwnership(store.streams)
