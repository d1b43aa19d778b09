"""Capture by logical decoding beside polling: throughput, and latency from commit to stream, in one run."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from postroom.adapters.compose.maintenance import migrate_messaging
from postroom.adapters.compose.outbox import (
    CaptureColumns,
    CaptureSettings,
    MessagingSettings,
    NatsSettings,
    NewEvent,
    Outbox,
    OutboxSettings,
    create_slot,
    open_capture,
    open_relay,
)
from postroom.adapters.nats.connection import connect
from postroom.application.threads import background_task
from tests.benchmarks.figures import Figures, Stopwatch
from tests.benchmarks.messaging import (
    AGGREGATES,
    CONTEXT,
    EVENTS,
    PAYLOAD,
    RECORDED_AT_ONCE,
    make_streams,
    record_events,
    relay_all,
)
from tests.benchmarks.servers import nats_server
from tests.support.servers.nats import NatsServer
from tests.support.servers.postgres import PostgresServer

SINGLE_EVENTS = 200
PAUSE_SECONDS = 0.02
"""Between two single events."""
TABLE = """
CREATE TABLE events (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregate_type text DEFAULT 'order', aggregate_id text,
    event_type text DEFAULT 'order_placed', payload jsonb, occurred_at timestamptz DEFAULT now()
)
"""
CAPTURE = CaptureSettings(table="events", columns=CaptureColumns(occurred_at="occurred_at"))
SETTINGS = OutboxSettings(cleanup_every_ms=0)

Record = Callable[[psycopg.Connection[Any], int], None]


def insert(connection: psycopg.Connection[Any], n: int) -> None:
    """Insert a row into the table of the service."""
    row = (str(n % AGGREGATES), Jsonb(PAYLOAD))
    connection.execute("INSERT INTO events (aggregate_id, payload) VALUES (%s, %s)", row)


def record(*, notify: bool) -> Record:
    """Return a function that records an event in the outbox."""
    outbox = Outbox(notify=notify)

    def record_one(connection: psycopg.Connection[Any], n: int) -> None:
        event = NewEvent(
            aggregate_type="order",
            aggregate_id=str(n % AGGREGATES),
            event_type="order_placed",
            payload=PAYLOAD,
        )
        outbox.record(connection, event)

    return record_one


def capture_all(database: str, server: NatsServer) -> float:
    """Publish the rows of the table, and return the seconds it took."""

    async def main() -> float:
        messaging = MessagingSettings(database, CONTEXT)
        async with open_capture(messaging, CAPTURE, NatsSettings(server.url), SETTINGS) as capture:
            with Stopwatch() as capturing:
                await capture.run_once()
            assert capture.counts.published == EVENTS
            return capturing.seconds

    return asyncio.run(main())


@asynccontextmanager
async def running(opened: AbstractAsyncContextManager[Any]) -> AsyncIterator[None]:
    """Run a relay or a capture while the context lasts."""
    async with opened as service, background_task(service.run()):
        yield


async def measure_latencies(
    database: str, server: NatsServer, opened: AbstractAsyncContextManager[Any], record_one: Record
) -> list[float]:
    """Return the ms from the commit of single events to their arrival at a subscriber of the stream."""
    arrived: asyncio.Queue[float] = asyncio.Queue()

    async def note(_: object) -> None:
        arrived.put_nowait(time.perf_counter())

    async with running(opened), connect(NatsSettings(server.url), "benchmark") as client:
        await client.subscribe(f"{CONTEXT}.event.>", cb=note)
        latencies = []
        with psycopg.connect(database) as connection:
            for n in range(-10, SINGLE_EVENTS):
                record_one(connection, n)
                connection.commit()
                committed = time.perf_counter()
                latency = (await arrived.get() - committed) * 1_000
                if n >= 0:  # the first ones wait for the start
                    latencies.append(latency)
                await asyncio.sleep(PAUSE_SECONDS)
    return latencies


def _measure(figures: Figures, folder: Path, _: int) -> None:
    rates: dict[str, list[float]] = {"relay": [], "capture": []}
    latencies: dict[str, list[float]] = {"poll": [], "hints": [], "capture": []}
    with PostgresServer(folder / "postgres", {"wal_level": "logical"}) as postgres:
        for run in range(figures.runs):
            with nats_server(folder / f"capture-{run}") as nats:
                database = postgres.create_database()
                migrate_messaging(database)
                with psycopg.connect(database) as connection:
                    connection.execute(TABLE)
                messaging, target = MessagingSettings(database, CONTEXT), NatsSettings(nats.url)
                asyncio.run(create_slot(messaging, CAPTURE))
                asyncio.run(make_streams(nats))
                record_events(database, EVENTS)
                rates["relay"].append(EVENTS / relay_all(database, nats))
                with psycopg.connect(database) as connection:
                    for n in range(EVENTS):
                        insert(connection, n)
                        if n % RECORDED_AT_ONCE == RECORDED_AT_ONCE - 1:
                            connection.commit()
                rates["capture"].append(EVENTS / capture_all(database, nats))
                for name, opened, record_one in (
                    ("poll", open_relay(messaging, target, SETTINGS), record(notify=False)),
                    ("hints", open_relay(messaging, target, SETTINGS), record(notify=True)),
                    ("capture", open_capture(messaging, CAPTURE, target, SETTINGS), insert),
                ):
                    latencies[name] += asyncio.run(measure_latencies(database, nats, opened, record_one))
                with psycopg.connect(database) as connection:
                    connection.execute("SELECT pg_drop_replication_slot(%s)", [CAPTURE.slot])
    figures.add("outbox.capture", median(rates["capture"]), "events/s")
    figures.add("outbox.capture.relay", median(rates["relay"]), "events/s")
    ratios = [capture / relay for capture, relay in zip(rates["capture"], rates["relay"], strict=True)]
    figures.add("outbox.capture.of_relay", median(ratios), "times")
    for name, values in latencies.items():
        figures.add(f"outbox.capture.latency.{name}.p50", median(values), "ms")
        figures.add(f"outbox.capture.latency.{name}.p99", quantiles(values, n=100)[98], "ms")


MEASUREMENTS: dict[str, Callable[[Figures, Path, int], None]] = {"outbox.capture": _measure}
"""What is measured, by name."""
