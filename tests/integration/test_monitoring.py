"""Metrics and readiness of every long-running command."""

import asyncio
import json
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from postroom import ScheduleSpec
from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.connect import connect as connect_mailbox
from postroom.adapters.compose.connect import share_mailbox
from postroom.adapters.compose.control_plane import LeaseStores, serve_admin
from postroom.adapters.compose.inbox import InboxSettings, open_monitored_worker
from postroom.adapters.compose.ingest import open_namespace
from postroom.adapters.compose.outbox import OutboxSettings, open_monitored_relay
from postroom.adapters.compose.process import serve_monitor
from postroom.adapters.compose.projections import open_follower
from postroom.adapters.compose.schedule import make_scheduler
from postroom.adapters.compose.serve import (
    HttpSettings,
    open_grpc_surface,
    open_http_surface,
    serve_mailbox,
    unrestricted,
)
from postroom.adapters.memory.lease_store import MemoryLeaseStore
from postroom.adapters.memory.store import FunctionEventHandler
from postroom.adapters.nats.connection import connect
from postroom.adapters.nats.settings import NatsSettings
from postroom.adapters.postgres.messaging.settings import MessagingSettings
from postroom.adapters.prometheus.text import write_metrics
from postroom.application.messages import NewMessage
from postroom.application.metrics import Metric, Monitor
from postroom.application.outbox.capture import OutboxCapture, capture_monitor
from postroom.application.outbox.events import OutboxCounter, RecordedMessages
from postroom.application.ports.inbox import HandlerRequest
from postroom.application.ports.outbox import SlotState
from postroom.application.service import SurfaceMetrics
from postroom.application.workers.worker import Worker
from postroom.domain.errors import LeaseHeld
from postroom.domain.policy import TopicPolicy
from postroom.domain.subscription import SubscriptionFilter
from tests.integration.inbox_world import CONSUMER
from tests.integration.ingest_world import MAILBOX, envelopes, namespace, publish
from tests.projections import following
from tests.support.lease_requests import lease_request
from tests.support.outboxes import order_placed, record
from tests.support.proxies import proxy_metrics
from tests.support.servers.nats import NatsServer
from tests.support.waiting import within

GOLDEN = Path(__file__).with_name("metrics.txt")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path / "nats") as server:
        yield server


class Services:
    """A NATS server with streams, and the database of a service."""

    def __init__(self, url: str, database: str, store: str) -> None:
        self.nats = NatsSettings(url)
        self.messaging = MessagingSettings(database, "sea")
        self.store = store

    async def make_streams(self) -> None:
        async with connect(self.nats, "test") as client:
            streams = {
                "SHOP_EVENTS": "shop.event.>",
                "SEA_DLQ": "sea.dlq.>",
                "SEA": "sea.event.>",
                "EVENTS": "acme.>",
            }
            for name, subject in streams.items():
                await client.jetstream().add_stream(name=name, subjects=[subject])
            await publish(client, *envelopes(["e-1"]))

    @asynccontextmanager
    async def relay(self) -> AsyncIterator[Monitor]:
        settings = OutboxSettings(cleanup_every_ms=0, hints=False, poll_ms=50)
        async with (
            open_monitored_relay(self.messaging, self.nats, settings) as (relay, monitor),
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(relay.run())
            yield monitor
            relay.stop()

    @asynccontextmanager
    async def inbox(self, *, ordered: bool = False) -> AsyncIterator[Monitor]:
        async def handle(_: HandlerRequest) -> None:
            if ordered:
                await within(stop.wait())

        stop = asyncio.Event()
        async with (
            open_monitored_worker(
                self.messaging,
                self.nats,
                CONSUMER,
                InboxSettings(cleanup_every_ms=0, ordered=ordered),
                handler=FunctionEventHandler(handle),
            ) as (worker, monitor),
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(worker.run(stop))
            yield monitor
            stop.set()

    @asynccontextmanager
    async def ingester(self) -> AsyncIterator[Monitor]:
        what = namespace(self.nats.url, self.store)
        async with share_mailbox(what.store, MAILBOX) as mailbox, open_namespace(what) as source:
            ingester = source.ingester(mailbox)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(ingester.run())
                yield source.monitor(ingester, mailbox)
                ingester.stop()


@pytest.fixture
async def services(server: NatsServer, messaging_database: str, tmp_path: Path) -> Services:
    services = Services(server.url, messaging_database, str(tmp_path / "archive.db"))
    await services.make_streams()
    return services


async def mailbox_metrics() -> list[Metric]:
    """Return the metrics of a mailbox in which everything has happened that has a label of its own."""
    policy = TopicPolicy(max_attempts=1, shards=1, shard_capacity=2)
    async with open_mailbox("memory:", default_policy=policy) as mailbox:
        recorded = RecordedMessages("shop.db", "main@local", waiting=1, oldest_at=0)
        outboxes = OutboxCounter(lambda: [recorded], lambda: 0)
        surfaces = SurfaceMetrics(mailbox.measure, 30_000, outboxes.measure)
        await mailbox.send_batch([NewMessage(topic="orders", payload=b"") for _ in range(3)])
        (message,) = await mailbox.receive_messages("orders", max_messages=1)
        await mailbox.nack_messages([message.receipt])
        await mailbox.pause_topic("orders")
        await mailbox.set_subscription("audit", SubscriptionFilter(("orders",)))
        await mailbox.set_schedule("nightly", ScheduleSpec("orders", "0 3 * * *"))
        surfaces.answered_http("GET", "/metrics", 200)
        surfaces.answered_grpc("send", "OK")
        worker = Worker()

        @worker.consumer("orders")
        async def handle(payload: bytes) -> None: ...

        await worker.run(mailbox, once=True)
        scheduler = make_scheduler(mailbox, [])
        return [*await surfaces.collect(), *worker.collect_metrics(), *scheduler.collect_metrics()]


class Slot:
    """A source of captured rows that has a state and no rows."""

    async def state(self) -> SlotState:
        return SlotState("postroom_outbox", True, 1, 2, 3)


async def capture_metrics() -> list[Metric]:
    """Return the metrics of a capture that published a row, without those of its relay."""

    async def nothing() -> list[Any]:
        return []

    unused: Any = None
    source: Any = Slot()
    settings = OutboxSettings()
    capture = OutboxCapture(unused, unused, unused, unused, unused, unused, unused, unused, settings)
    capture.published_by_type["order_placed"] += 1
    return [*await capture_monitor(capture, "sea", source, Monitor(nothing, nothing)).collect()]


async def admin_metrics() -> list[Metric]:
    """Return the metrics of an admin that granted a lease, and refused another."""
    async with serve_admin(LeaseStores(MemoryLeaseStore()), "127.0.0.1:0") as admin:
        await admin.control_plane.acquire_lease(lease_request())
        with pytest.raises(LeaseHeld):
            await admin.control_plane.acquire_lease(lease_request(runner="runner-2"))
        return [*await admin.control_plane.monitor.collect()]


async def collect(monitor: Monitor, name: str) -> dict[str, Metric]:
    """Return the metrics of a command that is ready, once the one of this name has a sample."""
    async with asyncio.timeout(240):
        while True:
            metrics = {each.name: each for each in await monitor.collect()}
            if name in metrics and metrics[name].samples and not await monitor.find_missing():
                return metrics
            await asyncio.sleep(0.05)


def check(text: str) -> str:
    """Return what promtool finds wrong, if it is installed."""
    if (promtool := shutil.which("promtool")) is None:
        return ""
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=240, check=False
    )
    return done.stdout + done.stderr


def described(text: str, metrics: Iterable[Metric]) -> list[str]:
    """Return name, type and labels of each metric, as Prometheus sees them."""
    labels = {each.name: ",".join(each.samples[0][0]) for each in metrics}
    types = [line.split()[2:] for line in text.splitlines() if line.startswith("# TYPE ")]
    return sorted(f"{name} {kind} {labels[name.removesuffix('_total')]}".rstrip() for name, kind in types)


async def test_names_types_and_labels_are_those_of_the_golden_file_and_promtool_finds_no_fault(
    services: Services, messaging_database: str, tmp_path: Path
) -> None:
    record(messaging_database, order_placed("o-1", 1))
    async with connect(services.nats, "test") as client:
        await client.jetstream().publish("shop.event.order_placed.v1", b"{}")
    observed = [
        *await mailbox_metrics(),
        *await admin_metrics(),
        *await proxy_metrics(),
        *await capture_metrics(),
    ]
    metrics = {each.name: each for each in observed}
    async with (
        services.relay() as relay,
        services.inbox(ordered=True) as inbox,
        services.ingester() as ingester,
    ):
        for monitor, name in (
            (relay, "postroom_outbox_published"),
            (inbox, "postroom_inbox_partition_queued"),
            (ingester, "postroom_ingest_lag_messages"),
        ):
            metrics = await collect(monitor, name) | metrics
    published = [({"context": "sea", "event_type": "order_placed"}, 1)]
    assert metrics["postroom_outbox_published"].samples == published
    following.build(services.store)
    with open_follower(services.store) as follower:
        await asyncio.to_thread(lambda: follower.run(once=True))
        metrics |= {each.name: each for each in await follower.monitor.collect()}
    text = write_metrics(metrics.values())[0].decode()
    assert described(text, metrics.values()) == GOLDEN.read_text("utf-8").splitlines()
    assert await asyncio.to_thread(check, text) == ""


async def test_what_needs_a_broker_is_not_ready_while_the_broker_hangs(
    services: Services, server: NatsServer
) -> None:
    async with services.relay() as relay, services.inbox() as inbox, services.ingester() as ingester:
        monitors = relay, inbox, ingester

        async def missing() -> list[list[str]]:
            return [await each.find_missing() for each in monitors]

        async with asyncio.timeout(240):
            while await missing() != [[], [], []]:
                await asyncio.sleep(0.1)
            server.pause()
            try:
                while await missing() != [["nats"], ["nats", "worker"], ["source"]]:
                    await asyncio.sleep(0.1)
            finally:
                server.resume()
            while await missing() != [[], [], []]:
                await asyncio.sleep(0.1)


def get(url: str) -> tuple[int, str, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=240) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read()


async def test_metrics_health_and_readiness_are_served_at_a_port_of_the_command() -> None:
    missing: list[str] = []

    async def collect() -> list[Metric]:
        return [Metric("postroom_x", "gauge", "X.", [({"a": "b"}, 2)])]

    async def find_missing() -> list[str]:
        return missing

    with serve_monitor(Monitor(collect, find_missing), 0) as url:
        status, content_type, body = await asyncio.to_thread(get, f"{url}/metrics")
        assert (status, content_type.split(";")[0]) == (200, "text/plain")
        assert b'postroom_x{a="b"} 2.0' in body
        assert await asyncio.to_thread(get, f"{url}/healthz") == (200, "application/json", b'{"ok": true}')
        status, _, body = await asyncio.to_thread(get, f"{url}/readyz")
        assert (status, json.loads(body)) == (200, {"degraded": False, "missing": []})
        missing.append("nats")
        status, _, body = await asyncio.to_thread(get, f"{url}/readyz?verbose")
        assert (status, json.loads(body)) == (503, {"degraded": True, "missing": ["nats"]})
        assert (await asyncio.to_thread(get, f"{url}/else"))[0] == 404


async def test_a_defect_of_the_metrics_is_answered_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> list[Metric]:
        raise KeyError("a defect")

    async def find_missing() -> list[str]:
        return []

    with serve_monitor(Monitor(fail, find_missing), 0) as url:
        assert (await asyncio.to_thread(get, f"{url}/metrics"))[0] == 500
        assert (await asyncio.to_thread(get, f"{url}/healthz"))[0] == 200
    assert "monitor.request_failed" in caplog.text


async def test_calls_over_http_and_grpc_are_measured_by_the_owner_and_counted_by_their_surface() -> None:
    surfaces = [open_http_surface("127.0.0.1:0", HttpSettings()), open_grpc_surface("127.0.0.1:0")]
    async with (
        open_mailbox("memory:") as mailbox,
        serve_mailbox(
            "memory:", mailbox, surfaces, access=unrestricted, measure=mailbox.measure
        ) as addresses,
    ):
        for address in addresses:
            async with connect_mailbox(address) as client:
                await client.send_message(NewMessage(topic="orders", payload=b""))
        await asyncio.to_thread(get, f"{addresses[0]}/v1/nothing")
        _, _, body = await asyncio.to_thread(get, f"{addresses[0]}/metrics")
    lines = body.decode().splitlines()
    for line in (
        "postroom_mailbox_up 1.0",
        "postroom_enqueue_seconds_count 2.0",
        'postroom_http_requests_total{method="POST",route="/v1/send",status="200"} 1.0',
        'postroom_grpc_requests_total{method="send",status="OK"} 1.0',
        'postroom_rejected_total{reason="E_NOT_FOUND"} 1.0',
    ):
        assert line in lines


async def test_only_the_owner_of_a_mailbox_reports_it_among_several_commands(tmp_path: Path) -> None:
    store = str(tmp_path / "store.db")
    async with share_mailbox(store) as owner, share_mailbox(store) as other:
        await other.send_message(NewMessage(topic="orders", payload=b""))
        measured = [each.name for each in await owner.measure_owned()]
        assert "postroom_enqueue_seconds" in measured
        assert await other.measure_owned() == []
        assert [each.name for each in await other.measure()] == measured
        (depth,) = [each for each in await other.measure() if each.name == "postroom_queue_depth"]
        assert [value for _, value in depth.samples] == [1]


async def test_silent_connections_to_the_monitor_keep_nobody_out() -> None:
    async def collect() -> list[Metric]:
        return []

    async def find_missing() -> list[str]:
        return []

    with serve_monitor(Monitor(collect, find_missing), 0) as url:
        address = url.removeprefix("http://").split(":")
        silent = [await asyncio.open_connection(*address) for _ in range(100)]
        answer = await asyncio.to_thread(urllib.request.urlopen, f"{url}/healthz", timeout=60)
        assert answer.status == 200
        answer.close()
        assert threading.active_count() < 64
        for reader, _ in silent[:60]:
            assert await reader.read() == b""
        for _, writer in silent:
            writer.transport.abort()
